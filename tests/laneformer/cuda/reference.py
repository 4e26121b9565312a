"""Computed error bounds for the kernels: the model in float64 over the kernels' own keys and values.

T positions   K KV heads   d head dimension   V vocabulary
"""

# Two checks replace one loose tolerance. The reference attends to the kernels' own keys and values,
# so one that fp32 rounded to the other side costs nothing later. Each of those must be a 16-bit
# rounding of the reference's, within the error of fp32, measured as PyTorch's in float32. Another
# order of sums changes an error's value but not its size, so four times PyTorch's largest error is
# allowed, as for the CPU engine (tests/laneformer/engine/assets.py).

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from laneformer.engine.cuda.memory import TORCH_TYPES

ALLOWED = 4  # times PyTorch's error


class StoredCache:
    """A cache for model.py that returns the kernels' keys and values (1, K, T, d) and records the model's."""

    length = 0

    def __init__(self, stored: list[tuple[Tensor, Tensor]]):
        self.stored, self.offered = stored, list[Tensor]()

    def update(self, key: Tensor, value: Tensor, layer_idx) -> tuple[Tensor, Tensor]:
        self.offered.append(torch.stack((key, value)))
        # attend to what the kernels stored, not to what was just computed
        keys, values = self.stored[layer_idx]
        return keys.to(key), values.to(value)


@dataclass
class Expected:
    """Logits (T, V), the tolerance of fp32, and bounds of the 16-bit keys and values (2, K, T, d)."""

    logits: Tensor
    tolerance: float
    least: list[Tensor]
    most: list[Tensor]


def read_keys_and_values(emulated, layer, position) -> Tensor:
    """Return the kernels' key and value of one position: float64 (2, K, d)."""
    splits, slots = emulated.geometry.splits, emulated.geometry.kv_slots(layer)
    heads = [
        m.kv_layer(layer)[:, :, position % splits, position // splits % slots]
        for m in emulated.memories
    ]
    bits = torch.cat(heads).flatten(0, 1).movedim(1, 0)
    return bits.contiguous().view(TORCH_TYPES[emulated.geometry.half]).double()


def read_one_by_one(emulated, ids: list[int]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Launch once per token; return logits (T, V) and each layer's keys and values (1, K, T, d)."""
    layers, rows = range(emulated.config.num_hidden_layers), []
    stored: list[list[Tensor]] = [[] for _ in layers]
    for position, token in enumerate(ids):
        # another order of threads for each token
        emulated.seed = position
        rows.append(emulated.logits([(token, position, 0)]))
        for layer in layers:
            stored[layer].append(read_keys_and_values(emulated, layer, position))
    stacked = [torch.stack(of_layer, 2)[:, None] for of_layer in stored]
    return torch.cat(rows), [(keys, values) for keys, values in stacked]


def compute_expected(emulated, ids: list[int], stored: list[tuple[Tensor, Tensor]]) -> Expected:
    def run(model):
        cache = StoredCache(stored)
        logits = model(torch.tensor([ids]), cache)[0]
        return logits.double(), torch.stack(cache.offered)[:, :, 0].double()

    logits, offered = run(emulated.model)
    rounded_logits, rounded = run(copy.deepcopy(emulated.model).float())
    # one bound for a layer's keys and one for its values
    error = ALLOWED * (rounded - offered).abs().amax((2, 3, 4), keepdim=True)
    dtype = TORCH_TYPES[emulated.geometry.half]
    least, most = ((offered + sign * error).to(dtype).double() for sign in (-1, 1))
    return Expected(
        logits, ALLOWED * float((rounded_logits - logits).abs().max()), list(least), list(most)
    )
