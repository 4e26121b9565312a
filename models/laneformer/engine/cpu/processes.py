"""The CPU engine's lanes in several processes of one machine: rank 0, which takes the requests, and its workers.

Rank 0 plans every pass and draws every token; workers execute passes with the weights, keys and values of their
own lanes. Passes, and what lanes give each other, lie in memory that all of them map (csrc/processes.h). A
worker's standard input brings it the model, then a word whenever there are passes again, and ends it. When a
worker ends by itself, or shows no sign of life for SILENT_S, rank 0 ends all requests with an error that says so.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from ...config import LaneformerConfig
from ...tensors import Tensor
from ..decoder import Collected, EngineLost, Request
from ..machine import this_machine
from .decoder import MAX_THREADS, CpuDecoder, Place, planned_threads
from .worker import BEAT, BEAT_S, LOADED

Source = Callable[[], Mapping[str, Tensor]]  # the tensors, made once more in a worker; it can be pickled
START_S = 300.0  # that a worker may take to its first beat
SILENT_S = 10.0  # without a beat: a process that has started is hung
STATUS_S = 0.5  # that a process which is gone may take to show its exit status
KILLED_S = 10.0  # that it may take to end once it is killed, which a process inside the kernel does not


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
    if options.get("cache_dir") is not None:
        raise ValueError(
            f"cache_dir = {str(options['cache_dir'])!r} needs all keys and values in one process; use processes = 1"
        )
    options["threads"] = threads_of_each(config.num_lanes, processes, options.get("threads"))
    return ProcessesDecoder(config, tensors, dtype, processes, source or Held(tensors), **options)


class ProcessesDecoder(CpuDecoder):
    """A CpuDecoder whose lanes are shared out over `processes` processes; `threads` are those
    of each of them.

    EngineLost where a process is lost, then and from then on; ValueError where the lanes cannot be shared out.
    """

    def __init__(
        self,
        config: LaneformerConfig,
        tensors: Mapping[str, Tensor],
        dtype: str,
        processes: int,
        source: Source,
        **options: Any,
    ):
        self._workers = Workers(processes)
        self._end = weakref.finalize(self, self._workers.close)
        try:
            for rank in self._workers.ranks:
                place = Place(rank, processes, self._workers.memory)
                self._workers.start(place, source, config, dtype, options)
            place = Place(0, processes, self._workers.memory, self._workers.wake)
            super().__init__(config, tensors, dtype, place=place, **options)
        except BaseException:
            self._workers.close()
            raise

    def join(self, requests: Sequence[Request], alone: bool = False) -> list[int]:
        if self._workers.loss or self.lost:
            raise EngineLost(f"this engine is closed: {self._workers.reason()}; load the model again")
        return super().join(requests)

    def collect(self, timeout_s: float) -> list[Collected]:
        news = super().collect(timeout_s)
        if self.lost and not self._workers.closed:
            raise EngineLost(f"{self._workers.reason()}: the request has ended, and the engine is closed")
        return news

    def probe(self) -> float:
        if not self.running:  # else it raises
            self._workers.send("probe")
        return super().probe()

    def probe_products(self) -> float:
        if not self.running:
            self._workers.send("probe_products")
        return super().probe_products()

    def set_latency(self, link_s: float, jitter: float = 0.0, seed: int = 0) -> bool:
        between_lanes = super().set_latency(link_s, jitter, seed)
        self._workers.send("set_latency", link_s, jitter, seed)
        return between_lanes

    def close(self) -> None:
        self.leave_all()
        self._end()

    def _settle(self) -> None:
        self._workers.settle()


class Workers:
    """The processes beside rank 0, and rank 0's memory for what they give each other."""

    def __init__(self, processes: int):
        self.memory = shared_file()
        self.processes: list[subprocess.Popen[bytes]] = []
        self.count, self.ranks, self.loss, self.closed = processes, range(1, processes), "", False
        self._said = [queue.SimpleQueue[str]() for _ in self.ranks]
        self._lock, self._lost = threading.Lock(), threading.Event()

    def start(self, place: Place, *model: Any) -> None:
        command = [sys.executable, "-m", "laneformer.engine.cpu.worker"]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "PYTHONSAFEPATH": "1",
        }
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[self.memory], env=environment,
            start_new_session=True,  # Ctrl-C is for rank 0, which ends the request
        )  # fmt: skip
        self.processes.append(process)
        threading.Thread(target=self._watch, args=(place.rank, process), daemon=True).start()
        self._send(process, (place, *model))

    def send(self, *call: Any) -> None:
        """All are to call this of their decoders, by its name, with arguments."""
        for process in self.processes:
            self._send(process, call)

    def wake(self) -> None:
        self.send("work")

    def settle(self) -> None:
        """Once all have loaded their weights; EngineLost where one has not."""
        for rank, said in zip(self.ranks, self._said, strict=True):
            if not (told := said.get()):
                raise EngineLost(f"{self.reason()} while it loaded the model")
            if told != LOADED:
                raise EngineLost(f"process {rank} of {self.count} cannot load the model: {told}")

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
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILLED_S)
            with contextlib.suppress(OSError):  # what it has not read
                assert process.stdin is not None
                process.stdin.close()
        os.close(self.memory)

    def _send(self, process: subprocess.Popen[bytes], message: object) -> None:
        assert process.stdin is not None
        try:
            pickle.dump(message, process.stdin)
            process.stdin.flush()
        except (OSError, ValueError):  # the latter where it is closed
            process.kill()  # if it has not ended, it cannot go on; `_watch` says so

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as replies:
            silent_s = follow_replies(replies, self._said[rank - 1])
        how = f"has shown no sign of life for {silent_s:g} s" if silent_s else ended(process.wait())
        with self._lock:
            if self.closed:
                return
            self.loss = self.loss or f"process {rank} of {self.count} (pid {process.pid}) {how}"
            self._lose()
            self._lost.set()
        for other in self.processes:
            other.kill()  # nothing can go on

    def _lose(self) -> None:
        os.pwrite(self.memory, b"\1", 0)  # csrc/exchange.h, lost: no wait of rank 0's ends later


def shared_file() -> int:
    """An empty file without a name: nothing is left of it when the processes that hold it are gone."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("laneformer")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def follow_replies(replies: IO[bytes], said: queue.SimpleQueue[str]) -> float:
    """Hand over a worker's replies, then "". Returns the seconds of silence after which it is hung, or
    0 at its end.

    Intervals without a beat are counted, not the clock's time: while this process does not run,
    no other is late.
    """
    waiting = select.poll()
    waiting.register(replies, select.POLLIN)
    reply, silent_s, longest_s = b"", 0.0, START_S
    try:
        while silent_s < longest_s:
            if not waiting.poll(2 * BEAT_S * 1000):
                silent_s += 2 * BEAT_S
            elif heard := os.read(replies.fileno(), 4096):
                reply, silent_s, longest_s = reply + heard.replace(BEAT, b""), 0.0, SILENT_S
                *lines, reply = reply.split(b"\n")
                for line in lines:
                    said.put(line.decode())
            else:
                return 0.0
        return longest_s
    finally:
        said.put("")


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
        most = max(1, planned_threads(this_machine(), lanes) // processes)
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
    """Whether every process has all threads of its lanes (csrc/tapes.cpp, share_lanes)."""
    total = processes * threads
    starts = {-(-lane * total // lanes) for lane in range(lanes)}
    return total <= lanes or all(rank * threads in starts for rank in range(processes))


def ended(status: int) -> str:
    return (
        f"ended with exit status {status}" if status >= 0 else f"was killed by {signal.Signals(-status).name}"
    )
