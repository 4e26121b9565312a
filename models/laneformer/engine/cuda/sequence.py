"""One sequence at a time on one or more GPUs: prompt, launch, tokens as they come, cancel, hang.

`version="persistent"` is one cooperative launch for the whole request; "graph" replays a captured graph of
kernels for each token. Both read the same tapes and give the same tokens, bit for bit.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ...config import MODULES, Join, LaneformerConfig
from ...tensors import Tensor
from ..decoder import Request, Sampling
from .geometry import Geometry
from .launch import Kernels, NotResident, share_of, start
from .memory import DeviceMemory, end_hang, half_of, reset
from .planning import plan
from .prefill import DeviceCache, prefill, streams
from .slots import Slots
from .tape_model import TapeModel

IN_KERNEL_TOKENS = 8  # prompts up to this length are read by the decode kernel itself
REPLAYS_AT_ONCE = 16  # of the graph, between two looks at its tokens
LAST_EPOCH = (
    2**31 // 8
)  # of all layers together: the ablation counts five to a layer in 31 bits, and one request fits
POLL_S = 0.0002


class SequenceDecoder:
    """Weights on the GPUs and what decodes with them. RequestFailed after a hang says who waited for what."""

    def __init__(
        self,
        config: LaneformerConfig,
        tensors: Mapping[str, Tensor],
        dtype: str,
        devices: Sequence[str] = ("cuda:0",),
        version: str = "persistent",
        limit_s: float = 10.0,
        cache_bytes: int | None = None,
        **shape: Any,
    ):
        """cache_bytes: of each GPU, for earlier sequences; None: a quarter of what is left. `shape` goes to
        planning.plan: warps, chunk_bytes, blocks_per_lane, wide_exchanges.

        A GPU that is named more than once is shared out.
        """
        self.config, self.tensors, self.dtype, self.limit_s = config, tensors, dtype, limit_s
        self.devices, self._shape = [torch.device(device) for device in devices], shape
        self._cache_bytes = cache_bytes
        if version == "graph" and len(devices) > 1:
            raise ValueError("the graph version runs on one GPU; use version = 'persistent' for several")
        connect(self.devices)
        self._streams = [torch.cuda.Stream(device) for device in self.devices]
        self._model: TapeModel | None = None
        try:
            self._build(version)
        except NotResident as error:
            self._fall_back(error)

    def _build(self, version: str) -> None:
        """Kernels and memory. NotResident: the persistent version's blocks would not all run at once."""
        self.version = version
        half = half_of(self.tensors)
        self.geometry = geometry_for(self.config, self.dtype, self.devices, version, half=half, **self._shape)
        _, sharing = share_of(self.devices)
        self.kernels = [Kernels(version, self.geometry, device, sharing > 1) for device in self.devices]
        self.memories: list[DeviceMemory] = []
        names = {step[0] for step in graph_kernels(self.geometry)} if version == "graph" else {"decode"}
        for kernels in self.kernels:
            if version == "persistent":
                kernels.require_resident("decode", sharing)
            kernels.load(*names)
        self.memories = [
            DeviceMemory(self.geometry, self.tensors, i, device) for i, device in enumerate(self.devices)
        ]
        cache_bytes = self._cache_bytes
        if cache_bytes is None:
            cache_bytes = min(torch.cuda.mem_get_info(device)[0] for device in self.devices) // 4
        self.slots = Slots(self.memories, cache_bytes)

    def _fall_back(self, error: NotResident) -> None:
        """Go on as the graph version, whose blocks do not wait for each other; RuntimeError
        where that cannot be.
        """
        if len(self.devices) > 1 or self._shape.get("wide_exchanges"):
            raise RuntimeError(f"{error}; the graph version cannot run instead: use whole GPUs") from error
        warnings.warn(f"the graph version decodes, as the persistent one cannot run: {error}", stacklevel=3)
        self.memories, self.kernels, self._model = [], [], None
        vars(self).pop("slots", None)  # it holds memory, too
        self._build("graph")

    @property
    def model(self) -> TapeModel:
        """The PyTorch model on the tapes, for prompts and scores; made when it is first needed."""
        if self._model is None:
            self._model = TapeModel(self.memories)
        return self._model

    def start(
        self, ids: Sequence[int], max_tokens: int, stops: Sequence[int] = (), sampling: Sampling | None = None,
        reuse_prefix: bool = True, logits: torch.Tensor | None = None, request: Request | None = None, made: int = 0,
    ) -> None:  # fmt: skip
        """Read the prompt and start to make up to `max_tokens` tokens; `poll` gives them.

        `logits`: float32 (len(ids) + max_tokens - 1, V) on the device, filled from the first row for each
        token that the kernel reads; then the whole prompt goes through the kernel. `request`: what changes
        logits is taken from there, `made` ids at the end of `ids` being its output; where it has `logprobs`,
        `new_logits` gives the logits.
        """
        assert len(ids) + max_tokens - 1 <= self.config.max_position_embeddings, "the context is too short"
        self.settle()
        at = self.reused = self.slots.begin(ids, len(ids) - 1, reuse_prefix and logits is None)
        if logits is None and len(ids) - at > IN_KERNEL_TOKENS:
            prefill(self.model, list(ids[at:-1]), DeviceCache(self.memories, at))
            at = len(ids) - 1
        self.slots.keep(ids[:at], len(ids) + max_tokens - 1)
        self._logits = logits
        if request is not None and request.logprobs is not None:
            rows = len(ids) - at + max_tokens - 1
            self._logits = torch.empty(rows, self.config.vocab_size, device=self.devices[0])
        try:
            self.launch(ids, at, max_tokens, stops, sampling, self._logits, request, made)
        except NotResident as error:
            self._fall_back(error)
            self.start(ids, max_tokens, stops, sampling, reuse_prefix, logits, request, made)

    def launch(
        self, ids: Sequence[int], at: int, max_tokens: int, stops: Sequence[int] = (), sampling: Sampling | None = None,
        logits: torch.Tensor | None = None, request: Request | None = None, made: int = 0,
    ) -> None:  # fmt: skip
        """`start` from position `at` of the current keys and values on."""
        inboxes = [memory.inbox for memory in self.memories]
        self.arguments = [
            memory.arguments(
                inboxes, list(ids[at:]), at, max_tokens, stops=list(stops), sampling=sampling, limit_s=self.limit_s,
                logits=logits, changes=None if request is None else memory.changes(request, ids, made),
            )
            for memory in self.memories
        ]  # fmt: skip
        self.stops = set(stops)
        self.max_tokens = max_tokens
        self.ids = list(ids)
        self.read_tokens = len(ids) - at
        self._replays = 0
        for memory in self.memories:  # whatever becomes of this request, no other one uses its epochs
            memory.epoch += self.read_tokens + max_tokens
        self._synchronize()
        self._launch()

    def read(self, ids: Sequence[int], start: int, reuse_prefix: bool = True) -> Iterator[torch.Tensor]:
        """Read `ids` with the PyTorch model: the lanes' streams of ids[start:], (1, S, L, D) a
        chunk, to score them.

        Keys and values of all ids stay for the next request.
        """
        self.settle()
        at = self.reused = self.slots.begin(ids, start, reuse_prefix)
        for h in streams(self.model, list(ids[at:]), DeviceCache(self.memories, at)):
            first, at = at, at + h.shape[1]
            if at > start:
                yield h[:, max(0, start - first) :]
        self.slots.holds(ids)

    def poll(self) -> tuple[list[int], bool]:
        """New tokens so far, and whether these are all."""
        if self.version == "graph":
            self._replay()
        finished = all(stream.query() for stream in self._streams)
        memory = self.memories[0]
        tokens = memory.tokens[: int(memory.published[0])].tolist()
        if self.version == "graph":  # it does not look at stop ids
            end = next((i + 1 for i, token in enumerate(tokens) if token in self.stops), len(tokens))
            finished = (
                end < len(tokens)
                or len(tokens) == self.max_tokens
                or bool(tokens and tokens[-1] in self.stops)
            )
            tokens = tokens[:end]
            finished = finished or bool(memory.cancel[0])
        if finished:
            self._end(tokens)
        return tokens, finished

    def wait(self) -> list[int]:
        """All new tokens."""
        while True:
            tokens, finished = self.poll()
            if finished:
                return tokens
            time.sleep(POLL_S)

    def new_logits(self, count: int) -> torch.Tensor:
        """float32 (count, V): what the first new tokens were drawn from, before any change; after the end."""
        assert self._logits is not None, "the request has no logprobs"
        return self._logits[self.read_tokens - 1 :][:count]

    def cancel(self) -> None:
        """End after the token under way."""
        for memory in self.memories:
            memory.cancel.fill_(1)

    def settle(self) -> None:
        """Nothing runs any more, and no time-out is on record, also where a caller was interrupted."""
        self.cancel()
        self._synchronize()
        if self.memories[0].epoch > LAST_EPOCH // self.config.num_hidden_layers or any(
            memory.hang() for memory in self.memories
        ):
            reset(self.memories)

    def _synchronize(self) -> None:
        for device in self.devices:
            torch.cuda.synchronize(device)

    def _launch(self) -> None:
        if self.version == "graph":
            self._capture()
            return
        start(self.kernels, "decode", self.arguments, self._streams)

    def _capture(self) -> None:
        """One token as a graph of kernels."""
        argument, memory = self.arguments[0], self.memories[0]
        state = torch.tensor([self.ids[argument.position], argument.position, 0], dtype=torch.int32)
        memory.graph[:3] = state.view(torch.float32).to(memory.device)
        torch.cuda.synchronize(memory.device)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=self._streams[0], capture_error_mode="thread_local"):
            for name, layer, module, blocks in graph_kernels(self.geometry):
                step = type(argument).from_buffer_copy(argument)
                step.layer, step.module = layer, module
                self.kernels[0].launch(name, step, blocks)

    def _replay(self) -> None:
        needed = self.read_tokens + self.max_tokens - 1 - self._replays
        with torch.cuda.stream(self._streams[0]):
            for _ in range(min(REPLAYS_AT_ONCE, needed)):
                self._graph.replay()
                self._replays += 1
        self._streams[0].synchronize()

    def _end(self, tokens: list[int]) -> None:
        """After the last launch: what the cache holds now, and whether somebody waited in vain."""
        end_hang(self.memories, "decode", self.limit_s)
        known = (self.ids + tokens)[:-1]
        # the graph also reads what it makes after a stop id
        self.surplus = self._replays - (self.read_tokens + len(tokens) - 1) if self.version == "graph" else 0
        if tokens:  # else the prompt was not read whole
            self.slots.holds(known, self.surplus)


