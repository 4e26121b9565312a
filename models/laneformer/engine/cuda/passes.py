"""Decode up to 8 columns (sequences side by side, drafts, prompt ids) in each pass over the weights.

Each pass is one kernel (passes.cu); graph.py has the version that replays a graph of kernels.
A sequence gets the same tokens whatever else shares its passes.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import functools
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ...config import LaneformerConfig
from ...tensors import Tensor
from ..decoder import RequestFailed, Unanswered
from .caches import MAX_CACHES, Caches
from .geometry import Geometry
from .launch import Kernels, share_of
from .memory import DeviceMemory, half_of
from .planning import plan_builds
from .prefill import DeviceCache, read_prompt
from .structures import PASSES_PER_LAUNCH, Column
from .tape import tape_starts
from .tape_model import TapeModel

# at tokens [pass][column]; whether to end after the pass under way
Look = Callable[[list[list[int]]], bool]
LAST_EPOCH = 2**31  # of all layers together
# ids that a column reads of a prompt at most: eight times as many take as long as a small piece
COLUMN_TOKENS = 8
POLL_S = 0.00005
PASS_S = 0.02  # far longer than any pass takes
LATE_S = 1.0  # a kernel that gives up a wait by itself says who waited for what: it comes first
LAUNCH_S = 1.0  # of a launch at most: the driver of a GPU with a display ends one after 2 s or more


def count_caches(free_bytes: int, geometry: Geometry, cache_bytes: int | None) -> int:
    """Return how many KV caches fit, given `free_bytes` of device memory before any allocation.

    Raises:
        ValueError: The columns alone do not fit.
    """
    config, columns, lanes = geometry.config, geometry.columns, geometry.lanes_per_device
    tape_bytes, sequence_bytes = int(tape_starts(geometry)[-1]), 2 * lanes * geometry.kv_lane
    words = 8 * columns * (lanes * geometry.lane_words + geometry.inbox_words)
    needed = (
        tape_bytes + 2 * config.vocab_size * config.hidden_size + words + columns * sequence_bytes
    )
    if needed > free_bytes:
        raise ValueError(
            f"a pass of {columns} columns needs {needed / 1e9:.1f} GB, {tape_bytes / 1e9:.1f} of them for weights; "
            f"the GPU has {free_bytes / 1e9:.1f} GB free; use a smaller context_tokens or more GPUs"
        )
    # one sequence for each column; cached ones get a quarter of the remainder, or `cache_bytes`
    cache_room_bytes = (
        (free_bytes - needed) // 4 if cache_bytes is None else min(cache_bytes, free_bytes - needed)
    )
    return columns + min(MAX_CACHES - columns, cache_room_bytes // sequence_bytes)


def fit_builds(
    builds: list[Geometry], free_bytes: int, cache_bytes: int | None
) -> tuple[list[Geometry], int]:
    """Return the builds whose columns fit, and how many KV caches fit."""
    while len(builds) > 1:
        with contextlib.suppress(ValueError):
            return builds, count_caches(free_bytes, builds[-1], cache_bytes)
        builds = builds[:-1]
    return builds, count_caches(free_bytes, builds[-1], cache_bytes)


class PassRunner:
    """Hold the weights as tiles on the GPUs and run passes over them.

    Attributes:
        geometry: Of the build with the most columns.
        columns, sequences: Most of them in a pass.
        unread: Prompt ids that columns may read; PyTorch reads longer prompts.
        extra_passes: Further tokens of each column that a call of `run` may make.
    """

    version = "passes"
    late_s = LATE_S

    def __init__(
        self,
        config: LaneformerConfig,
        tensors: Mapping[str, Tensor],
        dtype: str,
        devices: Sequence[str] = ("cuda:0",),
        limit_s: float = 10.0,
        cache_bytes: int | None = None,
    ):
        """Load the weights and test the kernels.

        Args:
            devices: A GPU that is named more than once is shared out.
            limit_s: Longest wait of a kernel.
            cache_bytes: Of each GPU, for earlier sequences; None takes a quarter of what is left.

        Raises:
            ValueError: Tiles do not fit the model or the GPU.
            NotResident: Blocks would not all run at once.
        """
        self.config, self.limit_s = config, limit_s
        self.devices = [torch.device(device) for device in devices]
        machine, self._sharing = share_of(self.devices)
        shape: Any = {"devices": len(devices), "half": half_of(tensors)}
        builds = plan_builds(config, dtype, machine, self.version, **shape)
        free = min(torch.cuda.mem_get_info(device)[0] for device in self.devices) // self._sharing
        self.builds, cache_count = fit_builds(builds, free, cache_bytes)
        self.geometry = self.builds[-1]
        connect(self.devices)
        self._load()
        self._streams = [torch.cuda.Stream(device) for device in self.devices]
        self._hold(
            [
                DeviceMemory(self.geometry, tensors, i, d, cache_count)
                for i, d in enumerate(self.devices)
            ]
        )
        self.extra_passes = self._passes_that_follow()

    def _load(self) -> None:
        shared = self._sharing > 1
        self.kernels = [
            [Kernels(self.version, g, d, shared) for d in self.devices] for g in self.builds
        ]
        for build_kernels in self.kernels:
            for kernels in build_kernels:
                kernels.require_resident("pass", self._sharing)
                kernels.load("pass")

    def _hold(self, memories: list[DeviceMemory]) -> None:
        self.memories, self.caches, self.passes = memories, Caches(memories), 0
        self.columns = self.sequences = self.geometry.columns
        self.unread, self.extra_passes = COLUMN_TOKENS * self.columns, PASSES_PER_LAUNCH - 1

    def _passes_that_follow(self) -> int:
        """Return how many further passes a launch may make, after a test of the kernels.

        Raises:
            RuntimeError: Not even one pass runs.
            NotResident: Other processes occupy the multiprocessors.
        """
        # the tokens of one launch of several passes must be those of as many single launches
        single, column = list[int](), Column(0, 0, 0)
        for position in range(3):
            start_s = time.monotonic()
            (row,) = self.run([Column(single[-1] if single else 0, position, 0)])
            pass_s = time.monotonic() - start_s
            single += row
        count = min(PASSES_PER_LAUNCH - 1, int(LAUNCH_S / pass_s))
        try:
            rows = self.run([column], count)
            agrees = (
                len(rows) == 1 + count and [token for (token,) in rows][:3] == single[: 1 + count]
            )
            reason = "they give other tokens"
        except RequestFailed as error:
            if isinstance(error, Unanswered):
                raise
            agrees, reason = False, str(error)
        if not agrees:
            warnings.warn(f"a launch makes one pass, as several fail: {reason}", stacklevel=6)
        return count * agrees

    @functools.cached_property
    def tape_model(self) -> TapeModel:
        return TapeModel(self.memories)

    def read(
        self, ids: Sequence[int], cache: int, position: int, first_row: int
    ) -> Iterator[torch.Tensor]:
        """Fill a cache from `position` on by PyTorch.

        Yields:
            Blocks of float32 logits (n, V) of the positions from `first_row` on.
        """
        return read_prompt(
            self.tape_model, ids, DeviceCache(self.caches.of(cache), position), first_row
        )

    def run(
        self,
        columns: Sequence[Column],
        extra_passes: int = 0,
        logits: torch.Tensor | None = None,
        look: Look | None = None,
    ) -> list[list[int]]:
        """Return the next token of each column, then up to `extra_passes` further rows of tokens.

        Args:
            logits: float32 (columns, V) on the device, filled with those of the first row.
            look: Called with the tokens so far; True ends the launch.

        Raises:
            ValueError: `extra_passes` with logits, or with two columns of one sequence.
            RequestFailed: A launch hung.
        """
        if extra_passes and (
            logits is not None or len({c.sequence for c in columns}) < len(columns)
        ):
            raise ValueError(
                "extra passes are of one column a sequence, without logits, which are the host's affair after each "
                "pass; use extra_passes = 0"
            )
        memory, ahead_passes = self.memories[0], min(extra_passes, len(self.memories[0].picks) - 1)
        if memory.epoch + ahead_passes > LAST_EPOCH // self.config.num_hidden_layers:
            self._reset_words()
        first_epoch, arguments = memory.epoch, self._arguments(columns, ahead_passes, logits)
        self._launch(arguments)
        for _ in self._until_done(1 + ahead_passes):
            if look is not None and look(memory.read_picks(first_epoch, len(columns))):
                memory.cancel.fill_(1)  # its first block tells the others
        self._end_hang()
        # -1 after a column's stop id or its `left`-th token; a launch ends when all columns have
        rows = memory.read_picks(first_epoch, len(columns))
        self.passes += len(rows)
        return rows

    def _until_done(self, passes: int) -> Iterator[None]:
        """Yield while the launch runs; raise Unanswered after too long."""
        # the host has a limit, too: a kernel that waits for its weights does not look at the clock
        longest_s = self.limit_s + passes * PASS_S + self.late_s
        last_s = time.monotonic() + longest_s
        while not all(stream.query() for stream in self._streams):
            yield
            if time.monotonic() > last_s:
                raise Unanswered(f"the pass kernel has not ended within {longest_s:g} s")
            time.sleep(POLL_S)

    def _end_hang(self) -> None:
        for report in [memory.hang() for memory in self.memories]:
            if report is not None:
                self._reset_words()
                raise RequestFailed(report.describe(self.limit_s))

    def _reset_words(self) -> None:
        for memory in self.memories:
            memory.reset_words()

    def _arguments(
        self, columns: Sequence[Column], extra_passes: int, logits: torch.Tensor | None
    ) -> list[ctypes.Structure]:
        inboxes, arguments = [memory.inbox for memory in self.memories], []
        for memory in self.memories:
            argument = memory.arguments(inboxes, self.limit_s)
            order = argument.order
            order.column_count, order.columns[: len(columns)] = len(columns), columns
            order.epoch, order.extra_passes = memory.epoch, extra_passes
            order.logits = None if logits is None else logits.data_ptr()
            arguments.append(argument)
            memory.cancel.zero_()
            # whatever becomes of these passes, no others use their epochs
            memory.epoch += 1 + extra_passes
        return arguments

    def _launch(self, arguments: Sequence[Any]) -> None:
        kernels = self.kernels[self.build_for(arguments)]
        for device_kernels, argument, stream in zip(kernels, arguments, self._streams, strict=True):
            with torch.cuda.device(device_kernels.device), torch.cuda.stream(stream):
                device_kernels.launch("pass", argument)

    def build_for(self, arguments: Sequence[Any]) -> int:
        """Return the index of the smallest build that holds the columns."""
        counts = [geometry.columns for geometry in self.builds]
        return bisect.bisect_left(counts, arguments[0].order.column_count)


def connect(devices: Sequence[torch.device]) -> None:
    """Let every GPU write to the memory of every other; raise ValueError where it cannot."""
    for device in devices:
        for other in devices:
            if other != device and not torch.cuda.can_device_access_peer(device, other):
                raise ValueError(
                    f"{device} cannot reach the memory of {other}; the lanes need peer-to-peer access"
                )
            torch.zeros(1, device=device).to(other)  # torch opens the way at the first copy
