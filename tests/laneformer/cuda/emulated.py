"""The CUDA engine's host side, PassRunner, with its kernels on the emulator and memory on the CPU."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from laneformer.config import LaneformerConfig
from laneformer.engine.cuda.compile import FOLDER, INCLUDES, source_of
from laneformer.engine.cuda.constants import constants_of
from laneformer.engine.cuda.graph import graph_launches
from laneformer.engine.cuda.memory import DeviceMemory, half_of
from laneformer.engine.cuda.passes import PassRunner
from laneformer.engine.cuda.planning import plan
from laneformer.engine.cuda.structures import Column, GraphState
from laneformer.engine.decoder import Sampling
from tests.laneformer.cuda import emulator
from tests.laneformer.cuda.harness import (
    KERNELS,
    SMALL,
    as_stored_in,
    random_model,
    small_config,
    tensors_of,
)
from tests.proofs import KERNEL_SOURCES

GREEDY = Sampling(top_p=1.0)
THREADS = ThreadPoolExecutor()
needs_emulator = pytest.mark.skipif(bool(emulator.MISSING), reason=emulator.MISSING)
emulator_proof = [pytest.mark.proof(*KERNEL_SOURCES), needs_emulator]


class Running:
    """A launch in a thread, with the interface of a torch stream; raises its error where a GPU would."""

    def __init__(self, launch: Callable[[], None]):
        self.launched = THREADS.submit(launch)

    def query(self) -> bool:
        return self.launched.done() and self.launched.result() is None

    def synchronize(self):
        self.launched.result()


def build_unit(geometry, text, builds) -> ctypes.CDLL:
    """Build a text that includes some of the kernels' headers."""
    source = f"#define GRAPH 0\n{constants_of(geometry)}{text}"
    return emulator.build(source, INCLUDES, {"TABLE": "constexpr"}, builds)


class EmulatedPasses(PassRunner):
    """A PassRunner on the emulator.

    `launched` records each launch's number of columns. With `watchdog`, the kernels' own time-out ends
    a wait in vain.
    """

    watchdog = False
    late_s = 600.0  # an emulated pass takes seconds

    def __init__(
        self,
        builds,
        columns,
        sequences=0,
        races: bool = False,
        fewer: Sequence[int] = (),
        config: LaneformerConfig | None = None,
        tensors=None,
        machine=SMALL,
        version="passes",
        **shape,
    ):
        """Create memory and geometry; the kernels are built on first use.

        Args:
            fewer: columns of further builds, besides the one with `columns`.
            config: by default `small_config()`.
            tensors: by default those of a random model.
            shape: passed to `plan`.
        """
        self.config, self.limit_s, self.seed = config or small_config(), 10.0, 0
        dtype, self.races, self.version = shape.pop("dtype", "bf16"), races, version
        shape = {"warps": 2, "chunk_bytes": 512, **shape}
        shape |= {} if tensors is None else {"half": half_of(tensors)}
        self.builds = [
            plan(self.config, dtype, machine, columns=n, **shape) for n in (*fewer, columns)
        ]
        self.geometry, self.launched = self.builds[-1], list[int]()
        if tensors is None:
            stored = random_model(self.config, self.geometry.half)
            self.model, tensors = (
                as_stored_in(stored, dtype),
                tensors_of(stored, self.geometry.half),
            )
        self.tensors, devices = tensors, range(self.geometry.devices)
        self._hold(
            [DeviceMemory(self.geometry, tensors, i, "cpu", sequences or columns) for i in devices]
        )
        self.folder = builds
        self.forget()

    @functools.cached_property
    def library(self) -> ctypes.CDLL:
        return self.build(source_of(self.version, self.geometry), self.folder)

    @functools.cached_property
    def libraries(self) -> list[ctypes.CDLL]:
        smaller = [self.build(source_of(self.version, g), self.folder) for g in self.builds[:-1]]
        return [*smaller, self.library]

    def build(self, source, builds, folder=FOLDER) -> ctypes.CDLL:
        source += "".join(f"EMULATE({kernel}, Decode)\n" for kernel in KERNELS[self.version])
        return emulator.build(
            source, [folder, *INCLUDES], {"TABLE": "constexpr"}, builds, self.races
        )

    def forget(self):
        """Reset all words, and fill keys and values with NaN."""
        self._reset_words()
        for memory in self.memories:
            memory.kv.fill_(0x7FFF)

    def _launch(self, arguments: Sequence[Any]):
        build = self.build_for(arguments)
        self.launched.append(self.builds[build].columns)
        library = self.libraries[build]
        self._streams = [Running(functools.partial(self._emulate, arguments, build, library))]

    def _emulate(self, arguments: Sequence[Any], build: int, library):
        buffers = {
            f"{name} {m.index}": getattr(m, name)
            for m in self.memories
            for name in ("lane_words", "inbox")
        }
        caches = {f"keys and values {m.index}": m.kv for m in self.memories if self.races}
        emulate = functools.partial(
            emulator.launch,
            library,
            threads=32 * self.geometry.warps,
            watchdog=self.watchdog,
            shared_bytes=self.builds[build].shared_bytes,
            seed=self.seed + self.passes,
            names={name: (tensor.data_ptr(), tensor.nbytes) for name, tensor in buffers.items()},
            plain={name: (tensor.data_ptr(), tensor.nbytes) for name, tensor in caches.items()},
        )
        if self.version == "passes":
            emulate("pass", arguments, blocks=self.geometry.blocks)
            return
        # a graph reads its state from device memory; its nodes are launches, one after the other
        argument, state = arguments[0], GraphState.of(arguments[0].order)
        ctypes.memmove(argument.graph, ctypes.addressof(state), ctypes.sizeof(state))
        for _ in range(1 + argument.order.extra_passes):
            for kernel, argument.layer, argument.module, blocks in graph_launches(self.geometry):
                emulate(kernel, argument, blocks=blocks)

    def logits(self, columns: Sequence[tuple[int, int, int]], sampling=GREEDY) -> torch.Tensor:
        """Return the logits (columns, V) of one pass of (token, position, sequence)."""
        return self.picks(columns, sampling)[1]

    def picks(
        self, columns: Sequence[tuple[int, int, int]], sampling=GREEDY
    ) -> tuple[list[int], torch.Tensor]:
        """Return the next token of each column, and the logits."""
        rows = torch.full((len(columns), self.config.vocab_size), float("nan"))
        picked = self.run([Column(*column, sampling=sampling) for column in columns], logits=rows)
        return picked[0], rows

    def decode(
        self, ids: list[int], count=1, seed=0, sampling=GREEDY, stops: Sequence[int] = ()
    ) -> tuple[list[int], torch.Tensor]:
        """Read `ids` from position 0 and generate up to `count` tokens: (new tokens, logits (len(ids), V))."""
        self.seed, columns, parts = seed, [(token, i, 0) for i, token in enumerate(ids)], []
        # as many columns at a time as there are; the new tokens after the first take one more
        # launch
        for start in range(0, len(ids), self.columns):
            picked, rows = self.picks(columns[start : start + self.columns], sampling)
            parts.append(rows)
        token = picked[-1]
        if count == 1 or token in stops:
            return [token], torch.cat(parts)
        last = Column(token, len(ids), 0, 0, len(stops), tuple(stops), sampling)
        return [token, *(row[0] for row in self.run([last], count - 2))], torch.cat(parts)
