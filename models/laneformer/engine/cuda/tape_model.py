"""The plain PyTorch model over the weights on the tapes: one layer at a time is put back
into rows and columns.

Prompts and scores need no second copy of the weights: all layers share one layer's memory, and the numbers are those
that were packed, bit for bit. It costs a pass over all weights for every chunk of positions: about 16 bytes are moved
for a weight of two (a segment is read and written, then with 4 bytes of index a number is, then the tensor is copied).
For `2b` that is 36 GB, calculated as 10 ms on an H200, and memory for one layer (0.3 GB), twice its largest matrix, and
0.15 GB of indices, for which the host computes 1.3 s when the model is first needed (measured, one core of a Zen 5).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from ...config import BIASED, HEAD_NORMS, NORMS
from ...model import Laneformer, LaneformerLayer
from .geometry import OPS, SEGMENT_BYTES, Geometry
from .int8 import dequantised
from .memory import PARTS, TORCH_TYPES, DeviceMemory, joined
from .tape import order, segments_of, steps


class TapeModel:
    """What `streams` and `logits_of` ask of a model (prefill.py). `layers` yields each as soon as it is read."""

    def __init__(self, memories: Sequence[DeviceMemory]):
        geometry, device = memories[0].geometry, memories[0].device
        self.config = geometry.config
        self.dtype = TORCH_TYPES[geometry.half]
        self._lanes = geometry.lanes_per_device
        self._memories, self._geometry = memories, geometry
        with torch.device("meta"):
            self._plain = Laneformer(self.config).eval().requires_grad_(False)
        self.masks, self.norm = self._plain.masks, self._plain.norm
        self.embedding = memories[0].embedding
        scales = memories[0].norms.to(self.dtype)
        self.norm.load_state_dict({"weight": scales[-1]}, assign=True)
        shapes = self.config.tensor_shapes()
        self._layer = {name: torch.empty(shapes[f"layers.0.{name}.weight"], dtype=self.dtype, device=device)
                       for op in OPS[:-1] for name in PARTS[op]}  # fmt: skip
        for i, layer in enumerate(self._plain.layers):
            norms = {f"{norm}.weight": scales[len(NORMS) * i + n] for n, norm in enumerate(NORMS)}
            matrices = {f"{name}.weight": values for name, values in self._layer.items()}
            layer.load_state_dict({**matrices, **norms, **self._of_attention(i)}, assign=True)
        segments = segments_by_matrix(geometry)
        self._rows = {op: tensor_rows(geometry, op) for op in OPS}
        numbers = {op: number_places(geometry, op, self._rows[op]) for op in OPS}
        self._segments = [
            {key: index.to(memory.device) for key, index in segments.items()} for memory in memories
        ]
        self._numbers = [
            {op: [index.to(memory.device) for index in parts] for op, parts in numbers.items()}
            for memory in memories
        ]
        self._scales = scale_places(geometry) if geometry.dtype == "int8" else {}

    def _of_attention(self, layer: int) -> dict[str, torch.Tensor]:
        """Biases and norms of heads, where a layer has them."""
        tensors: dict[str, torch.Tensor] = {}
        if self.config.attention_bias:
            counts = [self._layer[name].shape[1] for name in BIASED]
            parts = self._memories[0].biases[layer].to(self.dtype).split(counts, 1)
            tensors |= {f"{name}.bias": part for name, part in zip(BIASED, parts, strict=True)}
        if self.config.qk_norm:
            scales = self._memories[0].head_norms[layer].to(self.dtype)
            tensors |= {f"{name}.weight": scale for name, scale in zip(HEAD_NORMS, scales, strict=True)}
        return tensors

    def layers(self) -> Iterator[LaneformerLayer]:
        for i, layer in enumerate(self._plain.layers):
            for op in OPS[:-1]:
                self._read(op, i, [self._layer[name] for name in PARTS[op]])
            yield layer  # type: ignore[misc]

    def head(self) -> torch.Tensor:
        """(L, V / L, D); read again each time, unless it is the embedding."""
        if self.config.tie_word_embeddings and not self._scales:
            return self.embedding.view(self.config.head_shape)
        lanes, rows, columns = self.config.head_shape
        shape = lanes, self._geometry.matrix(OPS[-1]).rows, columns
        weight = torch.empty(shape, dtype=self.dtype, device=self.embedding.device)
        self._read(OPS[-1], 0, [weight])
        return weight[:, :rows]

    def _read(self, op: str, layer: int, tensors: list[torch.Tensor]) -> None:
        """Fill the tensors (lanes, rows, columns) of which the kernels' matrix `op` is made."""
        for i, memory in enumerate(self._memories):
            segments = memory.tapes.view(-1, SEGMENT_BYTES // self._geometry.number_bytes)
            taped = segments.index_select(0, self._segments[i][op, layer]).view(self._lanes, -1)
            for part, (tensor, index) in enumerate(zip(tensors, self._numbers[i][op], strict=True)):
                lanes = tensor[i * self._lanes :][: self._lanes]
                numbers = taped.index_select(1, index)
                if self._scales:
                    scales = memory.scales[self._scales[op, layer]].view(self._lanes, -1)
                    own = scales[:, self._rows[op][part]]
                    lanes.copy_(dequantised(numbers.view(lanes.shape), own))
                else:
                    lanes.copy_(numbers.view(self.dtype).view(lanes.shape))


def scale_places(geometry: Geometry) -> dict[tuple[str, int], slice]:
    """For each matrix (op, layer): its scales (lanes, rows) among a device's, flat."""
    rows = [geometry.lanes_per_device * geometry.matrix(op).rows for op, _ in steps(geometry)]
    ends = itertools.accumulate(rows)
    return {
        step: slice(end - count, end) for step, count, end in zip(steps(geometry), rows, ends, strict=True)
    }


def segments_by_matrix(geometry: Geometry) -> dict[tuple[str, int], torch.Tensor]:
    """For each matrix (op, layer): its segments on a device's tapes, lane after lane, in the order of `order`."""
    of_lanes: dict[tuple[str, int], list[np.ndarray]] = {}
    for op, layer, _, segments in segments_of(geometry):
        of_lanes.setdefault((op, layer), []).append(segments.astype(np.int32))
    return {key: torch.from_numpy(np.concatenate(lanes)) for key, lanes in of_lanes.items()}


def number_places(geometry: Geometry, op: str, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """For each tensor of the matrix `op`, whose rows these are: where among a lane's numbers in the order of
    `order` its own are, flat.
    """
    matrix = geometry.matrix(op)
    places = np.empty(matrix.rows * matrix.columns, np.int32)
    places[order(geometry, matrix)] = np.arange(len(places), dtype=np.int32)
    by_row = torch.from_numpy(places).view(matrix.rows, matrix.columns)
    return [by_row[own].flatten() for own in rows]


def tensor_rows(geometry: Geometry, op: str) -> tuple[torch.Tensor, ...]:
    """For each tensor of the matrix `op`: which rows of the matrix are its own, in its order."""
    count, shapes = geometry.matrix(op).rows, geometry.config.tensor_shapes()
    counts = [shapes[f"layers.0.{name}.weight"][1] for name in PARTS[op]] if op in PARTS else [count]
    rows = torch.empty(count, dtype=torch.int64)
    rows[joined(op, torch.arange(count)[None].split(counts, 1))[0]] = torch.arange(count)
    return rows.split(counts)
