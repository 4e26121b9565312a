"""What the kernels may be off by, computed: the model in float64 over the keys and values
that the kernels kept.

Two checks take the place of one loose tolerance. The reference attends to the kernels' own keys and values, so a number
that fp32 has rounded to the other side costs nothing later on; and each of those must be a 16-bit rounding of the
reference's, give or take the error of fp32. That error is found by making it: the reference is computed again with an
error in each of its numbers, random in sign and as large as fp32 can be expected to make it. That is sqrt(n) u sum
|terms| for n terms in any order (Higham and Mary 2019, A New Approach to Probabilistic Rounding Error Analysis;
u = 2^-24). The kernels' own errors are of random size too, so they stay below the largest of a few such draws.

    T positions   K KV heads   d head dimension   V vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from laneformer.engine.cuda.memory import TORCH_TYPES
from laneformer.model import LaneAttention, Laneformer, LaneLinear, LaneRMSNorm, LMHead
from tests.laneformer.cuda.emulated import EmulatedPasses

UNIT = 2.0**-24  # half a step of fp32 at 1
AROUND = (
    32  # roundings of a term beside its sum: norm scale, 1 / rms, SiLU, joins, angles of positions below 32
)
DRAWS = 8


class KeptCache:
    """model.py's cache with the kernels' own keys and values, per layer (1, K, T, d); keeps
    what it was offered.
    """

    length = 0

    def __init__(self, kept: list[tuple[Tensor, Tensor]]):
        self.kept, self.offered = kept, list[Tensor]()

    def update(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        self.offered.append(torch.stack((key, value)))
        return self.kept[layer_idx]


@dataclass
class Expected:
    """Logits (T, V), how far fp32 may be off, and the 16-bit numbers between which the kept ones (2,
    K, T, d) lie.
    """

    logits: Tensor
    tolerance: float
    least: list[Tensor]
    most: list[Tensor]


def kept_at(emulated: EmulatedPasses, layer: int, position: int) -> Tensor:
    """The key and value of one position, as the kernels keep them: float64 (2, K, d)."""
    splits, slots = emulated.geometry.splits, emulated.geometry.kv_slots(layer)
    heads = [
        m.kv_layer(layer)[:, :, position % splits, position // splits % slots] for m in emulated.memories
    ]
    bits = torch.cat(heads).flatten(0, 1).movedim(1, 0)
    return bits.contiguous().view(TORCH_TYPES[emulated.geometry.half]).double()


def read_one_by_one(emulated: EmulatedPasses, ids: list[int]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """A launch for each token: logits (T, V), and all keys and values (1, K, T, d) of each layer."""
    layers, rows = range(emulated.config.num_hidden_layers), []
    kept: list[list[Tensor]] = [[] for _ in layers]
    for position, token in enumerate(ids):
        emulated.seed = position
        rows.append(emulated.logits([(token, position, 0)]))
        for layer in layers:
            kept[layer].append(kept_at(emulated, layer, position))
    stacked = [torch.stack(of_layer, 2)[:, None] for of_layer in kept]
    return torch.cat(rows), [(keys, values) for keys, values in stacked]


def expected(emulated: EmulatedPasses, ids: list[int], kept: list[tuple[Tensor, Tensor]]) -> Expected:
    """The reference, and how far from it fp32 may be."""

    def run() -> tuple[Tensor, Tensor]:
        cache: Any = KeptCache(kept)
        logits = emulated.model(torch.tensor([ids]), cache)[0]
        return logits, torch.stack(cache.offered)[:, :, 0]

    logits, offered = run()
    draws = []
    for seed in range(DRAWS):
        with worst_roundings(emulated.model, torch.Generator().manual_seed(seed)):
            draws.append(run())
    tolerance = max(float((drawn - logits).abs().max()) for drawn, _ in draws)
    # one bound for a layer's keys and one for its values
    off = torch.stack([(drawn - offered).abs().amax((2, 3, 4), keepdim=True) for _, drawn in draws]).amax(0)
    dtype = TORCH_TYPES[emulated.geometry.half]
    least, most = ((offered + sign * off).to(dtype).double() for sign in (-1, 1))
    return Expected(logits, tolerance, list(least), list(most))


@contextmanager
def worst_roundings(model: Laneformer, generator: torch.Generator) -> Iterator[None]:
    """The model with an error such as fp32 makes in each number that it computes."""

    def off(size: Tensor, roundings: int) -> Tensor:
        signs = 2 * torch.randint(0, 2, size.shape, generator=generator) - 1
        return math.sqrt(roundings + AROUND) * UNIT * size * signs

    def linear(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        (x,), weight = inputs, module.weight
        return output + off(torch.einsum("bsli,loi->bslo", x.abs(), weight.abs()), x.shape[-1])

    def norm(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        return output + off(output.abs(), output.shape[-1])

    def head(module: nn.Module, inputs: tuple[Tensor, LaneRMSNorm, Tensor], output: Tensor) -> Tensor:
        x, weight = (
            inputs[1](inputs[0]),
            inputs[2].view(module.shape) if module.weight is None else module.weight,
        )
        return output + off(torch.einsum("bsli,loi->bslo", x.abs(), weight.abs()).flatten(2), x.shape[-1])

    hooks: dict[type, Any] = {LaneLinear: linear, LaneRMSNorm: norm, LMHead: head}
    handles = [m.register_forward_hook(hooks[type(m)]) for m in model.modules() if type(m) in hooks]
    attentions: list[Any] = [m for m in model.modules() if isinstance(m, LaneAttention)]
    for attention in attentions:  # the products of queries and keys are off by no more than the queries are

        def attend(
            query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, exact: Any = attention.attend
        ) -> Any:
            output = exact(query, key, value, mask)
            return output + off(exact(query, key, value.abs(), mask), query.shape[-1] + key.shape[-2])

        attention.attend = attend
    yield
    for handle in handles:
        handle.remove()
    for attention in attentions:
        del attention.attend
