"""Decoders for the CUDA engine where there is no GPU.

`EmulatedDecoder` is SequenceDecoder itself with its memory on the CPU and the kernels on the emulator, in a
thread of their own, as a GPU runs them beside the host. `LoopDecoder` is a plain PyTorch loop that makes one
token for each poll.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from laneformer import Laneformer
from laneformer.config import LaneformerConfig
from laneformer.engine import Engine
from laneformer.engine.cuda.compile import FOLDER, INCLUDES, source_of
from laneformer.engine.cuda.decoder import CudaDecoder
from laneformer.engine.cuda.decoding import Decoding
from laneformer.engine.cuda.memory import Column, DeviceMemory, reset
from laneformer.engine.cuda.passes import PassDecoder
from laneformer.engine.cuda.planning import plan
from laneformer.engine.cuda.sequence import SequenceDecoder, graph_kernels
from laneformer.engine.cuda.slots import Slot, Slots
from laneformer.engine.decoder import Sampling
from laneformer.model import rope_table, run_layers
from tests.laneformer.cuda import emulator
from tests.laneformer.cuda.harness import (
    KERNELS,
    SMALL,
    as_read,
    plain_model,
    random_model,
    small_config,
    tensors_of,
)


def gpu_of(engine: Engine) -> Any:
    """The engine's decoder of sequences: one of those below, or on a GPU SequenceDecoder."""
    decoder = engine._open()
    assert isinstance(decoder, CudaDecoder)
    return decoder.gpu


class Running:
    """What a torch stream says of a launch; here the launch is a thread. Its error comes out
    where a GPU's would.
    """

    def __init__(self, launch: Callable[[], object] | None = None):
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=(launch,)) if launch else None
        if self.thread:
            self.thread.start()

    def _run(self, launch: Callable[[], object]) -> None:
        try:
            launch()
        except BaseException as error:
            self.error = error

    def query(self) -> bool:
        return self.thread is None or (not self.thread.is_alive() and self._ended())

    def synchronize(self) -> None:
        if self.thread:
            self.thread.join()
            self._ended()

    def _ended(self) -> bool:
        if self.error:
            raise self.error
        return True


class EmulatedDecoder(SequenceDecoder):
    """`go`, where there is one, holds launches back, so that a test can act before them."""

    cache: Path  # of built libraries
    go: threading.Event | None = None
    missing_blocks = 0  # for whose words the others wait in vain

    def __init__(
        self, config: LaneformerConfig, tensors: Any, dtype: str, devices: Sequence[str] = (),
        version: str = "persistent", limit_s: float = 10.0, cache_bytes: int | None = None,
    ):  # fmt: skip
        self.config, self.version, self.limit_s = config, version, limit_s
        self.devices = [torch.device("cpu")]
        self.geometry = plan(config, dtype, SMALL, warps=2)
        self.memories = [DeviceMemory(self.geometry, tensors, 0, "cpu")]
        source = source_of(version, self.geometry) + "".join(
            f"EMULATE({k}, Decode)\n" for k in KERNELS[version]
        )
        self.library = emulator.build(source, INCLUDES, {"TABLE": "constexpr"}, self.cache)
        self.slots, self._model, self._streams = Slots(self.memories, cache_bytes or 0), None, [Running()]
        self.launches = 0

    def _synchronize(self) -> None:
        for stream in self._streams:
            stream.synchronize()

    def _emulate(self, kernel: str, argument: Any, blocks: int) -> None:
        self.launches += 1
        shape = {"threads": 32 * self.geometry.warps, "shared_bytes": self.geometry.shared_bytes}
        emulator.launch(
            self.library, kernel, argument, blocks=blocks - self.missing_blocks, seed=self.launches,
            watchdog=self.missing_blocks > 0, **shape,
        )  # fmt: skip

    def _launch(self) -> None:
        argument = self.arguments[0]
        if self.version == "graph":
            state = torch.tensor([self.ids[argument.position], argument.position, 0], dtype=torch.int32)
            self.memories[0].graph[:3] = state.view(torch.float32)
            return

        def launch() -> None:
            if self.go:
                self.go.wait()
            self._emulate("decode", argument, self.geometry.blocks)

        self._streams = [Running(launch)]

    def _replay(self) -> None:
        needed = self.read_tokens + self.max_tokens - 1 - self._replays
        for _ in range(min(4, needed)):
            for kernel, layer, module, blocks in graph_kernels(self.geometry):
                self.arguments[0].layer, self.arguments[0].module = layer, module
                self._emulate(kernel, self.arguments[0], blocks)
            self._replays += 1


