"""What the kernels may be off by, computed: the model in float64 over the keys and values
that the kernels kept.

Two checks take the place of one loose tolerance. The reference attends to the kernels' own keys and values, so a number
that fp32 has rounded to the other side costs nothing later on; and each of those must be a 16-bit rounding of the
reference's, give or take the error of fp32. That error is PyTorch's own: the same model in float32. The kernels sum in
another order, which changes an error's value but not its size: four times PyTorch's largest is allowed, as of the CPU
engine (tests/laneformer/engine/assets.py).

    T positions   K KV heads   d head dimension   V vocabulary
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from laneformer.engine.cuda.memory import TORCH_TYPES

ALLOWED = 4  # times PyTorch's error


class KeptCache:
    """model.py's cache with the kernels' own keys and values, per layer (1, K, T, d); keeps
    what it was offered.
    """

    length = 0

    def __init__(self, kept: list[tuple[Tensor, Tensor]]):
        self.kept, self.offered = kept, list[Tensor]()

    def update(self, key: Tensor, value: Tensor, layer_idx) -> tuple[Tensor, Tensor]:
        self.offered.append(torch.stack((key, value)))
        keys, values = self.kept[layer_idx]
        return keys.to(key), values.to(value)


@dataclass
class Expected:
    """Logits (T, V), how far fp32 may be off, and the 16-bit numbers between which the kept ones (2,
    K, T, d) lie.
    """

    logits: Tensor
    tolerance: float
    least: list[Tensor]
    most: list[Tensor]


def read_keys_and_values(emulated, layer, position) -> Tensor:
    """The key and value of one position, as the kernels keep them: float64 (2, K, d)."""
    splits, slots = emulated.geometry.splits, emulated.geometry.kv_slots(layer)
    heads = [
        m.kv_layer(layer)[:, :, position % splits, position // splits % slots]
        for m in emulated.memories
    ]
    bits = torch.cat(heads).flatten(0, 1).movedim(1, 0)
    return bits.contiguous().view(TORCH_TYPES[emulated.geometry.half]).double()


def read_one_by_one(emulated, ids: list[int]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """A launch for each token: logits (T, V), and all keys and values (1, K, T, d) of each layer."""
    layers, rows = range(emulated.config.num_hidden_layers), []
    kept: list[list[Tensor]] = [[] for _ in layers]
    for position, token in enumerate(ids):
        emulated.seed = position
        rows.append(emulated.logits([(token, position, 0)]))
        for layer in layers:
            kept[layer].append(read_keys_and_values(emulated, layer, position))
    stacked = [torch.stack(of_layer, 2)[:, None] for of_layer in kept]
    return torch.cat(rows), [(keys, values) for keys, values in stacked]


def compute_expected(emulated, ids: list[int], kept: list[tuple[Tensor, Tensor]]) -> Expected:
    """The reference, and how far from it fp32 may be."""

    def run(model):
        cache = KeptCache(kept)
        logits = model(torch.tensor([ids]), cache)[0]
        return logits.double(), torch.stack(cache.offered)[:, :, 0].double()

    logits, offered = run(emulated.model)
    rounded_logits, rounded = run(copy.deepcopy(emulated.model).float())
    # one bound for a layer's keys and one for its values
    off = ALLOWED * (rounded - offered).abs().amax((2, 3, 4), keepdim=True)
    dtype = TORCH_TYPES[emulated.geometry.half]
    least, most = ((offered + sign * off).to(dtype).double() for sign in (-1, 1))
    return Expected(
        logits, ALLOWED * float((rounded_logits - logits).abs().max()), list(least), list(most)
    )
