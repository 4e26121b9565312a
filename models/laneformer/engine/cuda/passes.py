"""Several sequences side by side, and several positions of one: passes of up to 8 columns (passes.cu).

A launch is one pass; between two of them the host says what the columns are. As in the CPU engine
(schedule/schedule.cpp): first the next id of each sequence that decodes, and draft tokens after it; then as many
ids of prompts as there is room for. Each sequence draws the tokens that it would draw alone, whatever shares
its passes. Long prompts are read by PyTorch, a piece between two passes.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import itertools
import time
from collections.abc import Mapping, Sequence

import torch

from ...config import LaneformerConfig
from ...tensors import Tensor
from ..decoder import RequestFailed
from .decoding import Decoding
from .geometry import Geometry, Machine
from .launch import Kernels, describe
from .memory import Changes, Column, DeviceMemory, end_hang
from .planning import plan
from .prefill import DeviceCache, logits_of, streams
from .sequence import connect
from .slots import MAX_SLOTS, Slots
from .tape import tape_starts
from .tape_model import TapeModel

COLUMNS = (8, 4, 2)  # of a pass: as many as fit
LAST_EPOCH = 2**30  # of all layers together
MIN_RING_BYTES = 32 << 10  # of a block, under way while it computes; with less, fewer columns are read faster
MIN_AWAITED = 16  # positions: who shares as many with a prompt that is being read begins when these are there
POLL_S = 0.00005


def plan_columns(config: LaneformerConfig, dtype: str, machine: Machine, devices: int = 1) -> Geometry:
    """The geometry with the most columns that leave memory for the ring; ValueError where not even two fit."""
    for columns in COLUMNS:
        with contextlib.suppress(ValueError):
            geometry = plan(config, dtype, machine, devices=devices, mma_columns=columns)
            if geometry.warps * geometry.chunks * geometry.chunk_bytes >= MIN_RING_BYTES:
                return geometry
    return plan(config, dtype, machine, devices=devices, mma_columns=COLUMNS[-1])


def sequences_in(free: int, geometry: Geometry, cache_bytes: int | None) -> int:
    """KV capacity in sequences, given `free` bytes of device memory before anything else of a pass is allocated.

    One for each column, plus cached ones in a quarter of the remainder or in `cache_bytes`. ValueError if the
    columns alone do not fit: the tiles are a second copy of the weights.
    """
    config, columns, tiles = geometry.config, geometry.mma_columns, int(tape_starts(geometry)[-1])
    each = 2 * geometry.lanes_per_device * geometry.kv_lane + 12 * config.vocab_size
    words = 8 * columns * (geometry.device_words + geometry.inbox_words)
    needed = tiles + 2 * config.vocab_size * config.hidden_size + words + columns * each
    if needed > free:
        raise ValueError(
            f"passes of {columns} columns need {needed / 1e9:.1f} GB, {tiles / 1e9:.1f} of them for weights as tiles; "
            f"the GPU has {free / 1e9:.1f} GB free; use a smaller context_tokens or more GPUs"
        )
    spare = (free - needed) // 4 if cache_bytes is None else min(cache_bytes, free - needed)
    return columns + min(MAX_SLOTS - columns, spare // each)


class PassDecoder:
    """Weights as tiles on the GPUs, and passes over them. After a hang its error says who waited for what."""

    def __init__(
        self, config: LaneformerConfig, tensors: Mapping[str, Tensor], dtype: str, devices: Sequence[str] = ("cuda:0",),
        limit_s: float = 10.0, cache_bytes: int | None = None,
    ):  # fmt: skip
        """`cache_bytes`: of each GPU, for earlier sequences; None: a quarter of what is left.

        ValueError for a model or a GPU that tiles do not fit; NotResident where blocks would not
        all run at once.
        """
        self.config, self.limit_s = config, limit_s
        self.devices = [torch.device(device) for device in devices]
        machine, sharing = describe(self.devices[0]), max(map(self.devices.count, self.devices))
        machine = dataclasses.replace(machine, multiprocessors=machine.multiprocessors // sharing)
        self.geometry = plan_columns(config, dtype, machine, len(devices))
        free = min(torch.cuda.mem_get_info(device)[0] for device in self.devices) // sharing
        sequences = sequences_in(free, self.geometry, cache_bytes)
        connect(self.devices)
        self.kernels = [Kernels("passes", self.geometry, device, sharing > 1) for device in self.devices]
        for kernels in self.kernels:
            kernels.require_resident("pass", sharing)
            kernels.load("pass")
        self._streams = [torch.cuda.Stream(device) for device in self.devices]
        self._hold(
            [DeviceMemory(self.geometry, tensors, i, d, sequences) for i, d in enumerate(self.devices)]
        )

    def _hold(self, memories: list[DeviceMemory]) -> None:
        self.memories, self.slots, self.passes = memories, Slots(memories, 0), 0

    @functools.cached_property
    def tape_model(self) -> TapeModel:
        """The PyTorch model on the tiles, for long prompts and scores; made when it is first needed."""
        return TapeModel(self.memories)

    def advance(self, sequences: Sequence[Decoding]) -> None:
        """End and begin sequences, read a piece of a prompt, then one pass: a token or more
        for each that decodes.

        As many run as there are columns; further ones wait. What fails is in `error` of
        those whom it concerns.
        """
        self._begin(sequences)
        try:
            running = [s for s in sequences if s.slot]
            if reading := next((s for s in running if s.reads_pieces), None):
                self._read_piece(reading)
            self._pass([s for s in running if not (s.reads_pieces or s.finished)])
        finally:
            self._end(sequences)

    def end(self, sequences: Sequence[Decoding]) -> None:
        """All of them, before their next pass."""
        for s in sequences:
            s.finished = True
        self._end(sequences)

    def _begin(self, sequences: Sequence[Decoding]) -> None:
        for s in sequences:
            s.finished = s.finished or s.left
        self._end(sequences)
        running = [s for s in sequences if s.slot]
        for s in sequences:
            if s.finished or s.slot or len(running) == self.geometry.mma_columns or self._awaits(s, running):
                continue
            for other in running:
                self.slots.holds(other.ids[: other.position], slot=other.slot)
            slot, start = self.slots.choose(s.ids, s.max_reusable, s.request.reuse_prefix)
            slot.running = True
            s.begin(slot, start)
            for memory in self.memories:
                memory.changes(s.request, s.ids, 0, slot.number)
            running.append(s)

    def _awaits(self, s: Decoding, running: Sequence[Decoding]) -> bool:
        """Others read what it would read, too."""
        reading = (r for r in running if r.position < r.prompt_length - 1)
        return any(s.shares(r) - r.position >= MIN_AWAITED for r in reading)

    def _end(self, sequences: Sequence[Decoding]) -> None:
        """Slots of those that have finished are for others, who may go on from there."""
        for s in sequences:
            if s.finished and s.slot:
                s.slot.running = False
                self.slots.holds(s.ids[: s.position] if s.error is None else [], slot=s.slot)
                s.slot = None

    def _read_piece(self, s: Decoding) -> None:
        assert s.slot is not None
        ids, first = s.piece(), max(s.position, s.first_scored())
        cache = DeviceCache(
            [memory.of(kv) for memory, kv in zip(self.memories, s.slot.kv, strict=True)], s.position
        )
        try:
            for h in streams(self.tape_model, ids, cache):
                if s.scoring and (rows := s.position + len(ids) - first) > 0:
                    s.score(first, logits_of(self.tape_model, h[:, -rows:]))
        except torch.OutOfMemoryError as error:
            s.fail(f"the GPU has no memory for this request: {error}")
            return
        s.was_read(len(ids))
        s.slot.written = max(s.slot.written, s.position)
        self.passes += 1

    def _pass(self, sequences: Sequence[Decoding]) -> None:
        room, columns, parts = self.geometry.mma_columns, list[Column](), list[tuple[Decoding, int]]()
        share = room // max(1, len(sequences))  # drafts leave columns for prompts
        for s in sorted(sequences, key=lambda s: not s.decodes):
            new = s.columns(min(share, room - len(columns)) if s.decodes else room - len(columns))
            columns += new
            parts += [(s, len(new))] if new else []
        if not columns:
            return
        scored = any(s.request.logprobs is not None for s, _ in parts)
        try:
            chosen = self.run(columns, self._logits if scored else None)
        except RequestFailed as error:
            for s, _ in parts:
                s.fail(str(error))
            return
        first = 0
        for s, count in parts:
            self._take(
                s, chosen[first : first + count], self._logits[first : first + count] if scored else None
            )
            first += count

    def _take(self, s: Decoding, chosen: list[int], logits: torch.Tensor | None) -> None:
        begins, new = not s.made, s.take(chosen, logits)
        assert s.slot is not None
        if begins and new:
            self.slots.keep(s.ids[: s.prompt_length], s.prompt_length + s.max_tokens - 1, s.slot)
        if s.penalises:
            for token, memory in itertools.product(set(new), self.memories):
                memory.times[s.slot.number, token] = s.tokens.count(token)

    @functools.cached_property
    def _logits(self) -> torch.Tensor:
        shape = self.geometry.mma_columns, self.config.vocab_size
        return torch.empty(shape, dtype=torch.float32, device=self.memories[0].device)

    def run(self, columns: Sequence[Column], logits: torch.Tensor | None = None) -> list[int]:
        """The token that each column would be followed by. `logits`: float32 (columns, V)
        on the device, filled.

        RequestFailed after a hang.
        """
        if self.memories[0].epoch > LAST_EPOCH // self.config.num_hidden_layers:
            self._reset()
        inboxes = [memory.inbox for memory in self.memories]
        arguments = []
        for memory in self.memories:
            changes = Changes(memory.times.data_ptr(), memory.bias.data_ptr())
            argument = memory.arguments(
                inboxes, [0], 0, 1, limit_s=self.limit_s, logits=logits, changes=changes
            )
            argument.column_count, argument.columns[: len(columns)] = len(columns), columns
            arguments.append(argument)
            memory.epoch += 1  # whatever becomes of this pass, no other one uses it
        self.passes += 1
        self._launch(arguments)
        end_hang(self.memories, "pass", self.limit_s)
        return self.memories[0].tokens[: len(columns)].tolist()

    def _reset(self) -> None:
        for memory in self.memories:
            memory.reset_words()

    def _launch(self, arguments: Sequence[ctypes.Structure]) -> None:
        for device in self.devices:  # what `arguments` has written is there
            torch.cuda.synchronize(device)
        for kernels, argument, stream in zip(self.kernels, arguments, self._streams, strict=True):
            with torch.cuda.device(kernels.device), torch.cuda.stream(stream):
                kernels.launch("pass", argument)
        while not all(stream.query() for stream in self._streams):
            time.sleep(POLL_S)
