"""What one GPU holds: tapes, tables, keys and values, and the words that its blocks exchange.

Everything is a torch tensor on one device, so the tests hold the same memory on the CPU. What the host reads
or writes while a kernel runs (new tokens, the stop flag, the report of a hang) is pinned host memory.
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
from ..decoder import RequestFailed
from ..folder import rope_tables
from .geometry import HALVES, TILE, Geometry
from .int8 import quantised
from .structures import (
    MAX_COLUMNS,
    PASSES_PER_LAUNCH,
    WEIGHTS,
    GraphState,
    Report,
    Weights,
    decode_structure,
    picked,
)
from .tape import pack, tape_starts

TORCH_TYPES: dict[str, torch.dtype] = {name: getattr(torch, STORED_TYPES[name].torch) for name in HALVES}


class DeviceMemory:
    """The memory of device number `index` of `geometry.devices`; its lanes follow those of
    the devices before it.
    """

    def __init__(
        self, geometry: Geometry, tensors: Mapping[str, Tensor], index: int, device: torch.device | str,
        sequences: int = 1, beside: DeviceMemory | None = None,
    ):  # fmt: skip
        """Pack the weights; ValueError names a tensor with a value that is not finite in 16 bits.

        sequences: that have keys and values here. beside: whose embedding and table of angles it shares.
        """
        config = geometry.config
        self.geometry = geometry
        self.index = index
        self.device = torch.device(device)
        self.first_lane = index * geometry.lanes_per_device
        matrices = LaneMatrices(config, tensors, geometry.dtype)
        self.tapes = pack(geometry, matrices, self.first_lane, device)
        self.scales = self._put(torch.cat([*matrices.scales, torch.empty(0)]))
        self.tape_at = self._put(torch.from_numpy(tape_starts(geometry).view(np.int64)))
        if beside is None:
            self.embedding = self._put(finite(tensors, EMBEDDING, TORCH_TYPES[geometry.half]))
            self.rope = self._put(turns(config))
        else:
            self.embedding, self.rope = beside.embedding, beside.rope
        self.norms = self._put(norm_scales(config, tensors, GATES if geometry.model else ()))
        self.biases = self._put(biases(config, tensors))
        self.head_norms = self._put(head_scales(config, tensors))
        numbers = sequences * geometry.lanes_per_device * geometry.kv_lane
        try:
            self.kv = self._zeros(numbers, torch.int16)
        except torch.OutOfMemoryError:
            raise ValueError(
                f"the GPU has no memory for the keys and values of {config.max_position_embeddings} positions, "
                f"{2 * numbers / 1e9:.1f} GB; use a smaller context_tokens"
            ) from None
        columns = geometry.columns  # each with words of its own
        self.lane_words = self._zeros(columns * geometry.device_words, torch.int64)
        self.inbox = self._zeros(columns * geometry.inbox_words, torch.int64)
        streams = 4 * columns * geometry.lanes_per_device * config.hidden_size
        self.graph = self._zeros(ctypes.sizeof(GraphState) + streams, torch.uint8)
        self.aborted = self._zeros(1, torch.int32)
        self.cancel, self.report = self._pinned(1), self._pinned(8)
        picks = self._pinned(2 * PASSES_PER_LAUNCH * MAX_COLUMNS)
        self.picks = picks.view(torch.int64).view(-1, MAX_COLUMNS)
        self.epoch = 0  # tokens that the words have seen

    def picked(self, epoch: int, columns: int) -> list[list[int]]:
        """Tokens [pass][column] that passes from this epoch on have chosen so far; -1 where a
        column has ended before. The kernel may still run.
        """
        return picked(self.picks.tolist(), epoch, columns)

    def reset_words(self) -> None:
        """After a hang, or before epochs run out: no word is of any epoch."""
        for words in (self.lane_words, self.inbox, self.aborted, self.report, self.picks):
            words.zero_()
        self.epoch = 0

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a token reads; the filling of the tapes' last chunks is among them."""
        return int(tape_starts(self.geometry)[-1]) + self.scales.nbytes

    def arguments(self, inboxes: Sequence[torch.Tensor], limit_s: float = 10.0) -> Any:
        """The argument of launches, whose order is empty. inboxes: of all devices; limit_s: of a wait."""
        p = decode_structure(self.geometry.devices, drafts=self.geometry.model is not None)()
        p.weights = Weights(*(getattr(self, name).data_ptr() for name in WEIGHTS))
        for name in ("lane_words", "aborted", "report", "cancel", "picks", "graph"):
            setattr(p, name, getattr(self, name).data_ptr())
        p.inbox[:] = [inbox.data_ptr() for inbox in inboxes]
        p.limit_ns = int(limit_s * 1e9)
        p.device, p.first_lane = self.index, self.first_lane
        return p

    def of(self, kv: torch.Tensor) -> DeviceMemory:
        """The same memory with one sequence's keys and values in the place of all."""
        other = copy.copy(self)
        other.kv = kv
        return other

    def hang(self) -> Report | None:
        """What the watchdog wrote, if it has given up a wait."""
        report = Report.from_buffer_copy(self.report.numpy().tobytes())
        return report if report.set else None

    def kv_layer(self, layer: int, kv: torch.Tensor | None = None) -> torch.Tensor:
        """A layer's part of `kv` (None: of the current sequence): int16 (lanes, KV heads,
        splits, slots, 2, d).
        """
        g = self.geometry
        start = sum(g.kv_layer(i) for i in range(layer))
        sequence = (self.kv if kv is None else kv).view(-1, g.lanes_per_device, g.kv_lane)[
            0
        ]  # of several: the first
        lanes = sequence[:, start : start + g.kv_layer(layer)]
        return lanes.view(-1, g.config.kv_heads_per_lane, g.splits, g.kv_slots(layer), 2, g.config.head_dim)

    def _put(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().to(self.device)

    def _zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype, device=self.device)

    def _pinned(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32, pin_memory=self.device.type == "cuda")


