"""Decode speed on one and several GPUs, and what the published figures imply."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from laneformer import LaneformerConfig
from tools.cards import Card, Inputs, tables
from tools.timeline import split_layer, token_s

NODE_GPUS = 8
PUBLISHED = ("usable_bandwidth", "published_tokens_per_s")  # rows of a card whose engine is published
Row = dict[str, Any]
Parts = tuple[tuple[float, float], float]  # seconds of attention and MLP of a layer, and of the head
# what differs in the config, modules by which sums are late
VARIANTS: dict[str, tuple[dict[str, Any], int]] = {
    "tensor_parallel": ({"broadcast_delay": 0}, 0),
    "ladder": ({"broadcast_delay": 0}, 1),
    "delay_1": ({"broadcast_delay": 1}, 0),
    "delay_2": ({"broadcast_delay": 2}, 0),
    "delay_2_no_early": ({"broadcast_delay": 2, "use_early_comm": False}, 0),
}
CONFIG = LaneformerConfig.from_flavor("2b")


def bytes_per_token() -> float:
    """Of the 2B in 16 bits, at the first position: all weights but the embedding table."""
    count = CONFIG.parameter_count()
    return 2 * (count["total"] - count["embedding"])


def usable(card: Card, gpus: int = NODE_GPUS) -> float:
    """Bytes a second that `gpus` read together, as the published ceilings count them."""
    return gpus * card.bandwidth_bytes_per_s * card.usable_bandwidth


def nodes(inputs: Inputs) -> list[Card]:
    """The cards of the published post, and those after them."""
    return inputs.cards("usable_bandwidth")


def ceilings(inputs: Inputs) -> list[Row]:
    """Tokens/s if nothing but reading weights took time: by the published 4 GB, and by the config's bytes."""
    rows = []
    for card in nodes(inputs):
        ceiling = usable(card) / bytes_per_token()
        published = None if math.isnan(card.published_tokens_per_s) else card.published_tokens_per_s
        rows.append({
            "gpus": f"{NODE_GPUS} x {card.name}",
            "published_bytes": usable(card) / inputs.at("published.bytes_per_token"),
            "config_bytes": ceiling,
            "published_speed": published,
            "published_share": published and published / ceiling,
        })  # fmt: skip
    return rows


def launch_limits(inputs: Inputs) -> list[Row]:
    """Tokens/s of a model that launches kernels for its operations, if nothing else took time."""
    per_layer = [inputs.at(f"launch.{name}") for name in ("kernels_per_layer", "fused_kernels_per_layer")]
    layer_s = inputs.at("launch.kernel_s") * inputs.at("launch.layers")
    return [{"kernels_per_layer": count, "tokens_per_s": 1 / (layer_s * count)} for count in per_layer]


def large_models(inputs: Inputs) -> list[Row]:
    """The published table, its rule (active bytes) with nominal bits, and the bits a weight that its figures imply."""
    reference, h200 = inputs.card("MI300X"), inputs.card("H200")
    bytes_per_s = reference.published_tokens_per_s * inputs.at("published.bytes_per_token")
    share = bytes_per_s / usable(reference)
    rows = []
    for name, model in tables()["large"].items():
        active, published = model["active_parameters"], model["published"]
        row: Row = {"model": name, "bits": model["bits"]}
        for card in nodes(inputs):
            row[card.name] = share * usable(card) * 8 / (active * model["bits"])
            if card.name in published:
                row[f"{card.name}_published"] = published[card.name]
        rows.append(row | {"implied_bits": share * usable(h200) * 8 / (active * published["H200"])})
    return rows


def fitted_parts(card: Card, gpus: int, layer_cost_s: float) -> Parts:
    """Weights read at the published ceilings' rate, and the same further time for every layer."""
    count, per_s = CONFIG.parameter_count(), usable(card, gpus)
    return split_layer(CONFIG, 2 * count["layer"] / per_s + layer_cost_s), 2 * count["lm_head"] / per_s


def fitted_layer_cost_s(inputs: Inputs, card: Card) -> float:
    """What a layer costs beside reading its weights, so that the published speed comes out."""
    from scipy.optimize import brentq

    link_s, published_s = inputs.at("link.custom_s"), 1 / card.published_tokens_per_s

    def excess_s(cost_s: float) -> float:
        module_s, head_s = fitted_parts(card, NODE_GPUS, cost_s)
        return token_s(CONFIG, module_s, link_s, head_s=head_s) - published_s

    return float(brentq(excess_s, 0, published_s, xtol=1e-15))


def speeds(parts: Parts, link_s: float) -> dict[str, float]:
    """Tokens/s of every variant."""
    module_s, head_s = parts
    return {
        name: 1
        / token_s(
            LaneformerConfig.from_flavor("2b", **values), module_s, link_s, head_s=head_s, modules_late=late
        )
        for name, (values, late) in VARIANTS.items()
    }


def scaling(inputs: Inputs, card: Card) -> list[Row]:
    """The 2B on 1 to 16 GPUs: tokens/s of tensor parallelism, Ladder and delays, by link.

    More GPUs than one node's are two nodes, whose link is the slower one; they would need a
    model of 16 lanes.
    """
    rows: list[Row] = []
    cost_s = fitted_layer_cost_s(inputs, card)
    for gpus in (1, 2, 4, 8, 16):
        parts = fitted_parts(card, gpus, cost_s)
        for link in {1: ["none"], 16: ["between_nodes"]}.get(gpus, ["nccl", "custom", "one_shot"]):
            link_s = 0.0 if gpus == 1 else inputs.at(f"link.{link}_s")
            place = {"gpus": gpus, "nodes": -(-gpus // NODE_GPUS), "link": link}
            rows.append(place | speeds(parts, link_s))
    return rows


def by_link(inputs: Inputs, card: Card) -> list[dict[str, float]]:
    """Tokens/s of every variant on one node whose link takes 0.5 to 200 us, twenty steps a decade."""
    parts = fitted_parts(card, NODE_GPUS, fitted_layer_cost_s(inputs, card))
    links_s = [0.5e-6 * 10 ** (step / 20) for step in range(53)]
    return [{"link_s": link_s, **speeds(parts, link_s)} for link_s in links_s]


def agent_loop(inputs: Inputs, speeds: Mapping[str, float]) -> list[Row]:
    """Seconds of an agent's task at each speed, decoding and the tools beside it, and what a node costs meanwhile."""
    tools_s = inputs.at("agent.tool_calls") * inputs.at("agent.tool_call_s")
    node_s_usd = NODE_GPUS * inputs.at("agent.gpu_hour_usd") / 3600
    rows = []
    for name, speed in speeds.items():
        decode_s = inputs.at("agent.tokens") / speed
        task_s = decode_s + tools_s
        row = {"speed": name, "tokens_per_s": speed, "decode_s": decode_s, "tools_s": tools_s}
        rows.append(row | {"decode_share": decode_s / task_s, "node_usd": task_s * node_s_usd})
    return rows
