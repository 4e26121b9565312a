"""Passes over the weights for up to 8 columns: sequences side by side, drafts, ids of prompts.

Between two launches the host says what the columns are. Where each of them draws the next token of a sequence, a
launch may go on alone for some passes, and its tokens are read while it runs. Each sequence draws the tokens that it
would draw alone, whatever shares its passes. Long prompts are read by PyTorch, a piece between two passes.
`version="passes"` is one kernel (passes.cu); "graph" replays a captured graph of kernels for each pass, of one column.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import itertools
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ...config import MODULES, Join, LaneformerConfig
from ...tensors import Tensor
from ..decoder import RequestFailed, Unanswered
from .caches import MAX_CACHES, Caches
from .executor import Look
from .geometry import Geometry
from .head import HeadPasses, plan_block
from .launch import Kernels, has_time_limit, share_of, start
from .memory import DeviceMemory, end_hang, half_of, reset
from .planning import plan_builds
from .prefill import BlockReader, DeviceCache, read
from .structures import MAX_COLUMNS, PASSES_PER_LAUNCH, Column, GraphState
from .tape import tape_starts
from .tape_model import TapeModel

LAST_EPOCH = 2**31 // 8  # of all layers together: the ablation counts five to a layer in 31 bits
COLUMN_TOKENS = (
    8  # ids that a column reads of a prompt at most: eight times as many take as long as a small piece
)
POLL_S = 0.00005
PASS_S = 0.02  # far longer than any pass takes
LATE_S = 1.0  # a kernel that gives up a wait by itself says who waited for what: it comes first
LAUNCH_S = 0.1  # of a launch at most where a display limits it, to 2 s or more


def sequences_in(free: int, geometry: Geometry, cache_bytes: int | None, *beside: Geometry) -> int:
    """KV capacity in sequences, given `free` bytes of device memory before anything else of a pass is allocated.

    One for each column, plus cached ones in a quarter of the remainder or in `cache_bytes`. `beside`: the block of a
    head that drafts. ValueError if the columns alone do not fit.
    """
    config, columns, parts = geometry.config, geometry.columns, (geometry, *beside)
    tiles = sum(int(tape_starts(part)[-1]) for part in parts)
    each = sum(2 * part.lanes_per_device * part.kv_lane for part in parts)
    words = sum(8 * columns * (part.device_words + part.inbox_words) for part in parts)
    needed = tiles + 2 * config.vocab_size * config.hidden_size + words + columns * each
    if needed > free:
        raise ValueError(
            f"a pass of {columns} columns needs {needed / 1e9:.1f} GB, {tiles / 1e9:.1f} of them for weights; "
            f"the GPU has {free / 1e9:.1f} GB free; use a smaller context_tokens or more GPUs"
        )
    spare = (free - needed) // 4 if cache_bytes is None else min(cache_bytes, free - needed)
    return columns + min(MAX_CACHES - columns, spare // each)


def that_fit(
    builds: list[Geometry], blocks: list[Geometry], free: int, cache_bytes: int | None
) -> tuple[list[Geometry], list[Geometry], int]:
    """The builds whose columns have memory, with those of a head's block if there is one, and for how many sequences;
    ValueError where none has.
    """
    while True:
        try:
            return builds, blocks, sequences_in(free, builds[-1], cache_bytes, *blocks[-1:])
        except ValueError:
            if len(builds) == 1:
                raise
        builds, blocks = builds[:-1], blocks[:-1]


class PassDecoder:
    """Weights as tiles on the GPUs, and passes over them (executor.Passes). `geometry`: of the build with the most
    columns.
    """

    late_s = LATE_S
    head: HeadPasses | None = None

    def __init__(
        self, config: LaneformerConfig, tensors: Mapping[str, Tensor], dtype: str, devices: Sequence[str] = ("cuda:0",),
        limit_s: float = 10.0, cache_bytes: int | None = None, version: str = "passes", **shape: Any,
    ):  # fmt: skip
        """`cache_bytes`: of each GPU, for earlier sequences; None: a quarter of what is left. `limit_s`: of a wait.
        `shape` goes to planning.plan_builds. A GPU that is named more than once is shared out.

        ValueError for a model or a GPU that tiles do not fit; NotResident where blocks would not
        all run at once.
        """
        self.config, self.limit_s, self.version = config, limit_s, version
        self.devices = [torch.device(device) for device in devices]
        if version == "graph" and len(devices) > 1:
            raise ValueError("the graph version runs on one GPU; use version = 'passes' for several")
        machine, sharing = share_of(self.devices)
        shape = {"devices": len(devices), "half": half_of(tensors), "graph": version == "graph", **shape}
        builds = plan_builds(config, dtype, machine, **shape)
        blocks, rows = plan_block(builds if version == "passes" else builds[:0], tensors, machine)
        free = min(torch.cuda.mem_get_info(device)[0] for device in self.devices) // sharing
        self.builds, blocks, sequences = that_fit(builds, blocks, free, cache_bytes)
        self.geometry, self._sharing = self.builds[-1], sharing
        connect(self.devices)
        self.load()
        self._streams = [torch.cuda.Stream(device) for device in self.devices]
        self._hold(
            [DeviceMemory(self.geometry, tensors, i, d, sequences) for i, d in enumerate(self.devices)]
        )
        if version == "graph":
            self._capture()
        self.ahead = self._passes_that_follow()
        if blocks:
            self._draft_with(HeadPasses(self, blocks, tensors, rows, sequences))

    def load(self) -> None:
        """The kernels of the builds; NotResident where blocks would not all run at once."""
        version, shared = self.version, self._sharing > 1
        self.kernels = [[Kernels(version, g, d, shared) for d in self.devices] for g in self.builds]
        for kernels in itertools.chain(*self.kernels):
            if version == "passes":
                kernels.require_resident("pass", self._sharing)
            kernels.load(*sorted({name for name, *_ in launches(version, self.geometry)}))

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
        most = PASSES_PER_LAUNCH - 1
        if any(has_time_limit(device) for device in self.devices):
            most = min(most, int(LAUNCH_S / pass_s))
        try:
            rows = self.run([column], most)
            right = len(rows) == 1 + most and [token for (token,) in rows][:3] == single[: 1 + most]
            said = "they give other tokens"
        except RequestFailed as error:
            if isinstance(error, Unanswered):
                raise
            right, said = False, str(error)
        if not right:
            warnings.warn(f"a launch makes one pass, as several fail: {said}", stacklevel=6)
        return most * right

    @functools.cached_property
    def tape_model(self) -> TapeModel:
        """The PyTorch model on the tiles, for long prompts and scores; made when it is first needed."""
        return TapeModel(self.memories)

    def _draft_with(self, head: HeadPasses) -> None:
        """Unless it fails, with a warning. Its caches are copied with the model's."""
        if said := head.fails():
            warnings.warn(f"the model's own head drafts nothing, as its kernel fails: {said}", stacklevel=6)
            return
        self.head = head
        self.caches = Caches(self.memories, head.block.memories)

    def read(
        self, ids: Sequence[int], cache: int, position: int, first_row: int, next_ids: Sequence[int] = ()
    ) -> Iterator[torch.Tensor]:
        start, block = DeviceCache(self.caches.of(cache), position), None
        if self.head is not None and next_ids:
            beside = DeviceCache(self.caches.of(cache, beside=True), position)
            block = BlockReader(self.head.block.tape_model, beside, next_ids)
        return read(self.tape_model, ids, start, first_row, block)

    def run(
        self, columns: Sequence[Column], ahead: int = 0, logits: torch.Tensor | None = None,
        look: Look | None = None,
    ) -> list[list[int]]:  # fmt: skip
        """As `Passes.run`. A launch makes PASSES_PER_LAUNCH at most, and ends when all columns have.

        Each column goes on with the token that it drew, until that is one of its stop ids or its `left`-th; then it
        has -1.

        ValueError for columns that the device cannot go on with: two of one sequence, logits. RequestFailed after a
        hang.
        """
        if ahead and (logits is not None or len({c.sequence for c in columns}) < len(columns)):
            raise ValueError(
                "passes ahead are of one column a sequence, without logits, which are the host's affair after each "
                "pass; use ahead = 0"
            )
        memory, more = self.memories[0], min(ahead, len(self.memories[0].picks) - 1)
        if memory.epoch + more > LAST_EPOCH // self.geometry.epochs:
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
            memory.epoch += 1 + ahead  # whatever becomes of these passes, no others use their epochs
        return arguments

    def _launch(self, arguments: Sequence[Any]) -> None:
        if self.version == "graph":
            self._replay(arguments[0].order)
        else:
            start(self.kernels[self.build_for(arguments)], "pass", arguments, self._streams)

    def build_for(self, arguments: Sequence[Any]) -> int:
        """The smallest build that holds their columns."""
        counts = [geometry.columns for geometry in self.builds]
        return bisect.bisect_left(counts, arguments[0].order.column_count)

    def _capture(self) -> None:
        """A pass as a graph of kernels, whose order is in device memory."""
        argument = self._arguments([], 0, None)[0]
        torch.cuda.synchronize(self.devices[0])
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=self._streams[0], capture_error_mode="thread_local"):
            for name, layer, module, blocks in launches("graph", self.geometry):
                step = type(argument).from_buffer_copy(argument)
                step.layer, step.module = layer, module
                self.kernels[0][0].launch(name, step, blocks)

    def _replay(self, order: Any) -> None:
        state = torch.frombuffer(bytearray(GraphState.of(order)), dtype=torch.uint8)
        with torch.cuda.stream(self._streams[0]):
            self.memories[0].graph[: len(state)].copy_(state)
            for _ in range(1 + order.ahead):
                self._graph.replay()


