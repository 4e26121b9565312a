"""Project the decode speed that bandwidth, link latency and delay allow: `python -m tools.roofline`.

A projection, not a measurement: it compares variants of one machine. Weights are read at the
published share of the bandwidth, and a fitted cost per layer gives the published speed of eight
GPUs (Kog's post of May 2026: 16-bit weights, batch 1, no speculation).
"""

from __future__ import annotations

import sys
from typing import Any, Literal

from rich.console import Console
from rich.markdown import Markdown

from laneformer.config import LaneformerConfig
from laneformer.engine.cuda.cards import Card, card_named
from laneformer.joins import MODULES, Join
from records.command import run_function
from tools.markdown import records

Row = dict[str, Any]

NODE_GPUS = 8
# of the datasheet's bandwidth, published as 30.7 TB/s of 8 x H200 and 33.6 TB/s of 8 x MI300X
USABLE_BANDWIDTH = {"H200": 0.8, "MI300X": 0.793}
PUBLISHED_TOKENS_PER_S = {"H200": 2100, "MI300X": 3000}
LINKS_S = {
    "none": 0.0,
    # assumed: a small all-reduce over NVLink
    "nccl": 8e-6,
    # published: own collectives take less
    "custom": 3e-6,
    # assumed: an exchange whose data says that it is ready
    "one_shot": 1e-6,
    # assumed: RDMA takes 10 to 30
    "between_nodes": 20e-6,
}
# what differs in the config, and by how many modules sums are late
VARIANTS: dict[str, tuple[dict[str, Any], int]] = {
    "tensor_parallel": ({"broadcast_delay": 0}, 0),
    "ladder": ({"broadcast_delay": 0}, 1),
    "delay_1": ({"broadcast_delay": 1}, 0),
    "delay_2": ({"broadcast_delay": 2}, 0),
    "delay_2_no_early": ({"broadcast_delay": 2, "use_early_comm": False}, 0),
}


# --- the recurrence


def find_awaited_layer(config: LaneformerConfig, layer: int, module: int) -> int | None:
    """Return how many layers ago the awaited outputs left: 0 for an all-reduce, None for none."""
    flushes = config.flush and (layer, module) == (config.num_hidden_layers - 1, 1)
    if config.join(layer, MODULES[module]) is Join.PRESENT or (
        flushes and config.delivers(layer, "mlp")
    ):
        return 0
    return config.broadcast_delay if config.adds_delayed(layer, MODULES[module]) else None


def token_s(
    config: LaneformerConfig,
    module_s: tuple[float, float],
    link_s: float,
    *,
    head_s: float = 0.0,
    modules_late: int,
    ends: int = 1,
) -> float:
    """Return the seconds of a token.

    Args:
        module_s: seconds of attention and of MLP.
        head_s: seconds of the head.
        link_s: seconds from a module's end until the other lanes can read its outputs.
        modules_late: modules between the join that needs outputs by the config and the one that
            awaits them (1: Ladder Residual).
        ends: further exchanges that nothing hides, such as the one that agrees on the token.
    """
    # all lanes are alike, so one lane's clock is everybody's. A delay of d layers hides a link as
    # slow as d layers; beyond, every (2 d + 1)th join waits for the excess, which gives the 2 d
    # joins after it the time that they lack
    clock, count = 0.0, 2 * config.num_hidden_layers
    # by running number of the module
    arrival: list[float] = []
    due = [find_awaited_layer(config, *divmod(number, 2)) for number in range(count)]
    for number in range(count):
        clock += module_s[number % 2]
        arrival.append(clock + link_s)
        late = due[number - modules_late] if number >= modules_late else None
        if late is not None:
            clock = max(clock, arrival[number - modules_late - 2 * late])
    # the head reads the finished stream
    last = [arrival[n] for n in range(count - modules_late, count) if due[n] is not None]
    return max([clock, *last]) + ends * link_s + head_s


def split_layer(config: LaneformerConfig, layer_s: float) -> tuple[float, float]:
    """Split a layer's seconds into attention and MLP by their weights."""
    attention = (
        2 * config.hidden_size * (config.query_size + config.head_dim * config.num_key_value_heads)
    )
    share = attention / config.parameter_count()["layer"]
    return share * layer_s, (1 - share) * layer_s


# --- the 2B on one and several GPUs


def tokens_per_s(variant: str, card: Card, gpus: int, link_s: float, layer_cost_s: float) -> float:
    """Return tokens/s; `layer_cost_s` is a layer's cost beside reading its weights."""
    switches, late = VARIANTS[variant]
    config = LaneformerConfig.from_flavor("2b", **switches)
    count = config.parameter_count()
    bytes_per_s = gpus * card.bandwidth_bytes_per_s * USABLE_BANDWIDTH[card.name]
    module_s = split_layer(config, 2 * count["layer"] / bytes_per_s + layer_cost_s)
    head_s = 2 * count["lm_head"] / bytes_per_s
    return 1 / token_s(config, module_s, link_s, head_s=head_s, modules_late=late)


def fit_layer_cost_s(card: Card) -> float:
    """Return the cost of a layer that gives the published speed, by bisection."""
    published = PUBLISHED_TOKENS_PER_S[card.name]
    low, high = 0.0, 1 / published
    # halvings: to the last bit of a float
    for _ in range(60):
        middle = (low + high) / 2
        fast = tokens_per_s("delay_2", card, NODE_GPUS, LINKS_S["custom"], middle) > published
        low, high = (middle, high) if fast else (low, middle)
    return middle


def project(gpu: str) -> list[Row]:
    """Return tokens/s of every variant on 1 to 16 GPUs, by link."""
    card = card_named(gpu)
    rows, cost_s = [], fit_layer_cost_s(card)
    # 16 are two nodes, and would need a model of 16 lanes
    for gpus in (1, 2, 4, 8, 16):
        for link in {1: ["none"], 16: ["between_nodes"]}.get(gpus, ["nccl", "custom", "one_shot"]):
            row: Row = {"gpus": gpus, "nodes": -(-gpus // NODE_GPUS), "link": link}
            speeds = {
                name: tokens_per_s(name, card, gpus, LINKS_S[link], cost_s) for name in VARIANTS
            }
            rows.append(row | speeds)
    return rows


def main(gpu: Literal["h200", "mi300x"] = "h200") -> None:
    """Project tokens/s from bandwidth, link latency and delay: arithmetic, not a measurement.

    Args:
        gpu: GPU of the projection over numbers of GPUs; the two whose speed is published
    """
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(Markdown(f"## Tokens/s of the 2B\n\n{records(project(gpu))}"))


if __name__ == "__main__":
    run_function("tools.roofline", main)