def geometry_for(
    config: LaneformerConfig, dtype: str, devices: Sequence[torch.device], version: str, **shape: Any
) -> Geometry:
    """The plan for these GPUs; two blocks of the graph version are resident, so that kernels overlap."""
    resident = 2 if version == "graph" else 1
    return plan(config, dtype, share_of(devices)[0], devices=len(devices), resident=resident, **shape)


def graph_kernels(geometry: Geometry) -> list[tuple[str, int, int, int]]:
    """(kernel, layer, module, blocks) of one token, in order (graph.cu)."""
    config, blocks = geometry.config, geometry.blocks
    kernels = []
    for layer in range(config.num_hidden_layers):
        for module, names in enumerate((("qkv", "attention", "output"), ("gate_up", "down"))):
            kernels += [(name, layer, 0, blocks) for name in names]
            if (
                config.join(layer, MODULES[module]) == Join.PRESENT
            ):  # all lanes must have sent before any can go on
                kernels.append(("join_now", layer, module, blocks))
    return [*kernels, ("head", 0, 0, blocks), ("choose", 0, 0, 1)]


def connect(devices: Sequence[torch.device]) -> None:
    """Let every GPU write to the memory of every other; ValueError where it cannot."""
    for device in devices:
        for other in devices:
            if other != device and not torch.cuda.can_device_access_peer(device, other):
                raise ValueError(
                    f"{device} cannot reach the memory of {other}; the lanes need peer-to-peer access"
                )
            torch.zeros(1, device=device).to(other)  # torch opens the way at the first copy
