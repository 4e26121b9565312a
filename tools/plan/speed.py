"""A model of training speed on one GPU: assumed shares of its datasheet, and the bytes and FLOPs that they
divide. Nothing is measured.

The bytes that a layer moves were counted in the compiler's code (docs/benchmarks/2026-11-24-train-traffic.md).
`python -m tools.bench train` measures, on a GPU.

    W  the residual streams of all lanes of one micro-batch
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from laneformer.config import LaneformerConfig
from laneformer.flops import flops_per_token
from tools.cards import CASES, INPUTS, Card
from tools.plan.sums import BF16

REFERENCE_TOKENS = 16_384  # of head_ms and step_ms in cards.toml
# W that the elementwise kernels of one layer move, forward and backward, by float8 recipe and what arrives
# at the layer
STREAMS_MOVED = {
    "": {"equal": 11.6, "own": 28.0, "delayed": 33.9},
    "rowwise": {"equal": 12.5, "own": 34.5, "delayed": 40.4},
    "tensorwise": {"equal": 15.2, "own": 37.6, "delayed": 43.4},
}


def step_ms(
    config: LaneformerConfig, batch: int, seq_len: int, card: Card, case: str, elementwise_bytes: float,
    products: Iterable[tuple[float, float, bool]],
) -> dict[str, float]:  # fmt: skip
    """Milliseconds of one micro-batch by part, one after the other; `products`: FLOPs and bytes of the
    layers' ones, and whether they are float8's.
    """

    def at(name: str) -> float:
        return INPUTS.at(f"training.{name}", case)

    tokens, reference, h100 = batch * seq_len, LaneformerConfig.from_flavor("2b"), INPUTS.card("h100")
    attention_flops = tokens * (flops_per_token(config, seq_len) - 6 * (matrices(config) + head(config)))
    share = tokens / REFERENCE_TOKENS * head(config) / head(reference)
    memory_ms = 1e3 / (at("memory_share") * card.bandwidth_bytes_per_s)  # of a byte
    product_ms, float8_ms, attention_ms = (
        1e3 / (at(f"{name}_share") * card.peak_flops) for name in ("product", "float8", "attention")
    )
    return {
        "products": sum(
            max(flops * (float8_ms if float8 else product_ms), size * memory_ms)
            for flops, size, float8 in products
        ),
        "elementwise": elementwise_bytes * memory_ms,
        "attention": attention_flops * attention_ms,
        "head": at("head_ms") * share * h100.peak_flops / card.peak_flops,
        "step": at("step_ms") * share * h100.bandwidth_bytes_per_s / card.bandwidth_bytes_per_s,
    }


def tokens_per_s(
    config: LaneformerConfig, batch: int, seq_len: int, card: Card, float8: str = ""
) -> dict[str, float]:
    """Tokens/s of one GPU in each case, without counting: the plan's. float8: the recipe, if there is one."""
    wide = BF16 * batch * seq_len * config.num_lanes * config.hidden_size
    streams = STREAMS_MOVED[float8]
    moved = wide * sum(streams[arriving(config, layer)] for layer in range(config.num_hidden_layers))
    flops, in_float8 = 6.0 * batch * seq_len, feed_forward(config) if float8 else 0
    products = [(flops * (matrices(config) - in_float8), 0.0, False), (flops * in_float8, 0.0, True)]
    ms = {case: step_ms(config, batch, seq_len, card, case, moved, products) for case in CASES}
    return {case: 1e3 * batch * seq_len / sum(parts.values()) for case, parts in ms.items()}


