"""A model of training speed on one H100: assumed rates, and the bytes and FLOPs that they
divide. Nothing is measured.

`python -m tools.bench train-traffic` counts a step's kernels and gives them to `step_ms`; the plan, which
may not take minutes, gives it sums that a test holds to that count. `python -m tools.bench train`
measures, on a GPU.

    W  the residual streams of all lanes of one micro-batch
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from laneformer.config import MODULES, Join, LaneformerConfig, flops_per_token

BF16 = 2
REFERENCE_TOKENS = 16_384
# W that the elementwise kernels of one layer move, forward and backward, by what arrives at the layer
STREAMS_MOVED = {"equal": 11.6, "own": 28.0, "delayed": 33.9}


@dataclass(frozen=True)
class Rates:
    """What one H100 is assumed to reach. `head_ms` and `step_ms` are of 16,384 tokens of the 2B model."""

    product_tflops: float
    """Matrix products, where their bytes are not the limit."""
    memory_tb_per_s: float
    """Elementwise kernels, and products whose bytes are the limit; the datasheet says 3.35."""
    attention_tflops: float
    """FlexAttention and flash attention, forward and backward; of the causal and windowed keys alone."""
    head_ms: float
    """Head and loss, whose products are computed twice."""
    step_ms: float
    """Optimizer, and communication that nothing hides."""


RATES = {
    "pessimistic": Rates(480, 2.5, 193, 40, 40),
    "middle": Rates(600, 2.8, 258, 32, 20),
    "optimistic": Rates(680, 3.0, 309, 28, 12),
}


def step_ms(
    config: LaneformerConfig, batch: int, seq_len: int, rates: Rates, elementwise_bytes: float,
    products: Iterable[tuple[float, float]],
) -> dict[str, float]:  # fmt: skip
    """Milliseconds of one micro-batch by part, one after the other; `products`: FLOPs and bytes
    of the layers' ones.
    """
    tokens, reference = batch * seq_len, LaneformerConfig.from_flavor("2b")
    attention_flops = tokens * (flops_per_token(config, seq_len) - 6 * (matrices(config) + head(config)))
    share = tokens / REFERENCE_TOKENS * head(config) / head(reference)
    return {
        "products": sum(max(f / rates.product_tflops, b / rates.memory_tb_per_s) for f, b in products) / 1e9,
        "elementwise": elementwise_bytes / rates.memory_tb_per_s / 1e9,
        "attention": attention_flops / rates.attention_tflops / 1e9,
        "head": rates.head_ms * share,
        "step": rates.step_ms * share,
    }


def tokens_per_s(config: LaneformerConfig, batch: int, seq_len: int) -> dict[str, float]:
    """Tokens/s of one H100 by each of `RATES`, without counting: the plan's."""
    wide = BF16 * batch * seq_len * config.num_lanes * config.hidden_size
    moved = wide * sum(STREAMS_MOVED[arriving(config, layer)] for layer in range(config.num_hidden_layers))
    products = [(6.0 * batch * seq_len * matrices(config), 0.0)]
    ms = {name: step_ms(config, batch, seq_len, rates, moved, products) for name, rates in RATES.items()}
    return {name: 1e3 * batch * seq_len / sum(parts.values()) for name, parts in ms.items()}


def arriving(config: LaneformerConfig, layer: int) -> str:
    """What a layer reads: streams that are equal in all lanes, own ones, or own ones and delayed partials."""
    if config.adds_delayed(layer, "attention") or config.adds_delayed(layer, "mlp"):
        return "delayed"
    equal = all(config.join(i, module) == Join.PRESENT for i in range(layer + 1) for module in MODULES)
    return "equal" if equal else "own"


def matrices(config: LaneformerConfig) -> int:
    """Weights of all layers' products."""
    return config.num_hidden_layers * config.parameter_count()["layer"]


def head(config: LaneformerConfig) -> int:
    return config.parameter_count()["lm_head"]
