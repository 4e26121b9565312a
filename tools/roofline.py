"""`python -m tools.roofline`: decode speed that bandwidth, link latency and the delay allow, as a projection.

Nothing here was measured on a GPU. Weights are read at the share of the bandwidth that the published ceilings take,
and every layer costs so much more that the published speed of eight GPUs comes out, the same for every variant: this
compares variants of that machine, and predicts none.

When a token is complete follows from one recurrence (token_s), in which all lanes are alike, so one lane's clock is
everybody's. A module takes its time, its outputs reach the other lanes one link latency after it has finished, and
a join waits for what it adds (config.Join). A delay of d layers hides a link as slow as d layers; beyond, every
(2 d + 1)th join waits for the excess, which gives the 2 d joins after it the time that they lack.

"Published" is Kog's post of May 2026: eight GPUs, 16-bit weights, batch 1, no speculation.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Literal

import tyro
from rich.console import Console
from rich.markdown import Markdown

from laneformer.config import MODULES, Join, LaneformerConfig
from laneformer.engine.cuda.cards import Card, card_named
from tools.markdown import records

Row = dict[str, Any]

CONFIG = LaneformerConfig.from_flavor("2b")
NODE_GPUS = 8
# of the datasheet's bandwidth: published, as 30.7 TB/s of 8 x H200 and 33.6 TB/s of 8 x MI300X; assumed of their
# successors
USABLE_BANDWIDTH = {"H200": 0.8, "MI300X": 0.793, "Rubin": 0.8, "MI450": 0.793}
PUBLISHED_TOKENS_PER_S = {"H200": 2100, "MI300X": 3000}
PUBLISHED_BYTES_PER_TOKEN = 4e9  # "4 GB of weights"; the config has 4.44 GB without the embedding table
# published, on MI300X: launching a kernel and cleaning up after it; layers; kernels of a layer, and fused
KERNEL_S, LAUNCHED_LAYERS, KERNELS_PER_LAYER = 4.5e-6, 25, (10, 5)
LINKS_S = {
    "none": 0.0,
    "nccl": 8e-6,  # assumed: a small all-reduce over NVLink
    "custom": 3e-6,  # published: own collectives take less
    "one_shot": 1e-6,  # assumed: an exchange whose data says that it is ready
    "between_nodes": 20e-6,  # assumed: RDMA takes 10 to 30
}
# published: a model's active parameters, nominal bits of a weight, tokens/s on H200s and MI300Xs
LARGE_MODELS = {
    "Qwen3-Coder-Next": (3e9, 8, 3650, 4000),
    "GPT-OSS-120B": (5.1e9, 4.25, 2200, 2400),
    "DeepSeek-V4-Flash": (13e9, 8, 1160, 1270),
    "Kimi-K2.6": (32e9, 4, 325, 355),
}
# of an agent's task: tokens (published); tools' calls, seconds of one and a GPU-hour's price (assumed)
TASK_TOKENS, TOOL_CALLS, TOOL_CALL_S, GPU_HOUR_USD = 50_000, 50, 0.5, 3.0
# what differs in the config, and by how many modules sums are late
VARIANTS: dict[str, tuple[dict[str, Any], int]] = {
    "tensor_parallel": ({"broadcast_delay": 0}, 0),
    "ladder": ({"broadcast_delay": 0}, 1),
    "delay_1": ({"broadcast_delay": 1}, 0),
    "delay_2": ({"broadcast_delay": 2}, 0),
    "delay_2_no_early": ({"broadcast_delay": 2, "use_early_comm": False}, 0),
}


# --- the recurrence


def awaited(config: LaneformerConfig, layer: int, module: int) -> int | None:
    """How many layers ago the outputs left that a join awaits: 0 for an all-reduce, None where it awaits nothing."""
    flushes = config.flush and (layer, module) == (config.num_hidden_layers - 1, 1)
    if config.join(layer, MODULES[module]) is Join.PRESENT or (flushes and config.delivers(layer, "mlp")):
        return 0
    return config.broadcast_delay if config.adds_delayed(layer, MODULES[module]) else None


def token_s(
    config: LaneformerConfig,
    module_s: tuple[float, float],
    link_s: float,
    *,
    head_s: float = 0.0,
    modules_late: int = 0,
    ends: int = 1,
) -> float:
    """Seconds of a token.

    module_s: of attention and MLP. head_s: of the head. link_s: from the end of a module until the other lanes can
    read its outputs.
    modules_late: outputs are awaited that many modules after the join that needs them by the config (1: Ladder
    Residual). ends: further exchanges that nothing hides, such as the one that agrees on the token.
    """
    clock, count = 0.0, 2 * config.num_hidden_layers
    arrival: list[float] = []  # by running number of the module
    due = [awaited(config, *divmod(number, 2)) for number in range(count)]
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
    """Seconds of attention and MLP: those of a layer, by their weights."""
    attention = 2 * config.hidden_size * (config.query_size + config.head_dim * config.num_key_value_heads)
    share = attention / config.parameter_count()["layer"]
    return share * layer_s, (1 - share) * layer_s


# --- the 2B on one and several GPUs


def usable_bytes_per_s(card: Card, gpus: int = NODE_GPUS) -> float:
    """What `gpus` read together, as the published ceilings count it."""
    return gpus * card.bandwidth_bytes_per_s * USABLE_BANDWIDTH[card.name]


def tokens_per_s(variant: str, card: Card, gpus: int, link_s: float, layer_cost_s: float) -> float:
    """layer_cost_s: of a layer, beside reading its weights."""
    switches, late = VARIANTS[variant]
    config = LaneformerConfig.from_flavor("2b", **switches)
    count, bytes_per_s = CONFIG.parameter_count(), usable_bytes_per_s(card, gpus)
    module_s = split_layer(config, 2 * count["layer"] / bytes_per_s + layer_cost_s)
    head_s = 2 * count["lm_head"] / bytes_per_s
    return 1 / token_s(config, module_s, link_s, head_s=head_s, modules_late=late)


def fit_layer_cost_s(card: Card) -> float:
    """The cost of a layer with which the published speed comes out, by bisection."""
    published = PUBLISHED_TOKENS_PER_S[card.name]
    low, high = 0.0, 1 / published
    for _ in range(60):  # halvings: to the last bit of a float
        middle = (low + high) / 2
        fast = tokens_per_s("delay_2", card, NODE_GPUS, LINKS_S["custom"], middle) > published
        low, high = (middle, high) if fast else (low, middle)
    return middle


def scaling(card: Card) -> list[Row]:
    """Tokens/s of every variant on 1 to 16 GPUs, by link. 16 are two nodes, and would need a model of 16 lanes."""
    rows, cost_s = [], fit_layer_cost_s(card)
    for gpus in (1, 2, 4, 8, 16):
        for link in {1: ["none"], 16: ["between_nodes"]}.get(gpus, ["nccl", "custom", "one_shot"]):
            row: Row = {"gpus": gpus, "nodes": -(-gpus // NODE_GPUS), "link": link}
            speeds = {name: tokens_per_s(name, card, gpus, LINKS_S[link], cost_s) for name in VARIANTS}
            rows.append(row | speeds)
    return rows


# --- what the published figures imply


def ceilings() -> list[Row]:
    """Tokens/s if nothing but reading weights took time: by the published 4 GB, and by the config's bytes."""
    count = CONFIG.parameter_count()
    bytes_per_token = 2 * (count["total"] - count["embedding"])
    rows = []
    for name in USABLE_BANDWIDTH:
        bytes_per_s, published = usable_bytes_per_s(card_named(name)), PUBLISHED_TOKENS_PER_S.get(name)
        rows.append({
            "gpus": f"{NODE_GPUS} x {name}",
            "published_bytes": bytes_per_s / PUBLISHED_BYTES_PER_TOKEN,
            "config_bytes": bytes_per_s / bytes_per_token,
            "published_speed": published,
            "published_share": published and published * bytes_per_token / bytes_per_s,
        })  # fmt: skip
    return rows


