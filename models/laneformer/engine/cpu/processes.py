"""The CPU engine's lanes in several processes: rank 0, which takes the requests, and its workers.

Every process has the whole model's plan and the weights, keys and values of its own lanes. What lanes give each other
lies in memory that all of them map (csrc/processes.h). A worker gets the model and then every request over its standard
input, and draws the same tokens as rank 0, which alone says what they are. It ends when that pipe does. When a worker
ends by itself, rank 0 ends the request with an error that says how.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from ...config import LaneformerConfig
from ...tensors import Tensor
from ..decoder import Request
from ..machine import this_machine
from .decoder import MAX_THREADS, CpuDecoder, Place

Source = Callable[[], Mapping[str, Tensor]]  # the tensors, made once more in a worker; it can be pickled
STATUS_S = 0.5  # that a process which is gone may take to show its exit status


def cpu_decoder(
    config: LaneformerConfig,
    tensors: Mapping[str, Tensor],
    dtype: str,
    *,
    processes: int = 1,
    source: Source | None = None,
    **options: Any,
) -> CpuDecoder:
    """A decoder in this process, or in several."""
    if processes == 1:
        return CpuDecoder(config, tensors, dtype, **options)
    return ProcessesDecoder(config, tensors, dtype, processes, source or Held(tensors), **options)


class ProcessesDecoder(CpuDecoder):
    """A CpuDecoder whose lanes are shared out over `processes` processes; `threads` are those of each of them.

    One request at a time. RuntimeError where a process is lost, then and from then on; ValueError where the lanes
    cannot be shared out.
    """

    def __init__(
        self,
        config: LaneformerConfig,
        tensors: Mapping[str, Tensor],
        dtype: str,
        processes: int,
        source: Source,
        *,
        threads: int | None = None,
        **options: Any,
    ):
        threads = threads_of_each(config.num_lanes, processes, threads)
        self._told = False
        self._workers = Workers(processes)
        self._end = weakref.finalize(self, self._workers.close)
        try:
            for rank in range(1, processes):
                place = Place(rank, processes, self._workers.memory)
                self._workers.start(place, source, config, dtype, {**options, "threads": threads})
            place = Place(0, processes, self._workers.memory)
            super().__init__(config, tensors, dtype, threads=threads, place=place, **options)
        except BaseException:
            self._workers.close()
            raise

    def start(self, request: Request) -> None:
        if self._workers.loss or self.lost:
            raise RuntimeError(f"this engine is closed: {self._reason()}; load the model again")
        self._told = False
        super().start(request)
        self._workers.send(request)

    def poll(self, from_index: int, timeout_s: float, until_done: bool) -> tuple[list[int], bool]:
        tokens, finished = super().poll(from_index, timeout_s, until_done)
        if finished and self.lost and not self._told and not self._workers.closed:
            self._told = True
            raise RuntimeError(f"{self._reason()}: the request has ended, and the engine is closed")
        return tokens, finished

    def close(self) -> None:
        self.cancel()
        self._end()

    def _settle(self, cache_bytes: int) -> int:
        return self._workers.settle(cache_bytes)

    def _reason(self) -> str:
        if self.lost == 2:
            return "the processes have come to different results"
        return self._workers.reason()


class Workers:
    """The processes beside rank 0, and the memory that all of them share."""

    def __init__(self, processes: int):
        self.memory = shared_file()
        self.processes: list[subprocess.Popen[bytes]] = []
        self.count, self.loss, self.closed = processes, "", False
        self._lock, self._lost = threading.Lock(), threading.Event()

    def start(self, place: Place, *model: Any) -> None:
        command = [sys.executable, "-m", "laneformer.engine.cpu.worker"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"}
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[self.memory], env=environment,
            start_new_session=True,  # Ctrl-C is for rank 0, which ends the request
        )  # fmt: skip
        self.processes.append(process)
        threading.Thread(target=self._watch, args=(place.rank, process), daemon=True).start()
        self._send(process, (place, *model))

    def send(self, message: object) -> None:
        for process in self.processes:
            self._send(process, message)

    def settle(self, cache_bytes: int) -> int:
        """Once all have loaded their weights."""
        for process in self.processes:
            assert process.stdout is not None
            told = process.stdout.readline().decode()
            if told.strip():
                raise RuntimeError(f"a worker process cannot load the model: {told.strip()}")
            if not told:
                raise RuntimeError(f"{self.reason()} while it loaded the model")
        self.send(cache_bytes)
        return cache_bytes

    def reason(self) -> str:
        """Which process was lost, and how."""
        self._lost.wait(STATUS_S)
        return self.loss or "a process was lost"

    def close(self) -> None:
        """All waits end, and so do the workers."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
        self._lose()
        for process in self.processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):  # what it has not read
                    assert pipe is not None
                    pipe.close()
        os.close(self.memory)

    def _send(self, process: subprocess.Popen[bytes], message: object) -> None:
        assert process.stdin is not None
        try:
            pickle.dump(message, process.stdin)
            process.stdin.flush()
        except OSError:
            process.kill()  # if it has not ended, it cannot go on; `_watch` says so

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        with self._lock:
            if self.closed:
                return
            self.loss = self.loss or f"process {rank} of {self.count} (pid {process.pid}) {ended(status)}"
            self._lose()
            self._lost.set()
        for other in self.processes:
            other.kill()  # nothing can go on

    def _lose(self) -> None:
        with mmap.mmap(self.memory, mmap.PAGESIZE) as memory:
            memory[0] = memory[0] or 1


class Held:
    """Tensors that a worker gets as they are."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self.tensors = tensors

    def __call__(self) -> Mapping[str, Tensor]:
        return self.tensors


def threads_of_each(lanes: int, processes: int, threads: int | None) -> int:
    """Threads of each process, by default as many as the cores allow; ValueError where a lane would be cut."""
    if type(processes) is not int or not 1 <= processes <= lanes:
        raise ValueError(f"processes = {processes!r} must be an integer from 1 to {lanes}, the model's lanes")
    if threads is None:
        most = max(1, this_machine().default_threads(lanes) // processes)
        return next(n for n in range(most, 0, -1) if whole_lanes(lanes, processes, n))
    if type(threads) is not int or not 1 <= threads <= MAX_THREADS // processes:
        raise ValueError(
            f"threads = {threads!r} must be an integer from 1 to {MAX_THREADS // processes} for each of {processes} "
            "processes, or None for all cores"
        )
    if not whole_lanes(lanes, processes, threads):
        raise ValueError(
            f"threads = {threads} for each of {processes} processes would cut one of {lanes} lanes in two; "
            f"use at most {lanes // processes}, or a number of processes that divides the lanes"
        )
    return threads


def whole_lanes(lanes: int, processes: int, threads: int) -> bool:
    """Whether every process has all threads of its lanes (csrc/model.cpp, share_lanes)."""
    total = processes * threads
    starts = {-(-lane * total // lanes) for lane in range(lanes)}
    return total <= lanes or all(rank * threads in starts for rank in range(processes))


def shared_file() -> int:
    """An empty file without a name: nothing is left of it when the processes that hold it are gone."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("laneformer")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def ended(status: int) -> str:
    return f"ended with exit status {status}" if status >= 0 else f"was killed by {signal.Signals(-status).name}"
