"""What one GPU holds: tapes, tables, keys and values, and the words that its blocks exchange.

Everything is a torch tensor on one device, so tests can hold the same memory on the CPU.

    L lanes   D hidden   d head dimension
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...config import BIASED, EMBEDDING, HEAD, HEAD_NORMS, NORMS, LaneformerConfig
from ...tensors import FIRST_MATRIX, STORED_TYPES, Tensor
from ..folder import rope_tables
from .geometry import HALVES, TILE, Geometry
from .int8 import quantize
from .structures import (
    ENDS,
    MAX_COLUMNS,
    PASSES_PER_LAUNCH,
    TOKEN_BITS,
    WEIGHTS,
    GraphState,
    Report,
    Weights,
    decode_structure,
)
from .tape import pack, tape_starts

TORCH_TYPES: dict[str, torch.dtype] = {
    name: getattr(torch, STORED_TYPES[name].torch) for name in HALVES
}


class DeviceMemory:
    """Memory of device `index` of `geometry.devices`; its lanes follow those of earlier devices."""

    def __init__(
        self,
        geometry: Geometry,
        tensors: Mapping[str, Tensor],
        index: int,
        device: torch.device | str,
        cache_count: int = 1,
    ):
        """Pack the weights and allocate the rest.

        Args:
            cache_count: Number of KV caches.

        Raises:
            ValueError: A tensor has a value that is not finite in 16 bits, or the GPU lacks memory.
        """
        config = geometry.config
        self.geometry = geometry
        self.index = index
        self.device = torch.device(device)
        self.first_lane = index * geometry.lanes_per_device
        self._pack(tensors)
        self.tape_at = self._put(torch.from_numpy(tape_starts(geometry)))
        self.embedding = self._put(finite(tensors, EMBEDDING, TORCH_TYPES[geometry.half]))
        self.rope = self._put(turns(config))
        self.norms = self._put(norm_scales(config, tensors))
        self.biases = self._put(biases(config, tensors))
        self.head_norms = self._put(head_norms(config, tensors))
        numbers = cache_count * geometry.lanes_per_device * geometry.kv_lane
        try:
            self.kv = self._zeros(numbers, torch.int16)
        except torch.OutOfMemoryError:
            raise ValueError(
                f"the GPU has no memory for the keys and values of {config.max_position_embeddings} positions, "
                f"{2 * numbers / 1e9:.1f} GB; use a smaller context_tokens"
            ) from None
        # columns have words of their own
        columns, lanes = geometry.columns, geometry.lanes_per_device
        self.lane_words = self._zeros(columns * lanes * geometry.lane_words, torch.int64)
        self.inbox = self._zeros(columns * geometry.inbox_words, torch.int64)
        streams = 4 * columns * lanes * config.hidden_size
        self.graph = self._zeros(ctypes.sizeof(GraphState) + streams, torch.uint8)
        self.aborted = self._zeros(1, torch.int32)
        # pinned: the host reads or writes these while a kernel runs
        self.cancel, self.report = self._allocate_pinned(1), self._allocate_pinned(8)
        picks = self._allocate_pinned(2 * PASSES_PER_LAUNCH * MAX_COLUMNS)
        self.picks = picks.view(torch.int64).view(-1, MAX_COLUMNS)
        self.epoch = 0  # tokens that the words have seen

    def _pack(self, tensors: Mapping[str, Tensor]) -> None:
        g, scales = self.geometry, list[torch.Tensor]()
        lanes = slice(self.first_lane, self.first_lane + g.lanes_per_device)

        def read_lanes(op: str, layer: int) -> torch.Tensor:
            numbers, *of_rows = lane_matrices(g, tensors, op, layer, lanes)
            scales.extend(of_rows)
            return numbers

        self.tapes = pack(g, read_lanes, self.device)
        self.scales = self._put(torch.cat([torch.empty(0), *(part.flatten() for part in scales)]))

    def read_picks(self, epoch: int, columns: int) -> list[list[int]]:
        """Return the tokens [pass][column] that passes from `epoch` on have chosen so far.

        -1 stands where a column has ended before. The kernel may still run.
        """
        rows, running = list[list[int]](), [True] * columns
        for number, words in enumerate(self.picks[:, :columns].tolist(), epoch + 1):
            arrived = [word >> 32 == number for word in words]
            if not any(running) or arrived != running:
                break
            rows.append(
                [
                    word & TOKEN_BITS if runs else -1
                    for word, runs in zip(words, running, strict=True)
                ]
            )
            running = [runs and not word & ENDS for word, runs in zip(words, running, strict=True)]
        return rows

    def reset_words(self) -> None:
        # after a hang or before epochs run out: no word is of any epoch
        for words in (self.lane_words, self.inbox, self.aborted, self.report, self.picks):
            words.zero_()
        self.epoch = 0

    @property
    def weight_bytes(self) -> int:
        # with the padding of the tapes' last chunks
        return int(tape_starts(self.geometry)[-1]) + self.scales.nbytes

    def arguments(self, inboxes: Sequence[torch.Tensor], limit_s: float = 10.0) -> Any:
        p = decode_structure(self.geometry.devices)()
        p.weights = Weights(*(getattr(self, name).data_ptr() for name in WEIGHTS))
        for name in ("lane_words", "aborted", "report", "cancel", "picks", "graph"):
            setattr(p, name, getattr(self, name).data_ptr())
        p.inbox[:] = [inbox.data_ptr() for inbox in inboxes]
        p.limit_ns = int(limit_s * 1e9)
        p.device, p.first_lane = self.index, self.first_lane
        return p

    def of(self, kv: torch.Tensor) -> DeviceMemory:
        """Return a copy with one sequence's keys and values in place of all."""
        other = copy.copy(self)
        other.kv = kv
        return other

    def hang(self) -> Report | None:
        report = Report.from_buffer_copy(self.report.numpy().tobytes())
        return report if report.set else None

    def kv_layer(self, layer: int) -> torch.Tensor:
        """Return a layer's part of the first sequence: int16 (lanes, KV heads, splits, slots, 2, d)."""
        g = self.geometry
        start = sum(g.kv_layer(i) for i in range(layer))
        sequence = self.kv.view(-1, g.lanes_per_device, g.kv_lane)[0]
        lanes = sequence[:, start : start + g.kv_layer(layer)]
        return lanes.view(
            -1, g.config.kv_heads_per_lane, g.splits, g.kv_slots(layer), 2, g.config.head_dim
        )

    def _put(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().to(self.device)

    def _zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype, device=self.device)

    def _allocate_pinned(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32, pin_memory=self.device.type == "cuda")


