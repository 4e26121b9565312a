"""The KV cache of the plain PyTorch model.

B batch   K KV heads   T positions   d head dimension
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Cache(Protocol):
    """What attention needs of a KV cache; Hugging Face's Cache fits as well."""

    def update(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]: ...


class KVCache:
    """All keys and values so far: per layer (B, K, T, d). The masks, not the cache, hold the window."""

    def __init__(self, num_layers: int):
        self.entries: list[tuple[Tensor, Tensor] | None] = [None] * num_layers

    @property
    def length(self) -> int:
        return 0 if self.entries[0] is None else self.entries[0][0].shape[2]

    def update(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        entry = self.entries[layer_idx]
        if entry is not None:
            key, value = torch.cat((entry[0], key), 2), torch.cat((entry[1], value), 2)
        self.entries[layer_idx] = key, value
        return key, value
