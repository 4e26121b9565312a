"""A model with weights by the rule of fill.cu on the GPU, and passes over it, as engine/cuda/passes.py makes
them.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any

from laneformer.engine.cuda.structures import (
    MAX_COLUMNS,
    PASSES_PER_LAUNCH,
    TRACED,
    Column,
    Exchanges,
    Fill,
    Probe,
    Report,
    Weights,
    decode_structure,
    picked,
)
from laneformer.engine.sampling import Sampling
from tools.bench.bare.contents import Contents, Facts
from tools.bench.bare.driver import Driver, Failure

LIMIT_S = 3.0  # of a wait inside a kernel, which takes microseconds
GREEDY = Sampling(top_p=1.0)
Rows = list[list[int]]


class Model:
    """One sequence. `builds`: kernels for more and more columns, over the same memory."""

    def __init__(self, driver: Driver, contents: Contents, name: str):
        self.driver, self.shape = driver, contents.model(name)
        self.name, self.contents, shape = name, contents, self.shape
        self.columns, self.vocabulary = shape["columns"], shape["vocab_size"]
        self.memory = {key: driver.zeros(count) for key, count in shape["bytes"].items()}
        for key in ("tape_at", "rope"):
            self.memory[key] = driver.upload(contents.read(shape[key]))
        self.picks, self._picks_at = driver.pinned(ctypes.c_uint64 * (PASSES_PER_LAUNCH * MAX_COLUMNS))
        self.report, self._report_at = driver.pinned(Report)
        self.cancel, self._cancel_at = driver.pinned(ctypes.c_int)
        self.epoch, self._kernels = 0, dict[str, Any]()
        self.fill(shape["exponents"])

    def _kernel(self, unit: str, name: str, shared_bytes: int) -> Any:
        """Loaded when first asked for; all of its blocks must run at once."""
        if (key := f"{unit} {name}") not in self._kernels:
            code = self.contents.code(self.shape["code"][unit])
            (function,) = self.driver.kernels(code, name, shared_bytes=shared_bytes)
            self._kernels[key] = function
            each, there = self._resident(function, shared_bytes), self.contents.multiprocessors
            if each * there < self.shape["blocks"]:
                raise Failure(
                    "the GPU is not free",
                    f"{self.shape['blocks']} blocks of {self.shape['threads']} threads and {shared_bytes} bytes have "
                    f"to run at once, and {there} multiprocessors hold {each} each",
                )
        return self._kernels[key]

    def _resident(self, function: Any, shared_bytes: int) -> int:
        return self.driver.resident(function, self.shape["threads"], shared_bytes)

    def _launch(self, unit: str, name: str, shared_bytes: int, argument: ctypes.Structure) -> float:
        """Seconds of the GPU; Failure "hang" with who waited for what, where the kernel or the host gave up."""
        function = self._kernel(unit, name, shared_bytes)
        self.driver.launch(function, self.shape["blocks"], self.shape["threads"], shared_bytes, argument)
        self.driver.wait(name, self.contents.effort["launch_s"])
        if self.report.set:
            raise Failure("hang", self.report.told(name, LIMIT_S))
        return self.driver.seconds()

    def fill(self, exponents: Sequence[int]) -> None:
        """Make the weights; others than the shape's `exponents` are a planted fault."""
        m, shape = self.memory, self.shape
        argument = Fill(m["tapes"], m["tape_at"], m["embedding"], m["norms"], shape["bytes"]["norms"] // 4, 0)
        argument.exponents[:] = exponents
        self._launch("fill", "fill", 0, argument)

    def run(
        self,
        columns: Sequence[Column],
        ahead: int = 0,
        logits: bool = False,
        build: int = -1,
        traced: bool = False,
    ) -> Rows:
        """The tokens [pass][column] of one launch; with `logits`, those of the first pass lie in memory."""
        counts = [each["columns"] for each in self.shape["builds"]]
        if build < 0:
            build = next(i for i, count in enumerate(counts) if len(columns) <= count)
        first, (argument, order) = self.epoch, self._argument(logits, traced)
        order.column_count, order.columns[: len(columns)] = len(columns), columns
        order.epoch, order.ahead = first, ahead
        self.epoch += 1 + ahead
        of_build = self.shape["builds"][build]
        self._launch("traced" if traced else of_build["unit"], "pass", of_build["shared_bytes"], argument)
        words = [self.picks[i * MAX_COLUMNS :][:MAX_COLUMNS] for i in range(PASSES_PER_LAUNCH)]
        rows = picked(words, first, len(columns))
        if len(rows) != 1 + ahead:
            raise Failure("no tokens", f"{len(rows)} passes have told their tokens, of {1 + ahead}")
        return rows

    def _argument(self, logits: bool, traced: bool) -> tuple[Any, Any]:
        m, p = self.memory, decode_structure(1, traced)()
        if traced:
            p.trace = m["trace"]
        p.weights = Weights(
            tapes=m["tapes"], tape_at=m["tape_at"], embedding=m["embedding"], norms=m["norms"], rope=m["rope"],
            kv=m["kv"],
        )  # fmt: skip
        p.lane_words, p.inbox[0], p.aborted = m["lane_words"], m["inbox"], m["aborted"]
        p.report, p.cancel, p.picks = self._report_at, self._cancel_at, self._picks_at
        p.limit_ns, p.order.logits = int(LIMIT_S * 1e9), m["logits"] if logits else None
        return p, p.order

    def logits(self, row: int) -> array[float]:
        content = self.driver.download(self.memory["logits"] + 4 * row * self.vocabulary, 4 * self.vocabulary)
        values = array("f")
        values.frombytes(content)
        return values

    # ---- texts ----

    def read(self, ids: Sequence[int], start: int = 0, most: int = 0, build: int = -1) -> int:
        """Passes of up to `most` columns (0: as many as there are) over ids[start:]: the token after the
        last.
        """
        most, row = most or self.columns, [0]
        for at in range(start, len(ids), most):
            part = list(enumerate(ids))[at : at + most]
            ((row),) = self.run([Column(t, i, 0, sampling=GREEDY) for i, t in part], build=build)
        return row[-1]

    def greedy(self, prompt: Sequence[int], count: int, most: int = PASSES_PER_LAUNCH) -> list[int]:
        """`count` new tokens; launches make up to `most` passes, of several lengths."""
        made = [self.read(prompt)]
        while len(made) < count:
            last = Column(made[-1], len(prompt) + len(made) - 1, 0, sampling=GREEDY)
            more = min(len(made) % most, count - len(made) - 1)
            made += [row[0] for row in self.run([last], more)]
        return made

    def trace(self, token: int, position: int) -> list[array[int]]:
        """Cycles of each block in a launch of 16 passes, of structures.TRACED; of the build with one column."""
        self.driver.clear(self.memory["trace"], self.shape["bytes"]["trace"])
        self.run([Column(token, position, 0, sampling=GREEDY)], PASSES_PER_LAUNCH - 1, build=0, traced=True)
        cycles, size = array("Q"), len(TRACED)
        cycles.frombytes(self.driver.download(self.memory["trace"], self.shape["bytes"]["trace"]))
        return [cycles[i : i + size] for i in range(0, len(cycles), size)]

    # ---- what the memory gives (probe.cu) ----

    def probe(self, name: str, rounds: int) -> tuple[float, int]:
        """Seconds in which all tapes were read so often, and the sum of what was read, modulo 2^32."""
        shape, sums = self.shape, self.memory["sums"]
        self.driver.clear(sums, shape["bytes"]["sums"])
        argument = Probe(self.memory["tapes"], self.memory["tape_at"], sums, shape["bytes"]["tapes"], rounds)
        seconds = self._launch("probe", name, shape["probe_shared_bytes"], argument)
        return seconds, sum(self._sums()) % 2**32

    def _sums(self) -> array[int]:
        found = array("I")
        found.frombytes(self.driver.download(self.memory["sums"], self.shape["bytes"]["sums"]))
        return found

    def exchanges(self, trips: bool, saturated: bool, rounds: int) -> Facts:
        """{"ns" of a round, "bytes_per_s" that the other lanes read meanwhile}."""
        m, shape = self.memory, self.shape
        for key in ("sums", "words", "flags"):
            self.driver.clear(m[key], shape["bytes"][key])
        read = Probe(
            m["tapes"], m["tape_at"], m["sums"], shape["bytes"]["tapes"], self.contents.effort["read_rounds"]
        )
        done, aborted, ns = m["flags"], m["flags"] + 4, m["flags"] + 8
        argument = Exchanges(read, m["words"], ns, done, aborted, self._report_at, int(LIMIT_S * 1e9))
        argument.trips, argument.saturated, argument.warm_up, argument.rounds = (
            trips, saturated, rounds // 4, rounds
        )  # fmt: skip
        seconds = self._launch("probe", "exchanges", shape["probe_shared_bytes"], argument)
        took = int.from_bytes(self.driver.download(ns, 8), "little")
        chunks = sum(self._sums()[:: shape["warp_threads"]])
        return {"ns": took / rounds, "bytes_per_s": chunks * shape["chunk_bytes"] / seconds}
