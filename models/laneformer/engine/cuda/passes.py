"""Passes over the weights for up to 8 columns: sequences side by side, drafts, ids of prompts.

Between two launches the host says what the columns are. Where each of them draws the next token of a sequence, a
launch may go on alone for some passes, and its tokens are read while it runs. Each sequence draws the tokens that it
would draw alone, whatever shares its passes. Long prompts are read by PyTorch, a piece between two passes.
Each pass is one kernel (passes.cu); graph.py has the version that replays a graph of kernels.
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


def sequences_in(free: int, geometry: Geometry, cache_bytes: int | None) -> int:
    """KV capacity in sequences, given `free` bytes of device memory before anything else of a pass is allocated.

    One for each column, plus cached ones in a quarter of the remainder or in `cache_bytes`. ValueError if the
    columns alone do not fit.
    """
    config, columns, lanes = geometry.config, geometry.columns, geometry.lanes_per_device
    tiles, each = int(tape_starts(geometry)[-1]), 2 * lanes * geometry.kv_lane
    words = 8 * columns * (lanes * geometry.lane_words + geometry.inbox_words)
    needed = tiles + 2 * config.vocab_size * config.hidden_size + words + columns * each
    if needed > free:
        raise ValueError(
            f"a pass of {columns} columns needs {needed / 1e9:.1f} GB, {tiles / 1e9:.1f} of them for weights; "
            f"the GPU has {free / 1e9:.1f} GB free; use a smaller context_tokens or more GPUs"
        )
    spare = (free - needed) // 4 if cache_bytes is None else min(cache_bytes, free - needed)
    return columns + min(MAX_CACHES - columns, spare // each)


def fit_builds(
    builds: list[Geometry], free: int, cache_bytes: int | None
) -> tuple[list[Geometry], int]:
    """The builds whose columns have memory, and for how many sequences; ValueError where none has."""
    while len(builds) > 1:
        with contextlib.suppress(ValueError):
            return builds, sequences_in(free, builds[-1], cache_bytes)
        builds = builds[:-1]
    return builds, sequences_in(free, builds[-1], cache_bytes)


class PassDecoder:
    """Weights as tiles on the GPUs, and passes over them. `geometry`: of the build with the most columns.

    columns, sequences: at most in a pass. unread: prompt ids that columns may read; more are read by PyTorch.
    ahead: further tokens of each column that a call of `run` may make.
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
        """`cache_bytes`: of each GPU, for earlier sequences; None: a quarter of what is left. `limit_s`: of a wait.
        A GPU that is named more than once is shared out.

        ValueError for a model or a GPU that tiles do not fit; NotResident where blocks would not
        all run at once.
        """
        self.config, self.limit_s = config, limit_s
        self.devices = [torch.device(device) for device in devices]
        machine, self._sharing = share_of(self.devices)
        shape: Any = {"devices": len(devices), "half": half_of(tensors)}
        builds = plan_builds(config, dtype, machine, self.version, **shape)
        free = min(torch.cuda.mem_get_info(device)[0] for device in self.devices) // self._sharing
        self.builds, sequences = fit_builds(builds, free, cache_bytes)
        self.geometry = self.builds[-1]
        connect(self.devices)
        self._load()
        self._streams = [torch.cuda.Stream(device) for device in self.devices]
        self._hold(
            [
                DeviceMemory(self.geometry, tensors, i, d, sequences)
                for i, d in enumerate(self.devices)
            ]
        )
        self.ahead = self._passes_that_follow()

    def _load(self) -> None:
        """The kernels of the builds; NotResident where blocks would not all run at once."""
        shared = self._sharing > 1
        self.kernels = [
            [Kernels(self.version, g, d, shared) for d in self.devices] for g in self.builds
        ]
        for of_build in self.kernels:
            for kernels in of_build:
                kernels.require_resident("pass", self._sharing)
                kernels.load("pass")

    def _hold(self, memories: list[DeviceMemory]) -> None:
        self.memories, self.caches, self.passes = memories, Caches(memories), 0
        self.columns = self.sequences = self.geometry.columns
        self.unread, self.ahead = COLUMN_TOKENS * self.columns, PASSES_PER_LAUNCH - 1

    def _passes_that_follow(self) -> int:
        """The test at load: how many passes a launch may make unasked. A warning where these are fewer than usual.

        The tokens of one launch must be those of as many launches. RuntimeError where not even one pass runs;
        NotResident where others have the multiprocessors.
        """
        single, column = list[int](), Column(0, 0, 0)
        for position in range(3):
            start_s = time.monotonic()
            (row,) = self.run([Column(single[-1] if single else 0, position, 0)])
            pass_s = time.monotonic() - start_s
            single += row
        most = min(PASSES_PER_LAUNCH - 1, int(LAUNCH_S / pass_s))
        try:
            rows = self.run([column], most)
            right = len(rows) == 1 + most and [token for (token,) in rows][:3] == single[: 1 + most]
            reason = "they give other tokens"
        except RequestFailed as error:
            if isinstance(error, Unanswered):
                raise
            right, reason = False, str(error)
        if not right:
            warnings.warn(f"a launch makes one pass, as several fail: {reason}", stacklevel=6)
        return most * right

    @functools.cached_property
    def tape_model(self) -> TapeModel:
        """The PyTorch model on the tiles, for long prompts and scores; made when it is first needed."""
        return TapeModel(self.memories)

    def read(
        self, ids: Sequence[int], cache: int, position: int, first_row: int
    ) -> Iterator[torch.Tensor]:
        """Fill a cache from `position` on, by PyTorch; float32 logits (n, V), in blocks, of the positions from
        `first_row` on.
        """
        return read_prompt(
            self.tape_model, ids, DeviceCache(self.caches.of(cache), position), first_row
        )

    def run(
        self,
        columns: Sequence[Column],
        ahead: int = 0,
        logits: torch.Tensor | None = None,
        look: Look | None = None,
    ) -> list[list[int]]:
        """The token that each column would be followed by, then up to `ahead` times those that follow these.

        Each column goes on with the token that it drew, until that is one of its stop ids or its `left`-th; then it
        has -1. A launch makes PASSES_PER_LAUNCH at most, and ends when all columns have. logits: float32
        (columns, V) of the first row, on the device, filled. look: is told now and then what there is so far.

        ValueError for columns that the device cannot go on with: two of one sequence, logits. RequestFailed after a
        hang. RuntimeError where the GPU fails.
        """
        if ahead and (logits is not None or len({c.sequence for c in columns}) < len(columns)):
            raise ValueError(
                "passes ahead are of one column a sequence, without logits, which are the host's affair after each "
                "pass; use ahead = 0"
            )
        memory, more = self.memories[0], min(ahead, len(self.memories[0].picks) - 1)
        if memory.epoch + more > LAST_EPOCH // self.config.num_hidden_layers:
            self._reset_words()
        first, arguments = memory.epoch, self._arguments(columns, more, logits)
        self._launch(arguments)
        for _ in self._until_done(1 + more):
            if look is not None and look(memory.read_picks(first, len(columns))):
                memory.cancel.fill_(1)  # its first block tells the others
        self._end_hang()
        rows = memory.read_picks(first, len(columns))
        self.passes += len(rows)
        return rows

    def _until_done(self, passes: int) -> Iterator[None]:
        """Again and again while the launch runs. Unanswered where it never ends: a kernel that waits for its weights
        does not look at the clock.
        """
        longest_s = self.limit_s + passes * PASS_S + self.late_s
        last_s = time.monotonic() + longest_s
        while not all(stream.query() for stream in self._streams):
            yield
            if time.monotonic() > last_s:
                raise Unanswered(f"the pass kernel has not ended within {longest_s:g} s")
            time.sleep(POLL_S)

    def _end_hang(self) -> None:
        """RequestFailed, which says who waited for what, if a launch has given up a wait."""
        for report in [memory.hang() for memory in self.memories]:
            if report is not None:
                self._reset_words()
                raise RequestFailed(report.describe(self.limit_s))

    def _reset_words(self) -> None:
        """No word on any device is of any epoch."""
        for memory in self.memories:
            memory.reset_words()

    def _arguments(
        self, columns: Sequence[Column], ahead: int, logits: torch.Tensor | None
    ) -> list[ctypes.Structure]:
        inboxes, arguments = [memory.inbox for memory in self.memories], []
        for memory in self.memories:
            argument = memory.arguments(inboxes, self.limit_s)
            order = argument.order
            order.column_count, order.columns[: len(columns)] = len(columns), columns
            order.epoch, order.ahead = memory.epoch, ahead
            order.logits = None if logits is None else logits.data_ptr()
            arguments.append(argument)
            memory.cancel.zero_()
            # whatever becomes of these passes, no others use their epochs
            memory.epoch += 1 + ahead
        return arguments

    def _launch(self, arguments: Sequence[Any]) -> None:
        kernels = self.kernels[self.build_for(arguments)]
        for of_device, argument, stream in zip(kernels, arguments, self._streams, strict=True):
            with torch.cuda.device(of_device.device), torch.cuda.stream(stream):
                of_device.launch("pass", argument)

    def build_for(self, arguments: Sequence[Any]) -> int:
        """The smallest build that holds their columns."""
        counts = [geometry.columns for geometry in self.builds]
        return bisect.bisect_left(counts, arguments[0].order.column_count)


def connect(devices: Sequence[torch.device]) -> None:
    """Let every GPU write to the memory of every other; ValueError where it cannot."""
    for device in devices:
        for other in devices:
            if other != device and not torch.cuda.can_device_access_peer(device, other):
                raise ValueError(
                    f"{device} cannot reach the memory of {other}; the lanes need peer-to-peer access"
                )
            torch.zeros(1, device=device).to(other)  # torch opens the way at the first copy