class LoopDecoder:
    """Greedy tokens of the PyTorch model, one at each `poll`; the prompt counts as read by the kernel."""

    def __init__(
        self, config: LaneformerConfig, tensors: Any, dtype: str, devices: Sequence[str] = (),
        version: str = "persistent", cache_bytes: int | None = None,
    ):  # fmt: skip
        self.config, self.version, self.devices = config, version, devices
        self.geometry = plan(config, dtype, SMALL, warps=2)
        self.memories: list[DeviceMemory] = []
        self.plain: Laneformer = plain_model(config, tensors, dtype)
        self.model = as_read(self.plain)
        self.polls, self.failure, self.asked = 0, "", []

    def start(
        self, ids: Sequence[int], max_tokens: int, stops: Sequence[int] = (), sampling: Any = None,
        reuse_prefix: bool = True, request: Any = None, made: int = 0,
    ) -> None:  # fmt: skip
        assert len(ids) + max_tokens - 1 <= self.config.max_position_embeddings
        self.asked.append((list(ids), max_tokens, list(stops), sampling, reuse_prefix))
        self.ids, self.max_tokens, self.stops = list(ids), max_tokens, set(stops)
        self.tokens, self.cancelled = [], False
        self.reused, self.read_tokens = 0, len(ids)

    @torch.inference_mode()
    def poll(self) -> tuple[list[int], bool]:
        self.polls += 1
        if self.failure:
            raise RuntimeError(self.failure)
        logits = self.plain(torch.tensor([self.ids + self.tokens]))[0, -1]
        self.tokens.append(int(logits.float().argmax()))
        ended = len(self.tokens) == self.max_tokens or self.tokens[-1] in self.stops
        return list(self.tokens), ended or self.cancelled

    def cancel(self) -> None:
        self.cancelled = True

    @torch.inference_mode()
    def read(self, ids: Sequence[int], start: int, reuse_prefix: bool = True) -> Iterator[torch.Tensor]:
        self.reused = 0
        if not ids:
            return
        positions = torch.arange(len(ids))
        rope, masks = rope_table(self.config, positions), self.model.masks(positions, positions)
        embedding = self.plain.tok_embeddings(torch.tensor([ids]))
        yield run_layers(self.plain.layers, self.config, embedding, rope, masks)[:, start:]