def by_type(config: LaneformerConfig, batch: int, seq_len: int, card: Card) -> list[dict[str, Any]]:
    """Of bfloat16 and each float8 recipe: tokens/s by case, the central case's MFU in the bf16 peak (in
    float8, too), and the lane tax, which is what the same matrices without a delay are faster, in per cent of
    their speed.
    """
    rows, flops = [], flops_per_token(config, seq_len)
    dense = dataclasses.replace(config, broadcast_delay=0)
    for float8 in STREAMS_MOVED:
        rates, at_once = (tokens_per_s(each, batch, seq_len, card, float8) for each in (config, dense))
        rows.append({
            "type": f"float8 {float8}" if float8 else "bfloat16", "tokens_per_s": rates,
            "delay_0_tokens_per_s": at_once, "mfu_percent": 100 * rates["central"] * flops / card.peak_flops,
            "lane_tax_percent": 100 * (1 - rates["central"] / at_once["central"]),
        })  # fmt: skip
    return rows


def type_table(by_type: list[dict[str, Any]], gpu: str) -> tuple[str, list[str], list[list[str]]]:
    """Title, columns and rows of what `by_type` returns."""

    def speeds(by_case: dict[str, float]) -> str:
        low, middle, high = by_case.values()
        return f"{middle:,.0f} ({low:,.0f} to {high:,.0f})"

    rows = [
        [row["type"], speeds(row["tokens_per_s"]), f"{row['mfu_percent']:.1f}%",
         speeds(row["delay_0_tokens_per_s"]), f"{row['lane_tax_percent']:.1f}%"]
        for row in by_type
    ]  # fmt: skip
    title = f"by the type of w1, w2, w3 (model.converters): calculated for one {gpu}, not measured"
    return title, ["", "tokens/s", "MFU, of the bf16 peak", "delay 0, tokens/s", "lane tax"], rows


def gb(value: float) -> str:
    return f"{value / 1e9:,.2f} GB"


def traffic_table(phase: dict[str, Any], gbit_per_s: float) -> tuple[str, list[str], list[list[str]]]:
    """Title, columns and rows of what `sums.traffic` says of some meshes."""
    meshes, step_s = phase["traffic"].values(), phase["compute"]["step_s"]
    names = (
        "lanes_bytes",
        "all_gather_bytes",
        "reduce_scatter_bytes",
        "all_reduce_bytes",
        "nic_bytes",
        "nic_bytes_worst",
    )
    rows = [[n.removesuffix("_bytes").replace("_", " "), *(gb(mesh[n]) for mesh in meshes)] for n in names]
    rows.insert(
        1, ["of one layer in a micro-batch", *(gb(mesh["lanes_of_a_layer_bytes"]) for mesh in meshes)]
    )
    for key, label in (
        ("lanes_s", "sums of lanes over NVLink"),
        ("nvlink_s", "shards over NVLink"),
        ("nic_s", "over the network"),
        ("nic_s_worst", "at worst"),
    ):
        cells = [f"{1e3 * mesh[key]:.0f} ms, {100 * mesh[key] / step_s:.0f}%" for mesh in meshes]
        rows.append([f"{label}, of a step", *cells])
    rows.append(["ranks in the longest ring", *(str(mesh["ring_ranks"]) for mesh in meshes)])
    title = f"received by a GPU in a step ({gbit_per_s:g} Gb/s a GPU), before any overlap"
    return title, ["mesh", *phase["traffic"]], rows


def arriving(config: LaneformerConfig, layer: int) -> str:
    """What a layer reads: streams that are equal in all lanes, own ones, or own ones and delayed partials."""
    if config.adds_delayed(layer, "attention") or config.adds_delayed(layer, "mlp"):
        return "delayed"
    return "equal" if config.equal_streams(layer + 1) else "own"


def matrices(config: LaneformerConfig) -> int:
    """Weights of all layers' products."""
    return config.num_hidden_layers * config.parameter_count()["layer"]


def feed_forward(config: LaneformerConfig) -> int:
    """Weights of w1, w2 and w3 in all layers."""
    return 3 * config.num_hidden_layers * config.hidden_size * config.intermediate_size


def head(config: LaneformerConfig) -> int:
    return config.parameter_count()["lm_head"]
