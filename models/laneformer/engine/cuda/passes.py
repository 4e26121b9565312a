"""Several sequences side by side, and several positions of one: passes of up to 8 columns (passes.cu).

Between two launches the host says what the columns are. Where each of them draws the next token of a sequence,
a launch may go on alone for some passes, and its tokens are read while it runs. Each sequence draws the tokens that
it would draw alone, whatever shares its passes. Long prompts are read by PyTorch, a piece between two passes.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence

import torch

from ...config import LaneformerConfig
from ...tensors import Tensor
from ..decoder import RequestFailed
from .caches import MAX_CACHES, Caches
from .executor import Look
from .geometry import Geometry
from .launch import Kernels, share_of, start
from .memory import PASSES_PER_LAUNCH, Changes, Column, DeviceMemory, end_hang, half_of, reset
from .planning import plan_builds
from .prefill import DeviceCache, read
from .sequence import connect
from .tape import tape_starts
from .tape_model import TapeModel

LAST_EPOCH = 2**30  # of all layers together
IN_PASS_TOKENS = 64  # so many ids at most are read by passes alone: eight take as long as a small piece
POLL_S = 0.00005
PASS_S = 0.02  # far longer than any pass takes
LATE_S = 1.0  # a kernel that gives up a wait by itself says who waited for what: it comes first


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
    """Weights as tiles on the GPUs, and passes over them (executor.Passes). `geometry`: of the build with the most
    columns.
    """

    unread, ahead = IN_PASS_TOKENS, PASSES_PER_LAUNCH - 1

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
        machine, sharing = share_of(self.devices)
        self.builds = plan_builds(config, dtype, machine, len(devices), half_of(tensors))
        self.geometry = self.builds[-1]
        free = min(torch.cuda.mem_get_info(device)[0] for device in self.devices) // sharing
        sequences = sequences_in(free, self.geometry, cache_bytes)
        connect(self.devices)
        self.kernels = [[Kernels("passes", g, d, sharing > 1) for d in self.devices] for g in self.builds]
        for kernels in itertools.chain(*self.kernels):
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
        self, columns: Sequence[Column], ahead: int = 0, logits: torch.Tensor | None = None,
        look: Look | None = None,
    ) -> list[list[int]]:  # fmt: skip
        """As `Passes.run`. A launch makes PASSES_PER_LAUNCH at most, and ends when all columns have.

        Each column goes on with the token that it drew, until that is one of its stop ids or its `left`-th; then it
        has -1.

        ValueError for columns that the device cannot go on with: drafts, two of one sequence, penalties,
        min_new_tokens, logits. RequestFailed after a hang.
        """
        if ahead:
            check_ahead(columns, logits)
        memory, more = self.memories[0], min(ahead, len(self.memories[0].picks) - 1)
        if memory.epoch + more > LAST_EPOCH // self.config.num_hidden_layers:
            reset(self.memories)
        first, arguments = memory.epoch, self._arguments(columns, more, logits)
        self._launch(arguments)
        for _ in self._until_done(1 + more):
            if look is not None and look(memory.picked(first, len(columns))):
                memory.cancel.fill_(1)  # its first block tells the others
        end_hang(self.memories, "pass", self.limit_s)
        rows = memory.picked(first, len(columns))
        self.passes += len(rows)
        return rows

    def _until_done(self, passes: int) -> Iterator[None]:
        """Again and again while the launch runs. RequestFailed where it never ends: a kernel that waits for its weights
        does not look at the clock.
        """
        longest_s = self.limit_s + passes * PASS_S + LATE_S
        last_s = time.monotonic() + longest_s
        while not all(stream.query() for stream in self._streams):
            yield
            if time.monotonic() > last_s:
                raise RequestFailed(f"the pass kernel has not ended within {longest_s:g} s")
            time.sleep(POLL_S)

    def _arguments(
        self, columns: Sequence[Column], ahead: int, logits: torch.Tensor | None
    ) -> list[ctypes.Structure]:
        inboxes, arguments = [memory.inbox for memory in self.memories], []
        for memory in self.memories:
            changes = Changes(memory.times.data_ptr(), memory.bias.data_ptr())
            argument = memory.arguments(
                inboxes, [], 0, 1, limit_s=self.limit_s, logits=logits, changes=changes
            )
            argument.column_count, argument.columns[: len(columns)] = len(columns), columns
            argument.picks, argument.ahead = memory.picks.data_ptr(), ahead
            arguments.append(argument)
            memory.epoch += 1 + ahead  # whatever becomes of these passes, no others use their epochs
        return arguments

    def _launch(self, arguments: Sequence[ctypes.Structure]) -> None:
        for device in self.devices:  # what `arguments` has written is there
            torch.cuda.synchronize(device)
        start(self.kernels[self.build_for(arguments)], "pass", arguments, self._streams)

    def build_for(self, arguments: Sequence[ctypes.Structure]) -> int:
        """The smallest build that holds their columns."""
        counts = [geometry.mma_columns for geometry in self.builds]
        return bisect.bisect_left(counts, arguments[0].column_count)


def check_ahead(columns: Sequence[Column], logits: torch.Tensor | None) -> None:
    """ValueError where passes cannot follow without the host."""
    plain = all(c.drafts == 0 and c.times_row < 0 and c.changes.min_new_tokens == 0 for c in columns)
    if not plain or logits is not None or len({c.sequence for c in columns}) < len(columns):
        raise ValueError(
            "passes ahead are of one column a sequence, without drafts, penalties, min_new_tokens or logits, which "
            "are the host's affair after each pass; use ahead = 0"
        )
