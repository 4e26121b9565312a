"""Several sequences side by side, and several positions of one: passes of up to 8 columns (passes.cu).

A launch is one pass; between two of them the host says what the columns are. As in the CPU engine (csrc/passes.cpp):
first the next id of each sequence that decodes, and draft tokens after it; then as many ids of prompts as there is room
for. Each sequence draws the tokens that it would draw alone, whatever shares its passes.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ...config import LaneformerConfig
from ...tensors import Tensor
from ..decoder import Request, Sampling
from .geometry import Geometry, Machine
from .launch import Kernels, describe
from .memory import Column, DeviceMemory, end_hang
from .planning import plan

COLUMNS = (8, 4, 2)  # of a pass: as many as fit
LAST_EPOCH = 2**30  # of all layers together
LEAST_RING_BYTES = 32 << 10  # of a block, under way while it computes; with less, fewer columns are read faster
LONGEST_PHRASE, SHORTEST_PHRASE = 4, 2  # ids that must agree before what followed them is drafted
POLL_S = 0.00005


@dataclass
class Decoding:
    """One sequence. `position`: ids before it have their keys and values in cache `sequence`, when it has one."""

    ids: list[int]
    max_tokens: int
    stops: frozenset[int]
    sampling: Sampling
    speculate: int = 0
    sequence: int = -1
    position: int = 0
    finished: bool = False
    drafts: list[int] = field(default_factory=list)
    run: int = 0  # known ids in the pass under way; the drafts come after them
    proposed: int = 0
    accepted: int = 0

    def __post_init__(self) -> None:
        self.prompt_length = len(self.ids)
        self.finished = self.max_tokens == 0

    @property
    def tokens(self) -> list[int]:
        return self.ids[self.prompt_length :]

    @property
    def decodes(self) -> bool:
        return self.position + 1 == len(self.ids)

    def columns(self, most: int) -> list[Column]:
        """The next pass's columns of this sequence, at most `most`."""
        self.run = min(len(self.ids) - self.position, most)
        left = self.prompt_length + self.max_tokens - len(self.ids) - 1
        draws = self.run > 0 and self.position + self.run == len(self.ids)
        self.drafts = draft(self.ids, min(self.speculate, most - self.run, left)) if draws else []
        self.proposed += len(self.drafts)
        new = self.ids[self.position : self.position + self.run] + self.drafts
        return [Column(token, self.position + i, self.sequence, self.sampling) for i, token in enumerate(new)]

    def take(self, chosen: Sequence[int]) -> None:
        """What each of those columns would be followed by: one token, and one more for each draft that was right."""
        self.position += self.run
        if self.position < len(self.ids):
            return
        for i, token in enumerate(chosen[self.run - 1 :]):
            self.ids.append(token)
            right = self.drafts[i : i + 1] == [token]
            self.accepted += right
            self.finished = token in self.stops or len(self.ids) == self.prompt_length + self.max_tokens
            if self.finished or not right:
                return
            self.position += 1  # the draft's keys and values stand


def draft(ids: Sequence[int], most: int) -> list[int]:
    """Prompt lookup: `most` ids that followed the latest earlier place of the last few ids (as csrc/sequence.cpp)."""
    length = len(ids)
    for phrase in range(LONGEST_PHRASE, SHORTEST_PHRASE - 1, -1) if most > 0 else ():
        last = list(ids[length - phrase :])
        for end in range(length - 1, phrase - 1, -1):
            if list(ids[end - phrase : end]) == last:
                drafts: list[int] = []
                for i in range(most):  # a repetition may continue into its own drafts
                    drafts.append(ids[end + i] if end + i < length else drafts[end + i - length])
                return drafts
    return []


def plan_columns(config: LaneformerConfig, dtype: str, machine: Machine, devices: int = 1) -> Geometry:
    """The geometry with the most columns that leave memory for the ring; ValueError where not even two fit."""
    for columns in COLUMNS:
        with contextlib.suppress(ValueError):
            geometry = plan(config, dtype, machine, devices=devices, mma_columns=columns)
            if geometry.warps * geometry.chunks * geometry.chunk_bytes >= LEAST_RING_BYTES:
                return geometry
    return plan(config, dtype, machine, devices=devices, mma_columns=COLUMNS[-1])


