"""Decoders for the CUDA engine where there is no GPU.

`EmulatedDecoder` is SequenceDecoder itself with its memory on the CPU and the kernels on the emulator, in a
thread of their own, as a GPU runs them beside the host. `EmulatedPasses` is PassDecoder in the same way. `LoopPasses`
are passes by the plain PyTorch model.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from laneformer import Laneformer
from laneformer.config import LaneformerConfig
from laneformer.engine import Engine, device
from laneformer.engine.cuda import decoder as cuda_decoder
from laneformer.engine.cuda.caches import Caches
from laneformer.engine.cuda.compile import FOLDER, INCLUDES, source_of
from laneformer.engine.cuda.decoder import CudaDecoder
from laneformer.engine.cuda.executor import CudaExecutor
from laneformer.engine.cuda.memory import Column, DeviceMemory, reset
from laneformer.engine.cuda.passes import Look, PassDecoder
from laneformer.engine.cuda.planning import plan
from laneformer.engine.cuda.prefill import logits_of
from laneformer.engine.cuda.sequence import SequenceDecoder, graph_kernels
from laneformer.engine.cuda.slots import Slots
from laneformer.engine.decoder import Collected, Ended, Request, Sampling
from laneformer.model import rope_table, run_layers
from tests.laneformer.cuda import emulator
from tests.laneformer.cuda.harness import (
    KERNELS,
    SMALL,
    as_read,
    as_stored_in,
    plain_model,
    random_model,
    small_config,
    tensors_of,
)


def gpu_of(engine: Engine) -> Any:
    """The engine's decoder of sequences: EmulatedDecoder, or on a GPU SequenceDecoder."""
    return cuda_of(engine).gpu


def passes_of(engine: Engine) -> Any:
    """What runs the engine's passes: one of those below, or on a GPU PassDecoder."""
    return cuda_of(engine)._executor.passes


def answers(executor: CudaExecutor, requests: Sequence[Request]) -> list[Collected]:
    """All that comes of requests that begin before the same pass."""
    tickets, found = (
        executor.schedule.join([replace(r, quiet=True) for r in requests], True),
        dict[int, Collected](),
    )
    while len(found) < len(tickets):
        for ticket, first, tokens, scores, ended in executor.schedule.collect(60):
            found[ticket] = Collected(ticket, first, tokens, scores, Ended(*ended))
    return [found[ticket] for ticket in tickets]


def cuda_of(engine: Engine) -> CudaDecoder:
    decoder = engine._open()
    assert isinstance(decoder, CudaDecoder)
    return decoder


def without_tiles(monkeypatch: pytest.MonkeyPatch, builds: Path) -> None:
    """As if there were one GPU, on which passes do not fit: EmulatedDecoder runs the engine's."""

    def no_tiles(*_: Any, **__: Any) -> None:
        raise ValueError("no tiles")

    monkeypatch.setattr(EmulatedDecoder, "cache", builds, raising=False)
    monkeypatch.setattr(cuda_decoder, "PassDecoder", no_tiles)
    monkeypatch.setattr(cuda_decoder, "SequenceDecoder", EmulatedDecoder)
    monkeypatch.setattr(device, "why_no_cuda", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


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
        stored, devices = random_model(self.config, self.geometry.half), range(self.geometry.devices)
        self.model, tensors = as_stored_in(stored, dtype), tensors_of(stored, self.geometry.half)
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
            logits=rows,
        )
        return rows


class LoopCaches(Caches):
    """The ids whose keys and values each cache would have."""

    def __init__(self, memory: Any):
        super().__init__([memory])
        self.ids: dict[int, list[int]] = {}

    def _copy(self, source: int, target: int, count: int) -> None:
        assert len(self.ids[source]) >= count
        self.ids[target] = self.ids[source][:count]


class LoopPasses(PassDecoder):
    """Passes of up to five columns by the PyTorch model: its logits, and of each column its greedy token."""

    def __init__(
        self, config: LaneformerConfig, tensors: Any, dtype: str, devices: Any = (), cache_bytes: Any = None
    ):
        self.config, self.devices = config, devices
        self.geometry = dataclasses.replace(plan(config, dtype, SMALL, warps=2), mma_columns=5)
        self.model: Laneformer = plain_model(config, tensors, "bf16" if dtype == "int8" else dtype)
        numbers = 5 * self.geometry.lanes_per_device * self.geometry.kv_lane
        memory: Any = SimpleNamespace(geometry=self.geometry, kv=torch.zeros(numbers, dtype=torch.int16))
        memory.device, memory.weight_bytes = "cpu", 1
        self._hold([memory])
        self.caches: Any = LoopCaches(memory)
        self.asked: list[Sequence[Column]] = []  # columns of each pass

    @torch.inference_mode()
    def read(self, ids: Sequence[int], cache: int, position: int, first_row: int) -> Iterator[torch.Tensor]:
        known = self.caches.ids[cache] = [*self.caches.ids.get(cache, [])[:position], *ids]
        assert len(known) == position + len(ids), "keys and values are missing"
        if first_row < len(known):
            yield self.logits_after(known)[first_row:]

    def logits_after(self, ids: Sequence[int]) -> torch.Tensor:
        """float32 (len(ids), V): the layers in 16 bits, the head's sums in float32, as on a GPU."""
        positions = torch.arange(len(ids))
        embedding, masks = (
            self.model.tok_embeddings(torch.tensor([ids])),
            self.model.masks(positions, positions),
        )
        rope = rope_table(self.config, positions)
        h = run_layers(self.model.layers, self.config, embedding, rope, masks)
        return torch.cat([*logits_of(as_read(self.model), h)])

    @torch.inference_mode()
    def run(
        self,
        columns: Sequence[Column],
        ahead: int = 0,
        logits: torch.Tensor | None = None,
        look: Look | None = None,
    ) -> list[list[int]]:
        self.asked.append(columns)
        assert 1 <= len(columns) <= 5
        rows, running = [self._pass(columns, logits)], [True] * len(columns)
        for made in range(ahead):
            running = [
                on and t not in c.stops[: c.stop_count]
                for on, t, c in zip(running, rows[-1], columns, strict=True)
            ]
            if not any(running) or (look is not None and look(rows)):
                break
            following = [
                Column(token, column.position + 1 + made, column.sequence)
                for token, column in zip(rows[-1], columns, strict=True)
            ]
            new = iter(self._pass([c for c, on in zip(following, running, strict=True) if on], None))
            rows.append([next(new) if on else -1 for on in running])
        return rows

    def _pass(self, columns: Sequence[Column], logits: torch.Tensor | None) -> list[int]:
        self.passes += 1
        tokens, kept = list[int](), self.caches.ids
        for i, column in enumerate(columns):
            ids = kept.get(column.sequence, [])
            assert len(ids) >= column.position, "keys and values are missing"
            ids = kept[column.sequence] = [*ids[: column.position], column.token]
            row = self.logits_after(ids)[-1]
            tokens.append(int(row.argmax()))
            if logits is not None:
                logits[i] = row
        return tokens
