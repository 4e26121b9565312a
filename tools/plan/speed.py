"""A model of training speed on one GPU: assumed shares of its datasheet, and the bytes and FLOPs that they
divide. Nothing is measured.

`python -m tools.bench train-traffic` counts a step's kernels and gives them to `step_ms`; the plan, which
may not take minutes, gives it sums that a test holds to that count. `python -m tools.bench train`
measures, on a GPU.

    W  the residual streams of all lanes of one micro-batch
"""

from __future__ import annotations

from collections.abc import Iterable

from laneformer.config import LaneformerConfig, flops_per_token
from tools.cards import CASES, INPUTS, Card
from tools.plan.sums import BF16

REFERENCE_TOKENS = 16_384  # of head_ms and step_ms in cards.toml
# W that the elementwise kernels of one layer move, forward and backward, by what arrives at the layer
STREAMS_MOVED = {"equal": 11.6, "own": 28.0, "delayed": 33.9}


def step_ms(
    config: LaneformerConfig, batch: int, seq_len: int, card: Card, case: str, elementwise_bytes: float,
    products: Iterable[tuple[float, float]],
) -> dict[str, float]:  # fmt: skip
    """Milliseconds of one micro-batch by part, one after the other; `products`: FLOPs and bytes
    of the layers' ones.
    """

    def at(name: str) -> float:
        return INPUTS.at(f"training.{name}", case)

    tokens, reference, h100 = batch * seq_len, LaneformerConfig.from_flavor("2b"), INPUTS.card("h100")
    attention_flops = tokens * (flops_per_token(config, seq_len) - 6 * (matrices(config) + head(config)))
    share = tokens / REFERENCE_TOKENS * head(config) / head(reference)
    memory_ms = 1e3 / (at("memory_share") * card.bandwidth_bytes_per_s)  # of a byte
    product_ms, attention_ms = (
        1e3 / (at(f"{name}_share") * card.peak_flops) for name in ("product", "attention")
    )
    return {
        "products": sum(max(flops * product_ms, size * memory_ms) for flops, size in products),
        "elementwise": elementwise_bytes * memory_ms,
        "attention": attention_flops * attention_ms,
        "head": at("head_ms") * share * h100.peak_flops / card.peak_flops,
        "step": at("step_ms") * share * h100.bandwidth_bytes_per_s / card.bandwidth_bytes_per_s,
    }


def tokens_per_s(config: LaneformerConfig, batch: int, seq_len: int, card: Card) -> dict[str, float]:
    """Tokens/s of one GPU in each case, without counting: the plan's."""
    wide = BF16 * batch * seq_len * config.num_lanes * config.hidden_size
    moved = wide * sum(STREAMS_MOVED[arriving(config, layer)] for layer in range(config.num_hidden_layers))
    products = [(6.0 * batch * seq_len * matrices(config), 0.0)]
    ms = {case: step_ms(config, batch, seq_len, card, case, moved, products) for case in CASES}
    return {case: 1e3 * batch * seq_len / sum(parts.values()) for case, parts in ms.items()}


def arriving(config: LaneformerConfig, layer: int) -> str:
    """What a layer reads: streams that are equal in all lanes, own ones, or own ones and delayed partials."""
    if config.adds_delayed(layer, "attention") or config.adds_delayed(layer, "mlp"):
        return "delayed"
    return "equal" if config.equal_streams(layer + 1) else "own"


def matrices(config: LaneformerConfig) -> int:
    """Weights of all layers' products."""
    return config.num_hidden_layers * config.parameter_count()["layer"]


def head(config: LaneformerConfig) -> int:
    return config.parameter_count()["lm_head"]