def shares_passes(request: Request) -> bool:
    """Whether a pass for several columns has use, and no option forbids it."""
    known = ("prompts", "max_new_tokens", "stop_ids", "reuse_prefix", "speculate", "sampling", "seeds")
    others = [f for f in dataclasses.fields(Request) if f.name not in known]
    plain = all(getattr(request, f.name) in (f.default, []) for f in others)
    return plain and (len(request.prompts) > 1 or request.speculate > 0)


def decodings(request: Request, context: int) -> list[Decoding]:
    """The request's sequences."""
    made = []
    for i, ids in enumerate(request.prompts):
        sampling = Sampling.from_buffer_copy(request.sampling)
        sampling.seed = request.seeds[i] if request.seeds else sampling.seed
        most = min(request.max_new_tokens, context - len(ids) + 1)
        made.append(Decoding(list(ids), most, frozenset(request.stop_ids), sampling, request.speculate))
    return made


class PassDecoder:
    """Weights as tiles on the GPUs, and passes over them. RequestFailed after a hang says who waited for what."""

    def __init__(
        self, config: LaneformerConfig, tensors: Mapping[str, Tensor], dtype: str, devices: Sequence[str] = ("cuda:0",),
        limit_s: float = 10.0,
    ):  # fmt: skip
        """ValueError for a model or a GPU that tiles do not fit; NotResident where blocks would not all run at once."""
        self.config, self.limit_s = config, limit_s
        self.devices = [torch.device(device) for device in devices]
        machine, sharing = describe(self.devices[0]), max(map(self.devices.count, self.devices))
        machine = dataclasses.replace(machine, multiprocessors=machine.multiprocessors // sharing)
        self.geometry = plan_columns(config, dtype, machine, len(devices))
        self.kernels = [Kernels("passes", self.geometry, device, sharing > 1) for device in self.devices]
        for kernels in self.kernels:
            kernels.require_resident("pass", sharing)
            kernels.load("pass")
        self.memories = [DeviceMemory(self.geometry, tensors, i, device) for i, device in enumerate(self.devices)]
        self._streams = [torch.cuda.Stream(device) for device in self.devices]
        self.passes = 0

    def advance(self, sequences: Sequence[Decoding]) -> None:
        """One pass: a token or more for each sequence that decodes, and ids of the others' prompts.

        There are as many caches as columns; further sequences wait until one is free.
        """
        room, columns, parts = self.geometry.mma_columns, list[Column](), list[tuple[Decoding, int]]()
        running = [s for s in sequences if not s.finished][:room]
        free = sorted(set(range(room)) - {s.sequence for s in running})
        for s in running:
            if s.sequence < 0:
                s.sequence = free.pop(0)
        decoding, prompts = [s for s in running if s.decodes], [s for s in running if not s.decodes]
        share = room // max(1, len(decoding))
        for s in (*decoding, *prompts):
            new = s.columns(min(share, room - len(columns)) if s.decodes else room - len(columns))
            columns += new
            parts.append((s, len(new)))
        chosen = self.run(columns)
        for s, count in parts:
            mine, chosen = chosen[:count], chosen[count:]
            if mine:
                s.take(mine)

    def run(self, columns: Sequence[Column], logits: torch.Tensor | None = None) -> list[int]:
        """The token that each column would be followed by. `logits`: float32 (columns, V) on the device, filled."""
        if self.memories[0].epoch > LAST_EPOCH // self.config.num_hidden_layers:
            self._reset()
        inboxes = [memory.inbox for memory in self.memories]
        arguments = [m.arguments(inboxes, [0], 0, 1, limit_s=self.limit_s, logits=logits) for m in self.memories]
        for memory, argument in zip(self.memories, arguments, strict=True):
            argument.column_count, argument.columns[: len(columns)] = len(columns), columns
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
