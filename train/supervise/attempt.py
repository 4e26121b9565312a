"""Run one attempt from the supervisor's side: start the workers, pass on stop requests, kill what hangs."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from records.events import CRASHED, SUPERVISED, read_outcome, record_event
from records.job import JobSections

from .heartbeat import HangWatch, interval_s
from .signals import StopSignals
from .workers import NO_NUMA_BINDING, SLURM_GRACE_S, end_workers, start_workers

# for the end of the local process and stop requests; files are read much more rarely
POLL_S = 0.2
# torchrun's report on the console names the cause; outcome.json may hold a consequence seen by another rank
ROOT_CAUSE = re.compile(
    r"Root Cause.*?host +: (\S+).*?rank +: (\d+).*?exitcode +: (-?\d+)", re.DOTALL
)
# torchrun's report is among so many last bytes of the console
REPORT_BYTES = 16 << 20
# a disk with less room is full
FULL_BYTES = 16 << 20
HINTS = {
    signal.SIGKILL: "out of memory, or killed from outside",
    signal.SIGBUS: "no room in shared memory, or a file that was cut",
    signal.SIGSEGV: "a fault in native code",
    signal.SIGABRT: "a native library gave up; its words are in the log",
}
# how long to wait after SIGKILL, which a process blocked on a dead file system survives
DEATH_S = 10.0


@dataclass(frozen=True)
class Ended:
    """How an attempt ended; step: the last one reached."""

    code: int
    step: int
    reason: str
    suspects: tuple[str, ...] = ()  # nodes that a hang points at
    failed_node: str | None = None  # where the first rank failed
    what: str = "crash"


class Attempt:
    """Start the workers with `start`, then `watch` until they are gone."""

    def __init__(
        self,
        job: JobSections,
        number: int,
        stop: StopSignals,
        on_look: Callable[[], None] = lambda: None,
    ):
        self.job, self.number, self.stop, self.on_look = job, number, stop, on_look
        self.heartbeats = job.run / "heartbeats"
        self.logs = (
            job.run / "logs" / f"attempt-{number}-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}"
        )
        # workers on this machine, also when torchrun has lost them
        self.processes: set[psutil.Process] = set()

    def start(
        self, nodes: list[str] | None, nproc_per_node: int, train_arguments: list[str]
    ) -> None:
        """Clear what an earlier attempt left for its supervisor, and start the workers."""
        shutil.rmtree(self.heartbeats, ignore_errors=True)
        # either would be taken for this attempt's
        for stale in ("outcome.json", "stop"):
            (self.job.run / stale).unlink(missing_ok=True)
        self.nodes, self.nproc_per_node = nodes, nproc_per_node
        env = {SUPERVISED: str(self.job.run)}
        if not self.job.resilience.numa_binding:
            env[NO_NUMA_BINDING] = "1"
        self.workers = start_workers(
            nodes, nproc_per_node, ["train", *train_arguments], self.logs, env
        )

    def watch(self) -> Ended:
        """Wait for the end of this attempt; no worker is left."""
        try:
            ended = self._follow()
        finally:
            self._kill()
        return ended or self._describe_end()

    def _follow(self) -> Ended | None:
        """Watch until the workers have ended by themselves (None), or have to be killed."""
        section, ranks = self.job.resilience, self.nproc_per_node * len(self.nodes or [""])
        self.hang = HangWatch(
            self.heartbeats, ranks, section.hang_timeout_s, section.start_timeout_s
        )
        passed_on, next_look_s = False, 0.0
        while self.workers.poll() is None:
            time.sleep(POLL_S)
            if self.stop.request and not passed_on:
                # a file reaches any node, while srun and torchrun act on signals themselves instead of passing them on
                with suppress(OSError):  # a full disk: tried again
                    (self.job.run / "stop").touch()
                    passed_on = True
            if self.stop.forced:
                return Ended(
                    CRASHED,
                    0,
                    "killed: a second signal, or no end within resilience.stop_deadline_s",
                )
            if time.monotonic() >= next_look_s:
                next_look_s = time.monotonic() + interval_s(section.hang_timeout_s)
                self._note_workers()
                self.on_look()
                if (waited_s := self.hang.look()) is not None:
                    if read_outcome(self.job.run) is not None or self._workers_are_gone():
                        # a worker recorded why the job ends, or all have died, but not everything exits
                        return None
                    return self._record_hang(waited_s)
        return None

    def _describe_end(self) -> Ended:
        outcome = read_outcome(self.job.run)
        if outcome is not None and outcome["code"] != CRASHED:
            return Ended(outcome["code"], outcome["step"], outcome["reason"])
        self.hang.look()
        status = describe_exit(self.workers.returncode)
        node: str | None = None
        reason = outcome["reason"] if outcome else f"no worker recorded an outcome, {status}"
        suspects: tuple[str, ...] = ()
        if cause := ROOT_CAUSE.search(read_tail(self.logs / "console.log", REPORT_BYTES)):
            host, rank, exitcode = cause[1], int(cause[2]), int(cause[3])
            node = self.nodes[rank // self.nproc_per_node] if self.nodes else host
            reason += f" (first to fail: rank {rank} on {node}, {describe_exit(exitcode)})"
            if exitcode == -signal.SIGABRT:
                # NCCL's watchdog ends ranks that wait, not the one they wait for
                blamed, words = self.hang.blame(ended=True)
                reason, suspects = f"{reason}; {words}", self._nodes_of(blamed)
                node = None if blamed else node
        places = (self.job.run, self.logs, Path(tempfile.gettempdir()), Path("/dev/shm"))
        reason = "; ".join([reason, *list_full_disks(places)])
        step = outcome["step"] if outcome else self.hang.step
        return Ended(CRASHED, step, reason, suspects, node)

    def _nodes_of(self, ranks: list[int]) -> tuple[str, ...]:
        return tuple(
            {self.nodes[rank // self.nproc_per_node] for rank in ranks} if self.nodes else ()
        )

    def _record_hang(self, waited_s: float) -> Ended:
        """Keep the evidence: the step of every rank, and the stacks of all."""
        # the workers' own watchdogs have just written their stacks, or are about to
        time.sleep(1)
        self.hang.look()
        blamed, words = self.hang.blame()
        evidence = self.logs / "hang"
        with suppress(OSError):  # no rank reported, or a full disk
            shutil.copytree(self.heartbeats, evidence)
        beats = self.hang.beats
        facts = [
            {
                key: beats.get(rank, {"rank": rank}).get(key)
                for key in ("rank", "host", "pid", "step", "mark")
            }
            for rank in blamed
        ]
        step = self.hang.step
        reason = f"no rank finished a step for {waited_s:.0f} s"
        record_event(
            self.job.run,
            "hang",
            step=step,
            reason=reason,
            laggards=facts,
            ranks=words,
            stacks=str(evidence),
        )
        return Ended(CRASHED, step, f"{reason}; {words}", self._nodes_of(blamed), what="hang")

    def _note_workers(self) -> None:
        with suppress(psutil.NoSuchProcess):
            self.processes |= set(psutil.Process(self.workers.pid).children(recursive=True))

    def _workers_are_gone(self) -> bool:
        """Tell whether torchrun, on this machine, has outlived all its workers."""
        return self.nodes is None and bool(self.processes) and all(map(_is_gone, self.processes))

    def _kill(self) -> None:
        """Kill all processes of this attempt: a survivor would write into the run folder of the next."""
        self._note_workers()
        # SIGKILL is the only signal that ends a stopped process; srun needs time to end its tasks on all nodes
        end_workers(self.workers, SLURM_GRACE_S if self.nodes else 0.0)
        for process in self.processes:
            # psutil knows a process by its start, so a reused number is safe
            with suppress(psutil.NoSuchProcess):
                process.kill()
        deadline_s = time.monotonic() + DEATH_S
        while time.monotonic() < deadline_s and not all(map(_is_gone, self.processes)):
            time.sleep(0.05)


def _is_gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def describe_exit(status: int) -> str:
    """Say an exit status in words."""
    # a shell adds 128 to a signal's number, Python negates it
    number = -status if status < 0 else status - 128
    if number not in set(signal.Signals):
        return f"exit status {status}"
    hint = HINTS.get(signal.Signals(number))
    return f"signal {number}, {signal.Signals(number).name}" + (f": {hint}" if hint else "")


def read_tail(path: Path, size_bytes: int) -> str:
    """Return the end of a file; "" if there is none."""
    with suppress(FileNotFoundError), open(path, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - size_bytes))
        return file.read().decode(errors="replace")
    return ""


def list_full_disks(paths: Iterable[Path]) -> list[str]:
    # by device: several of the places may be on one disk
    full: dict[int, str] = {}
    for path in paths:
        with suppress(OSError):
            usage, device = shutil.disk_usage(path), path.stat().st_dev
            if usage.free < min(FULL_BYTES, usage.total / 10):
                words = f"the disk of {path} is full: {usage.free >> 10} KiB of {usage.total >> 20} MiB free"
                full.setdefault(device, words)
    return list(full.values())
