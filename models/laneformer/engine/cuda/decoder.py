"""One sequence at a time on one or more GPUs: prompt, launch, tokens as they come, cancel, hang.

`version="persistent"` is one cooperative launch for the whole request; "graph" replays a captured graph of kernels for
each token. Both read the same tapes and give the same tokens, bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...config import Join, LaneformerConfig
from ..checkpoint import Tensor
from .geometry import MODULES, Geometry, plan
from .launch import Kernels, describe
from .memory import DeviceMemory
from .params import EXCHANGES, Sampling
from .prefill import DeviceCache, plain_model, prefill

IN_KERNEL_TOKENS = 8  # prompts up to this length are read by the decode kernel itself
REPLAYS_AT_ONCE = 16  # of the graph, between two looks at its tokens
POLL_S = 0.0002


class CudaDecoder:
    """Weights on the GPUs and what decodes with them. RuntimeError after a hang says who waited for what."""

    def __init__(
        self,
        config: LaneformerConfig,
        tensors: Mapping[str, Tensor],
        dtype: str,
        devices: Sequence[str] = ("cuda:0",),
        version: str = "persistent",
        limit_s: float = 10.0,
        **shape: Any,
    ):
        """`shape` goes to geometry.plan: warps, chunk_bytes, blocks_per_lane, wide_exchanges."""
        self.config, self.tensors, self.version, self.limit_s = config, tensors, version, limit_s
        self.devices = [torch.device(device) for device in devices]
        if version == "graph" and len(devices) > 1:
            raise ValueError("the graph version runs on one GPU; use version = 'persistent' for several")
        machine = describe(self.devices[0])
        if version == "graph":  # two blocks a multiprocessor, so that kernels overlap; 1 KB is the system's
            machine = type(machine)(machine.multiprocessors, machine.shared_bytes // 2 - 1024, machine.architecture)
        self.geometry: Geometry = plan(config, dtype, machine, devices=len(devices), **shape)
        self.memories = [DeviceMemory(self.geometry, tensors, i, device) for i, device in enumerate(self.devices)]
        self.kernels = [Kernels(version, self.geometry, device) for device in self.devices]
        self.cached: list[int] = []  # ids whose keys and values are there
        self._model: torch.nn.Module | None = None
        self._streams = [torch.cuda.Stream(device) for device in self.devices]
        for device in self.devices:  # peers write to each other's memory
            for other in self.devices:
                if other != device and not torch.cuda.can_device_access_peer(device, other):
                    raise ValueError(f"{device} cannot reach the memory of {other}; the lanes need peer-to-peer access")

    @property
    def model(self) -> Any:
        """The PyTorch model, for prompts and scores; made when it is first needed."""
        if self._model is None:
            self._model = plain_model(self.config, self.tensors, self.geometry.dtype, self.devices[0])
        return self._model

    def start(
        self, ids: Sequence[int], max_tokens: int, stops: Sequence[int] = (), sampling: Sampling | None = None,
        reuse_prefix: bool = True, logits: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Read the prompt and start to make up to `max_tokens` tokens; `poll` gives them.

        `logits`: float32 (len(ids) + max_tokens - 1, V) on the device, filled from the first row for each token that
        the kernel reads; then the whole prompt goes through the kernel.
        """
        assert len(ids) + max_tokens - 1 <= self.config.max_position_embeddings, "the context is too short"
        at = self._reusable(ids) if reuse_prefix and logits is None else 0
        if logits is None and len(ids) - at > IN_KERNEL_TOKENS:
            cache = DeviceCache(self.memories, at)
            prefill(self.model, list(ids[at:-1]), cache)
            at = len(ids) - 1
        self.reused = at
        for memory in self.memories:
            if memory.epoch > 2**31 // self.config.num_hidden_layers // 8:
                self._reset()
        inboxes = [memory.inbox for memory in self.memories]
        self.arguments = [
            memory.arguments(
                inboxes, list(ids[at:]), at, max_tokens, stops=list(stops), sampling=sampling, limit_s=self.limit_s,
                logits=logits,
            )
            for memory in self.memories
        ]  # fmt: skip
        self.stops, self.max_tokens, self.ids, self.read_tokens = set(stops), max_tokens, list(ids), len(ids) - at
        self._replays = 0
        for device in self.devices:
            torch.cuda.synchronize(device)
        self._launch()

    def poll(self) -> tuple[list[int], bool]:
        """New tokens so far, and whether these are all."""
        if self.version == "graph":
            self._replay()
        finished = all(stream.query() for stream in self._streams)
        memory = self.memories[0]
        tokens = memory.tokens[: int(memory.published[0])].tolist()
        if self.version == "graph":  # it does not look at stop ids
            end = next((i + 1 for i, token in enumerate(tokens) if token in self.stops), len(tokens))
            finished = end < len(tokens) or len(tokens) == self.max_tokens or bool(tokens and tokens[-1] in self.stops)
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

    def cancel(self) -> None:
        """End after the token under way."""
        for memory in self.memories:
            memory.cancel.fill_(1)

    def _reusable(self, ids: Sequence[int]) -> int:
        """Positions of the prompt whose keys and values are there, at most all but its last.

        What a window layer's ring has overwritten cannot come back: a prompt that leaves a longer text starts anew.
        """
        same = 0
        while same < min(len(ids) - 1, len(self.cached)) and ids[same] == self.cached[same]:
            same += 1
        layers = range(self.config.num_hidden_layers)
        ring = min(self.geometry.kv_slots(i) for i in layers) * self.geometry.splits
        return same if same == len(self.cached) or len(self.cached) <= ring else 0

    def _launch(self) -> None:
        if self.version == "graph":
            self._capture()
            return
        for kernels, argument, stream in zip(self.kernels, self.arguments, self._streams, strict=True):
            with torch.cuda.device(kernels.device), torch.cuda.stream(stream):
                kernels.launch("decode", argument)

    def _capture(self) -> None:
        """One token as a graph of kernels."""
        argument, memory = self.arguments[0], self.memories[0]
        state = torch.tensor([self.ids[argument.position], argument.position, 0], dtype=torch.int32)
        memory.graph[:3] = state.view(torch.float32).to(memory.device)
        torch.cuda.synchronize(memory.device)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=self._streams[0]):
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
        hang = next((report for memory in self.memories if (report := memory.hang())), None)
        for stream in self._streams:
            stream.synchronize()
        if hang is not None:
            self._reset()
            raise RuntimeError(
                f"the decode kernel waited {self.limit_s} s in vain: lane {hang.lane}, layer {hang.layer}, "
                f"exchange {EXCHANGES[hang.exchange]!r}, block {hang.block}, warp {hang.warp}, epoch {hang.epoch}"
            )
        for memory in self.memories:
            memory.epoch += self.read_tokens + len(tokens)
        self.cached = (self.ids + tokens)[:-1]

    def _reset(self) -> None:
        self.cached = []
        for memory in self.memories:
            memory.reset_words()


def graph_kernels(geometry: Geometry) -> list[tuple[str, int, int, int]]:
    """(kernel, layer, module, blocks) of one token, in order (graph.cu)."""
    config, blocks = geometry.config, geometry.blocks
    kernels = []
    for layer in range(config.num_hidden_layers):
        kernels += [("qkv", layer, 0, blocks), ("attention", layer, 0, blocks), ("output", layer, 0, blocks)]
        kernels += joins_now(geometry, layer, 0)
        kernels += [("gate_up", layer, 0, blocks), ("down", layer, 0, blocks)]
        kernels += joins_now(geometry, layer, 1)
    return [*kernels, ("head", 0, 0, blocks), ("choose", 0, 0, 1)]


def joins_now(geometry: Geometry, layer: int, module: int) -> list[tuple[str, int, int, int]]:
    """A kernel more where all lanes must have sent before any can go on."""
    if geometry.config.join(layer, MODULES[module]) != Join.PRESENT:
        return []
    return [("join_now", layer, module, geometry.blocks)]