GATES = (
    "hidden_norm.weight",
    "embedding_norm.weight",
)  # norms of a head that drafts (head.py), after its last one
PARTS = {  # tensors of a layer that make one matrix of the kernels
    "qkv": ("attention.wq", "attention.wk", "attention.wv"), "output": ("attention.wo",),
    "gate_up": ("feed_forward.w1", "feed_forward.w3"), "down": ("feed_forward.w2",),
}  # fmt: skip


def joined(op: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """The rows of a kernels' matrix from those of its tensors: q, k, v in a row; gate and up rows alternate."""
    return torch.stack(parts, 1).flatten(0, 1) if op == "gate_up" else torch.cat(parts)


class LaneMatrices:
    """The matrices as the kernels have them, of one lane at a time (tape.LaneMatrix).

    `scales`: of those of 8 bits, in the order in which they were asked for; each (rows,).
    """

    def __init__(self, config: LaneformerConfig, tensors: Mapping[str, Tensor], dtype: str):
        self._config, self._tensors, self._dtype = config, tensors, dtype
        self._last: tuple[str, int] | None = (
            None  # tensors can be costly to read: all lanes are asked in a row
        )
        self._parts: list[tuple[torch.Tensor, ...]] = []
        self.scales: list[torch.Tensor] = []

    def __call__(self, op: str, layer: int, lane: int) -> torch.Tensor:
        if self._last != (op, layer):
            head = EMBEDDING if self._config.tie_word_embeddings else HEAD
            full = [head] if op == "head" else [f"layers.{layer}.{name}.weight" for name in PARTS[op]]
            self._last, self._parts = (op, layer), [self._read(name) for name in full]
        numbers, *scales = (
            joined(op, [part[lane] for part in parts]) for parts in zip(*self._parts, strict=True)
        )
        self.scales += scales
        return numbers

    def _read(self, name: str) -> tuple[torch.Tensor, ...]:
        """(L, rows, columns), and with 8 bits scales (L, rows)."""
        eight = self._dtype == "int8"
        values = finite(self._tensors, name, torch.float32 if eight else TORCH_TYPES[self._dtype])
        if name in (HEAD, EMBEDDING):  # rows of zeros fill up the last tile
            values = values.view(self._config.head_shape)
            values = torch.nn.functional.pad(values, (0, 0, 0, -values.shape[1] % TILE))
        return quantised(values) if eight else (values,)


def as_torch(tensor: Tensor) -> torch.Tensor:
    """The values in their own type; a copy, as torch warns of arrays that cannot be written, such
    as a mapped file.
    """
    values = np.array(tensor.values)
    if tensor.dtype == "fp32":
        return torch.from_numpy(values)
    return torch.from_numpy(values.view(np.int16)).view(TORCH_TYPES[tensor.dtype])


def half_of(tensors: Mapping[str, Tensor]) -> str:
    """The 16-bit type of a checkpoint: its matrices', and bf16 where that is fp32."""
    return tensors[FIRST_MATRIX].dtype.replace("fp32", "bf16")


def norm_scales(
    config: LaneformerConfig, tensors: Mapping[str, Tensor], more: Sequence[str] = ()
) -> torch.Tensor:
    """float32 (2 layers + 1, D) or (2 layers + 1, L, D), in the order of use; then `more`."""
    names = [f"layers.{i}.{norm}.weight" for i in range(config.num_hidden_layers) for norm in NORMS]
    return torch.stack([finite(tensors, name) for name in (*names, "norm.weight", *more)])


def turns(config: LaneformerConfig) -> torch.Tensor:
    """cos and sin, float32 (1 + ropes x context, d/2, 2): of no rotation, then of each rope's positions."""
    tables = torch.from_numpy(np.stack(rope_tables(config), -1))
    rows = tables.view(-1, config.head_dim // 2, 2)
    return torch.cat([torch.tensor([1.0, 0.0]).expand_as(rows[:1]), rows])


def biases(config: LaneformerConfig, tensors: Mapping[str, Tensor]) -> torch.Tensor:
    """float32 (layers, L, rows of a lane's qkv matrix); empty where there are none."""
    layers = range(config.num_hidden_layers if config.attention_bias else 0)
    rows = [torch.cat([finite(tensors, f"layers.{i}.{name}.bias") for name in BIASED], 1) for i in layers]
    return torch.stack(rows) if rows else torch.empty(0)


def head_scales(config: LaneformerConfig, tensors: Mapping[str, Tensor]) -> torch.Tensor:
    """float32 (layers, 2, d): the norms of queries and of keys; empty where there are none."""
    layers = range(config.num_hidden_layers if config.qk_norm else 0)
    rows = [
        torch.stack([finite(tensors, f"layers.{i}.{name}.weight") for name in HEAD_NORMS]) for i in layers
    ]
    return torch.stack(rows) if rows else torch.empty(0)


def finite(tensors: Mapping[str, Tensor], name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor in this type; ValueError where a value is not finite in it."""
    values = as_torch(tensors[name]).to(dtype)
    if not values.isfinite().all():
        raise ValueError(f"tensor {name} holds values that are not finite (NaN, or too large for {dtype})")
    return values


def reset(memories: Sequence[DeviceMemory]) -> None:
    """No word of any of them is of any epoch."""
    for memory in memories:
        memory.reset_words()


def end_hang(memories: Sequence[DeviceMemory], kernel: str, limit_s: float) -> None:
    """RequestFailed, which says who waited for what, if a launch has given up a wait; no word is
    of any epoch then.
    """
    hang = next((report for memory in memories if (report := memory.hang())), None)
    if hang is None:
        return
    reset(memories)
    raise RequestFailed(hang.told(kernel, limit_s))
