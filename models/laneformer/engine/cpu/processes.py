"""The CPU engine's lanes in several processes: rank 0, which takes the requests, and its workers.

Every process has the whole model's plan and the weights, keys and values of its own lanes. What lanes give
each other lies in memory that all of them map (csrc/processes.h). A worker gets the model and then every
request over its standard input, and draws the same tokens as rank 0, which alone says what they are. It ends
when that pipe does. When a worker ends by itself, or shows no sign of life for SILENT_S, rank 0 ends the
request with an error that says so.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...config import LaneformerConfig
from ...tensors import Tensor
from ..decoder import Collected, EngineLost, Request
from ..machine import this_machine
from .decoder import MAX_THREADS, CpuDecoder, Place
from .links import LOADED, MEETING_S, follow_replies, heard, launched, listener, meet, shared_file
from .worker import follow

Source = Callable[[], Mapping[str, Tensor]]  # the tensors, made once more in a worker; it can be pickled
# between processes of one machine; the same by TCP; by TCP between those that a launcher has started
TRANSPORTS = ("memory", "tcp", "launched")
STATUS_S = 0.5  # that a process which is gone may take to show its exit status
KILLED_S = 10.0  # that it may take to end once it is killed, which a process inside the kernel does not


def cpu_decoder(
    config: LaneformerConfig,
    tensors: Mapping[str, Tensor],
    dtype: str,
    *,
    processes: int = 1,
    transport: str = TRANSPORTS[0],
    source: Source | None = None,
    **options: Any,
) -> CpuDecoder:
    """A decoder in this process, or in several. With "launched", all but rank 0 work for it and
    do not come back.
    """
    if transport not in TRANSPORTS:
        raise ValueError(f"transport = {transport!r} is unknown; choose from {TRANSPORTS}")
    if processes == 1:
        return CpuDecoder(config, tensors, dtype, **options)
    options["threads"] = threads_of_each(config.num_lanes, processes, options.get("threads"))
    if transport == "launched" and (launch := launched(processes))[0] > 0:
        follow(launch[0], processes, launch[1], lambda: tensors, config, dtype, options)
    return ProcessesDecoder(config, tensors, dtype, processes, transport, source or Held(tensors), **options)


class ProcessesDecoder(CpuDecoder):
    """A CpuDecoder whose lanes are shared out over `processes` processes; `threads` are those
    of each of them.

    A request joins when the last one has ended. EngineLost where a process is lost, then and from then on;
    ValueError where the lanes cannot be shared out.
    """

    max_joined = 1
    refused_options = ("masked",)  # masks would have to reach every process before the draw

    def __init__(
        self,
        config: LaneformerConfig,
        tensors: Mapping[str, Tensor],
        dtype: str,
        processes: int,
        transport: str,
        source: Source,
        **options: Any,
    ):
        self._transport = transport
        self._workers = Workers(processes)
        self._end = weakref.finalize(self, self._workers.close)
        try:
            place = self._workers.start(transport, source, config, dtype, options)
            super().__init__(config, tensors, dtype, place=place, **options)
        except BaseException as error:
            reason = self._workers.loss
            self._workers.close()
            if isinstance(error, OSError) and reason:
                raise EngineLost(f"{reason} while it loaded the model") from None
            raise

    def join(self, requests: Sequence[Request], alone: bool = False) -> list[int]:
        if self._workers.loss or self.lost:
            raise EngineLost(f"this engine is closed: {self._reason()}; load the model again")
        tickets = super().join(requests)
        self._workers.send(("join", list(requests)))
        return tickets

    def collect(self, timeout_s: float) -> list[Collected]:
        news = super().collect(timeout_s)
        if self.lost and not self._workers.closed:
            raise EngineLost(f"{self._reason()}: the request has ended, and the engine is closed")
        return news

    def probe(self) -> float:
        self._workers.send(("probe",))
        return super().probe()

    def set_latency(self, link_s: float, jitter: float = 0.0, seed: int = 0) -> None:
        """In every process. ValueError by TCP, which does not carry the stamps of the delay line."""
        if self._transport != TRANSPORTS[0]:
            raise ValueError(
                f"transport = {self._transport!r}: a latency is injected where processes share memory"
            )
        super().set_latency(link_s, jitter, seed)
        self._workers.send(("set_latency", link_s, jitter, seed))

    def close(self) -> None:
        self.leave_all()
        self._end()

    def _settle(self, cache_bytes: int) -> int:
        return self._workers.settle(cache_bytes, self.terms())

    def _reason(self) -> str:
        if self.lost == 2:
            return "the processes have come to different results"
        return self._workers.reason()


class Workers:
    """The processes beside rank 0, on this machine, and rank 0's memory for what they give each other."""

    def __init__(self, processes: int):
        self.memory = shared_file()
        self.processes: list[subprocess.Popen[bytes] | Remote] = []
        self.meeting: socket.socket | None = None
        self.links: list[socket.socket] = []  # rank 0's, over which the C++ core sends
        self.count, self.ranks, self.loss, self.closed = processes, range(1, processes), "", False
        self._said = [queue.SimpleQueue[str]() for _ in self.ranks]
        self._lock, self._lost = threading.Lock(), threading.Event()

    def start(self, transport: str, *model: Any) -> Place:
        """Start them with this model, or wait for those of a launcher; rank 0's place among them."""
        if transport == "launched":
            return self._wait(launched(self.count)[1][1])
        if transport == "tcp":
            self.meeting = listener(("127.0.0.1", 0))
        for rank in self.ranks:
            self._start(
                Place(rank, self.count, self.memory), self.meeting and self.meeting.getsockname(), *model
            )
        if self.meeting is None:
            return Place(0, self.count, self.memory)
        with self.meeting:
            return self._meet(self.meeting)

    def _wait(self, port: int) -> Place:
        with listener(("", port)) as meeting:
            place = self._meet(meeting)
            remotes = [Remote(meeting.accept()[0]) for _ in self.ranks]
        remotes.sort(key=lambda remote: remote.rank)
        self.processes += remotes
        for remote in remotes:
            self._begin_watch(remote.rank, remote)
        return place

    def _meet(self, meeting: socket.socket) -> Place:
        sockets = meet(self.count, meeting)
        self.links = [socket.socket(fileno=os.dup(each)) for each in sockets]
        return Place(0, self.count, self.memory, sockets)

    def _start(self, place: Place, *message: Any) -> None:
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
        self._begin_watch(place.rank, process)
        self._send(process, (place, *message))

    def send(self, message: object) -> None:
        for process in self.processes:
            self._send(process, message)

    def settle(self, cache_bytes: int, terms: str) -> int:
        """Once all have loaded their weights; EngineLost where one has not, or has others."""
        for rank, said in zip(self.ranks, self._said, strict=True):
            if not (told := said.get()):
                raise EngineLost(f"{self.reason()} while it loaded the model")
            if not told.startswith(LOADED):
                raise EngineLost(f"process {rank} of {self.count} cannot load the model: {told}")
            if told != f"{LOADED} {terms}":
                raise EngineLost(
                    f"process {rank} of {self.count} has another model, other options or another CPU type"
                )
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
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILLED_S)
            with contextlib.suppress(OSError):  # what it has not read
                assert process.stdin is not None
                process.stdin.close()
        for link in self.links:
            link.close()
        os.close(self.memory)

    def _send(self, process: subprocess.Popen[bytes] | Remote, message: object) -> None:
        assert process.stdin is not None
        try:
            pickle.dump(message, process.stdin)
            process.stdin.flush()
        except OSError:
            process.kill()  # if it has not ended, it cannot go on; `_watch` says so

    def _begin_watch(self, rank: int, process: subprocess.Popen[bytes] | Remote) -> None:
        threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()

    def _watch(self, rank: int, process: subprocess.Popen[bytes] | Remote) -> None:
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
            with contextlib.suppress(OSError):
                if self.meeting is not None:
                    self.meeting.shutdown(socket.SHUT_RDWR)  # nobody waits for it there any more
        for other in self.processes:
            other.kill()  # nothing can go on

    def _lose(self) -> None:
        os.pwrite(self.memory, b"\1", 0)  # csrc/exchange.h, Loss: no wait of rank 0's ends later
        for link in self.links:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)  # nor does a send to a process that does not read


class Remote:
    """A process of a launcher's, perhaps on another machine: as much of a Popen as Workers need."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        connection.settimeout(MEETING_S)
        self.rank, pid, host = heard(connection)
        self.pid = f"{pid} on {host}"
        connection.settimeout(None)
        self.stdin, self.stdout = connection.makefile("wb"), connection.makefile("rb")

    def wait(self, timeout: float | None = None) -> None:
        """Its end is that of the connection; its exit status is with the launcher."""

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)


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


def ended(status: int | None) -> str:
    if status is None:
        return "has closed its connection"
    return (
        f"ended with exit status {status}" if status >= 0 else f"was killed by {signal.Signals(-status).name}"
    )
