"""Several sequences side by side, and several positions of one: passes of up to 8 columns (passes.cu).

A launch is one pass; what its columns are is the schedule's to say (executor.py). Each sequence draws the tokens that
it would draw alone, whatever shares its passes.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import time
from collections.abc import Iterator, Mapping, Sequence

import torch

from ...config import LaneformerConfig
from ...tensors import Tensor
from ..decoder import RequestFailed
from .caches import MAX_CACHES, Caches
from .geometry import Geometry, Machine
from .launch import Kernels, describe
from .memory import Changes, Column, DeviceMemory, end_hang
from .planning import plan
from .prefill import DeviceCache, read
from .sequence import connect
from .tape import tape_starts
from .tape_model import TapeModel

COLUMNS = (8, 4, 2)  # of a pass: as many as fit
LAST_EPOCH = 2**30  # of all layers together
MIN_RING_BYTES = 32 << 10  # of a block, under way while it computes; with less, fewer columns are read faster
IN_PASS_TOKENS = 64  # so many ids at most are read by passes alone: eight take as long as a small piece
POLL_S = 0.00005
PASS_S = 0.02  # far longer than any pass takes


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
    return columns + min(MAX_CACHES - columns, spare // each)


class PassDecoder:
    """Weights as tiles on the GPUs, and passes over them (executor.Passes). After a hang its error says who waited
    for what.
    """

    unread, ahead = IN_PASS_TOKENS, 0

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
        self.memories, self.caches, self.passes = memories, Caches(memories), 0
        self.columns = self.sequences = self.geometry.mma_columns

    @functools.cached_property
    def tape_model(self) -> TapeModel:
        """The PyTorch model on the tiles, for long prompts and scores; made when it is first needed."""
        return TapeModel(self.memories)

    def read(self, ids: Sequence[int], cache: int, position: int, first_row: int) -> Iterator[torch.Tensor]:
        return read(self.tape_model, ids, DeviceCache(self.caches.of(cache), position), first_row)

    def run(
        self, columns: Sequence[Column], ahead: int = 0, logits: torch.Tensor | None = None
    ) -> list[list[int]]:
        """As `Passes.run`; a launch is one pass, so nothing is made ahead. RequestFailed after a hang."""
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
        return [self.memories[0].tokens[: len(columns)].tolist()]

    def _reset(self) -> None:
        for memory in self.memories:
            memory.reset_words()

    def _launch(self, arguments: Sequence[ctypes.Structure]) -> None:
        for device in self.devices:  # what `arguments` has written is there
            torch.cuda.synchronize(device)
        for kernels, argument, stream in zip(self.kernels, arguments, self._streams, strict=True):
            with torch.cuda.device(kernels.device), torch.cuda.stream(stream):
                kernels.launch("pass", argument)
        last_s = time.monotonic() + self.limit_s + PASS_S
        while not all(stream.query() for stream in self._streams):
            if time.monotonic() > last_s:
                raise RequestFailed(f"the pass kernel has not ended within {self.limit_s + PASS_S:g} s")
            time.sleep(POLL_S)