class EmulatedPasses(PassDecoder):
    """PassDecoder itself, with its memory on the CPU and the kernel on the emulator."""

    missing_blocks = 0  # for whose words the others wait in vain

    def __init__(
        self, builds: Path, columns: int, seed: int = 0, changes: dict[str, Any] | None = None, sequences: int = 0,
        races: bool = False, fewer: Sequence[int] = (), **shape: Any,
    ):  # fmt: skip
        """`changes` of small_config, `shape` for `plan`; `fewer`: columns of the builds beside that of `columns`."""
        self.config, self.limit_s, self.seed = small_config(**(changes or {})), 10.0, seed
        dtype, self.races = shape.pop("dtype", "bf16"), races
        shape = {"warps": 2, "chunk_bytes": 512, **shape}
        self.builds = [plan(self.config, dtype, SMALL, mma_columns=n, **shape) for n in (*fewer, columns)]
        self.geometry, self.launched = self.builds[-1], list[int]()
        self.model = random_model(self.config, dtype)
        tensors, devices = tensors_of(self.model, dtype), range(self.geometry.devices)
        self._hold([DeviceMemory(self.geometry, tensors, i, "cpu", sequences or columns) for i in devices])
        self.forget()
        self.folder = builds

    @functools.cached_property
    def library(self) -> ctypes.CDLL:
        """Built when it is first needed."""
        return self.build(source_of("passes", self.geometry), self.folder)

    @functools.cached_property
    def libraries(self) -> list[ctypes.CDLL]:
        smaller = [self.build(source_of("passes", geometry), self.folder) for geometry in self.builds[:-1]]
        return [*smaller, self.library]

    def build(self, source: str, builds: Path, folder: Path = FOLDER) -> ctypes.CDLL:
        """The kernel of this text, which includes those of `folder`."""
        source += "EMULATE(pass, Decode)\n"
        return emulator.build(source, [folder, *INCLUDES], {"TABLE": "constexpr"}, builds, self.races)

    def forget(self) -> None:
        """Words as new; keys and values that nobody has written are no numbers."""
        reset(self.memories)
        for memory in self.memories:
            memory.kv.fill_(0x7FFF)

    def _launch(self, arguments: Sequence[ctypes.Structure]) -> None:
        words = {
            f"{name} {m.index}": getattr(m, name) for m in self.memories for name in ("lane_words", "inbox")
        }
        kept = {
            f"keys and values {m.index}": (m.kv.data_ptr(), m.kv.nbytes) for m in self.memories if self.races
        }
        build = self.build_for(arguments)
        self.launched.append(self.builds[build].mma_columns)
        launch = functools.partial(
            emulator.launch, self.libraries[build], "pass", arguments,
            blocks=self.geometry.blocks - self.missing_blocks,
            threads=32 * self.geometry.warps, watchdog=self.missing_blocks > 0,
            shared_bytes=self.builds[build].shared_bytes, seed=self.seed + self.passes, plain=kept,
            names={name: (tensor.data_ptr(), tensor.nbytes) for name, tensor in words.items()},
        )  # fmt: skip
        self._streams = [Running(launch)]

    def logits(self, columns: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        """Of one pass of (token, position, sequence): (columns, V)."""
        rows = torch.full((len(columns), self.config.vocab_size), float("nan"))
        self.run(
            [Column(*column, times_row=-1, bias_row=-1, sampling=Sampling(top_p=1.0)) for column in columns],
            rows,
        )
        return rows


class LoopPasses(PassDecoder):
    """Passes of up to five columns: of each, the PyTorch model's greedy token."""

    def __init__(
        self, config: LaneformerConfig, tensors: Any, dtype: str, devices: Any = (), cache_bytes: Any = None
    ):
        self.config = config
        self.geometry = dataclasses.replace(plan(config, dtype, SMALL, warps=2), mma_columns=5)
        self.model: Laneformer = plain_model(config, tensors, dtype)
        numbers = 5 * self.geometry.lanes_per_device * self.geometry.kv_lane
        memory: Any = SimpleNamespace(geometry=self.geometry, kv=torch.zeros(numbers, dtype=torch.int16))
        memory.changes = lambda *_: None
        self._hold([memory])
        self.caches: dict[int, list[int]] = {}
        vars(self.slots)["_copy"] = self._copy

    def _copy(self, source: Slot, target: Slot, count: int) -> None:
        self.caches[target.number] = self.caches[source.number][:count]

    @torch.inference_mode()
    def _read_piece(self, s: Decoding) -> None:
        first, end = s.first_scored(), s.pieces_end
        s.score(first, [self.model(torch.tensor([s.ids[:end]]))[0, first:].float()])
        self.caches[s.slot.number] = s.ids[:end]
        s.was_read(end - s.position)

    @torch.inference_mode()
    def run(self, columns: Sequence[Column], logits: torch.Tensor | None = None) -> list[int]:
        self.passes += 1
        assert 1 <= len(columns) <= 5
        tokens = []
        for column in columns:
            ids = self.caches.get(column.sequence, [])
            assert len(ids) >= column.position, "keys and values are missing"
            ids = self.caches[column.sequence] = [*ids[: column.position], column.token]
            tokens.append(int(self.model(torch.tensor([ids]))[0, -1].float().argmax()))
        return tokens