def launch_limits() -> list[Row]:
    """Tokens/s of a model that launches kernels for its operations, if nothing else took time."""
    return [
        {"kernels_per_layer": count, "tokens_per_s": 1 / (KERNEL_S * LAUNCHED_LAYERS * count)}
        for count in KERNELS_PER_LAYER
    ]


def large_models() -> list[Row]:
    """Tokens/s by the published rule (active bytes at the 2B's share), and the bits a weight that its table implies."""
    reference = PUBLISHED_TOKENS_PER_S["MI300X"] * PUBLISHED_BYTES_PER_TOKEN
    share = reference / usable_bytes_per_s(card_named("MI300X"))
    rows = []
    for name, (active, bits, h200, mi300x) in LARGE_MODELS.items():
        row: Row = {"model": name, "bits": bits}
        published = {"H200": h200, "MI300X": mi300x}
        for gpu in USABLE_BANDWIDTH:
            row[gpu] = share * usable_bytes_per_s(card_named(gpu)) * 8 / (active * bits)
            row |= {f"{gpu}_published": published[gpu]} if gpu in published else {}
        row["implied_bits"] = share * usable_bytes_per_s(card_named("H200")) * 8 / (active * h200)
        rows.append(row)
    return rows


def agent_task(speeds: Mapping[str, float]) -> list[Row]:
    """Seconds of an agent's task at each speed, decoding and the tools beside it, and what a node costs meanwhile."""
    tools_s, rows = TOOL_CALLS * TOOL_CALL_S, []
    for name, speed in speeds.items():
        decode_s = TASK_TOKENS / speed
        task_s = decode_s + tools_s
        row = {"speed": name, "tokens_per_s": speed, "decode_s": decode_s, "tools_s": tools_s}
        usd = task_s * NODE_GPUS * GPU_HOUR_USD / 3600
        rows.append(row | {"decode_share": decode_s / task_s, "node_usd": usd})
    return rows


def project(gpu: str) -> dict[str, list[Row]]:
    """The tables by their titles."""
    card = card_named(gpu)
    rows = scaling(card)
    (node,) = (row for row in rows if (row["gpus"], row["link"]) == (NODE_GPUS, "custom"))
    speeds = {"an API today": 100.0}
    speeds |= {
        f"8 x {card.name}, {name.replace('_', ' ')}": node[name] for name in ("tensor_parallel", "delay_2")
    }
    speeds |= {f"published, 8 x {name}": speed for name, speed in PUBLISHED_TOKENS_PER_S.items()}
    return {
        "Ceilings, tokens/s": ceilings(),
        "Kernels launched for the operations of a layer": launch_limits(),
        "Large models, tokens/s at the published share of bandwidth": large_models(),
        "Tokens/s of the 2B": rows,
        "An agent's task": agent_task(speeds),
    }


def main(gpu: Literal["h200", "mi300x"] = "h200") -> None:
    """Projects tokens/s by bandwidth, link latency and delay: arithmetic, not a measurement.

    gpu: of the projection over numbers of GPUs; the two whose speed is published.
    """
    console = Console(width=None if sys.stdout.isatty() else 160)
    for title, rows in project(gpu).items():
        console.print(Markdown(f"## {title}\n\n{records(rows)}"))


if __name__ == "__main__":
    tyro.cli(main, prog="python -m tools.roofline")