def launches(version: str, geometry: Geometry) -> list[tuple[str, int, int, int]]:
    """(kernel, layer, module, blocks) of one pass, in order."""
    config, blocks = geometry.config, geometry.blocks
    if version == "passes":
        return [("pass", 0, 0, blocks)]
    kernels = []
    for layer in range(config.num_hidden_layers):
        for module, names in enumerate((("qkv", "attention", "output"), ("gate_up", "down"))):
            kernels += [(name, layer, 0, blocks) for name in names]
            flushes = geometry.flushed and (layer, module) == (config.num_hidden_layers - 1, 1)
            if flushes or config.join(layer, MODULES[module]) == Join.PRESENT:  # when all lanes have sent
                kernels.append(("join_now", layer, module, blocks))
    return [*kernels, ("head", 0, 0, blocks), ("choose", 0, 0, min(blocks, MAX_COLUMNS))]


def connect(devices: Sequence[torch.device]) -> None:
    """Let every GPU write to the memory of every other; ValueError where it cannot."""
    for device in devices:
        for other in devices:
            if other != device and not torch.cuda.can_device_access_peer(device, other):
                raise ValueError(
                    f"{device} cannot reach the memory of {other}; the lanes need peer-to-peer access"
                )
            torch.zeros(1, device=device).to(other)  # torch opens the way at the first copy
