"""The plain PyTorch model over the tapes' weights, one layer at a time put back into matrices.

Prompts and scores need no second copy of the weights; the numbers are those that were packed, bit for
bit. Each chunk of positions costs a pass over all weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from ...config import BIASED, HEAD_NORMS, NORMS
from ...model import Laneformer, LaneformerLayer
from .geometry import OPS, SEGMENT_BYTES, Geometry
from .int8 import dequantize
from .memory import PARTS, TORCH_TYPES, DeviceMemory, split_rows
from .tape import order, segments_of, steps


class TapeModel:
    """The model interface of `streams` and `logits_of` (prefill.py)."""

    def __init__(self, memories: Sequence[DeviceMemory]):
        geometry = memories[0].geometry
        self.config = geometry.config
        self.dtype = TORCH_TYPES[geometry.half]
        self._memories, self._geometry = memories, geometry
        with torch.device("meta"):
            self._plain = Laneformer(self.config).eval().requires_grad_(False)
        self.masks, self.norm = self._plain.masks, self._plain.norm
        self.embedding = memories[0].embedding
        scales = memories[0].norms.to(self.dtype)
        self.norm.load_state_dict({"weight": scales[-1]}, assign=True)
        self._matrices = {op: self._empty(op) for op in PARTS}
        shapes = self.config.tensor_shapes()
        weights: dict[str, torch.Tensor] = {}  # views of the matrices, the same in all layers
        for op, names in PARTS.items():
            rows = [shapes[f"layers.0.{name}.weight"][1] for name in names]
            parts = split_rows(op, self._matrices[op], rows)
            weights |= {f"{name}.weight": part for name, part in zip(names, parts, strict=True)}
        for i, layer in enumerate(self._plain.layers):
            norms = {f"{norm}.weight": scales[len(NORMS) * i + n] for n, norm in enumerate(NORMS)}
            layer.load_state_dict(
                {**weights, **norms, **self._attention_tensors(i, weights)}, assign=True
            )
        # for `2b` 0.15 GB of indices, which one core of a Zen 5 computes in 1.3 s (measured)
        segments = {
            (op, layer): torch.from_numpy(s.astype(np.int32))
            for op, layer, s in segments_of(geometry)
        }
        numbers = {op: number_places(geometry, op) for op in OPS}
        self._segments = [
            {key: index.flatten().to(m.device) for key, index in segments.items()} for m in memories
        ]
        self._numbers = [
            {op: index.to(m.device) for op, index in numbers.items()} for m in memories
        ]
        self._scales = [
            scales_of(geometry, memory) for memory in memories if geometry.dtype == "int8"
        ]

    def _empty(self, op: str) -> torch.Tensor:
        matrix, device = self._geometry.matrix(op), self.embedding.device
        return torch.empty(
            self.config.num_lanes, matrix.rows, matrix.columns, dtype=self.dtype, device=device
        )

    def _attention_tensors(
        self, layer: int, weights: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        if self.config.attention_bias:
            rows = [weights[f"{name}.weight"].shape[1] for name in BIASED]
            parts = self._memories[0].biases[layer].to(self.dtype).split(rows, 1)
            tensors |= {f"{name}.bias": part for name, part in zip(BIASED, parts, strict=True)}
        if self.config.qk_norm:
            scales = self._memories[0].head_norms[layer].to(self.dtype)
            tensors |= {
                f"{name}.weight": scale for name, scale in zip(HEAD_NORMS, scales, strict=True)
            }
        return tensors

    def layers(self) -> Iterator[LaneformerLayer]:
        for i, layer in enumerate(self._plain.layers):
            for op, matrix in self._matrices.items():
                self._read_matrix(op, i, matrix)
            yield layer  # type: ignore[misc]

    def head(self) -> torch.Tensor:
        """Return the head (L, V / L, D)."""
        if self.config.tie_word_embeddings and not self._scales:
            return self.embedding.view(self.config.head_shape)
        weight = self._empty(OPS[-1])
        self._read_matrix(OPS[-1], 0, weight)
        return weight[:, : self.config.head_shape[1]]

    def _read_matrix(self, op: str, layer: int, matrix: torch.Tensor) -> None:
        for i, memory in enumerate(self._memories):
            lanes = matrix.split(self._geometry.lanes_per_device)[i]
            # about 16 bytes are moved for a weight of two: 36 GB for `2b`, 10 ms on an H200
            # (calculated)
            segments = memory.tapes.view(-1, SEGMENT_BYTES // self._geometry.number_bytes)
            taped = segments.index_select(0, self._segments[i][op, layer]).view(len(lanes), -1)
            numbers = taped.index_select(1, self._numbers[i][op]).view(lanes.shape)
            if self._scales:
                lanes.copy_(dequantize(numbers, self._scales[i][op, layer].view(lanes.shape[:2])))
            else:
                lanes.copy_(numbers.view(self.dtype))


def scales_of(geometry: Geometry, memory: DeviceMemory) -> dict[tuple[str, int], torch.Tensor]:
    ops = [*steps(geometry)]
    rows = [geometry.lanes_per_device * geometry.matrix(op).rows for op, _ in ops]
    return dict(zip(ops, memory.scales.split(rows), strict=True))


def number_places(geometry: Geometry, op: str) -> torch.Tensor:
    """Return where each number of a lane's matrix `op` is in the order of `order`, flat."""
    numbers = torch.from_numpy(order(geometry, geometry.matrix(op)))
    places = torch.empty(len(numbers), dtype=torch.int32)
    places[numbers] = torch.arange(len(numbers), dtype=torch.int32)
    return places