PARTS = {  # tensors of a layer that make one matrix of the kernels
    "qkv": ("attention.wq", "attention.wk", "attention.wv"),
    "output": ("attention.wo",),
    "gate_up": ("feed_forward.w1", "feed_forward.w3"),
    "down": ("feed_forward.w2",),
}


def join_parts(op: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join tensors (lanes, rows, ...) into a kernel matrix: q, k, v in a row; gate and up alternate."""
    return torch.stack([*parts], 2).flatten(1, 2) if op == "gate_up" else torch.cat([*parts], 1)


def split_rows(op: str, matrix: torch.Tensor, rows: Sequence[int]) -> Sequence[torch.Tensor]:
    """Split a matrix into the tensors, of `rows` rows each, that `join_parts` joins; views."""
    return matrix.unflatten(1, (-1, 2)).unbind(2) if op == "gate_up" else matrix.split([*rows], 1)


def lane_matrices(
    geometry: Geometry, tensors: Mapping[str, Tensor], op: str, layer: int, lanes: slice
) -> list[torch.Tensor]:
    """Return numbers (lanes, rows, columns), and with 8 bits scales (lanes, rows)."""
    head = EMBEDDING if geometry.config.tie_word_embeddings else HEAD
    names = [head] if op == "head" else [f"layers.{layer}.{name}.weight" for name in PARTS[op]]
    parts = [read_matrix(geometry, tensors, name) for name in names]
    return [join_parts(op, [part[lanes] for part in group]) for group in zip(*parts, strict=True)]


def read_matrix(
    geometry: Geometry, tensors: Mapping[str, Tensor], name: str
) -> tuple[torch.Tensor, ...]:
    """Return numbers (L, rows, columns), and with 8 bits scales (L, rows)."""
    quantizes = geometry.dtype == "int8"
    values = finite(tensors, name, torch.float32 if quantizes else TORCH_TYPES[geometry.dtype])
    if name in (HEAD, EMBEDDING):  # rows of zeros fill up the last tile
        values = values.view(geometry.config.head_shape)
        values = torch.nn.functional.pad(values, (0, 0, 0, -values.shape[1] % TILE))
    return quantize(values) if quantizes else (values,)


def as_torch(tensor: Tensor) -> torch.Tensor:
    # a copy, as torch warns of arrays that cannot be written, such as a mapped file
    values = np.array(tensor.values)
    if tensor.dtype == "fp32":
        return torch.from_numpy(values)
    return torch.from_numpy(values.view(np.int16)).view(TORCH_TYPES[tensor.dtype])


def half_of(tensors: Mapping[str, Tensor]) -> str:
    # the checkpoint's 16-bit type
    return tensors[FIRST_MATRIX].dtype.replace("fp32", "bf16")


def norm_scales(config: LaneformerConfig, tensors: Mapping[str, Tensor]) -> torch.Tensor:
    """Return float32 (2 layers + 1, D) or (2 layers + 1, L, D), in order of use."""
    names = [f"layers.{i}.{norm}.weight" for i in range(config.num_hidden_layers) for norm in NORMS]
    return torch.stack([finite(tensors, name) for name in (*names, "norm.weight")])


def turns(config: LaneformerConfig) -> torch.Tensor:
    """Return cos and sin, float32 (1 + ropes x context, d/2, 2); the first row is no rotation."""
    tables = torch.from_numpy(np.stack(rope_tables(config), -1))
    rows = tables.view(-1, config.head_dim // 2, 2)
    return torch.cat([torch.tensor([1.0, 0.0]).expand_as(rows[:1]), rows])


def biases(config: LaneformerConfig, tensors: Mapping[str, Tensor]) -> torch.Tensor:
    """Return float32 (layers, L, rows of a lane's qkv matrix)."""
    if not config.attention_bias:
        return torch.empty(0)
    layers = range(config.num_hidden_layers)
    parts = [
        torch.stack([finite(tensors, f"layers.{i}.{name}.bias") for i in layers]) for name in BIASED
    ]
    return torch.cat(parts, 2)


def head_norms(config: LaneformerConfig, tensors: Mapping[str, Tensor]) -> torch.Tensor:
    """Return float32 (layers, 2, d), of queries and of keys."""
    if not config.qk_norm:
        return torch.empty(0)
    names = [
        f"layers.{i}.{norm}.weight" for i in range(config.num_hidden_layers) for norm in HEAD_NORMS
    ]
    return torch.stack([finite(tensors, name) for name in names]).unflatten(0, (-1, 2))


def finite(
    tensors: Mapping[str, Tensor], name: str, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return a tensor in `dtype`; raise ValueError where a value is not finite in it."""
    values = as_torch(tensors[name]).to(dtype)
    if not values.isfinite().all():
        raise ValueError(
            f"tensor {name} holds values that are not finite (NaN, or too large for {dtype})"
        )
    return values
