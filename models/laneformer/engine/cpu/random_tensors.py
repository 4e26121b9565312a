"""Make random weights of a config's shapes."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping

import numpy as np

from ...config import DRAFT_IDS, EMBEDDING, LaneformerConfig
from ...tensors import Tensor
from . import _core


class RandomTensors(Mapping[str, Tensor]):
    """Random tensors that are made on access, so that only one exists at a time."""

    def __init__(self, config: LaneformerConfig, dtype: str, seed: int):
        self.dtype, self.seed, self.shapes = dtype, seed, config.tensor_shapes()
        self.deviation = config.initializer_range

    def __getitem__(self, name: str) -> Tensor:
        if name.endswith("norm.weight"):
            return Tensor("fp32", np.ones(self.shapes[name], np.float32))
        if name == DRAFT_IDS:  # as many in each lane's part of the vocabulary
            count = self.shapes[name][0]
            return Tensor(
                "int32", np.arange(count, dtype=np.int32) * (self.shapes[EMBEDDING][0] // count)
            )
        values = np.empty(self.shapes[name], np.float32 if self.dtype == "fp32" else np.uint16)
        key = (self.seed << 32 ^ zlib.crc32(name.encode())) % 2**64
        _core.random_values(values, self.dtype, key, self.deviation)
        return Tensor(self.dtype, values)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)
