"""One attempt, from the supervisor's side: start the workers, pass on stop requests, kill what hangs.

The workers are one torchrun on this machine, or one per node through srun. Rank = (position of the node in
the list, position in the node), whatever order Slurm gives its tasks: every task looks up its own name. The
first node hosts the rendezvous. An attempt has a port and an id of its own, so it cannot meet the remains of
a broken one, and torchrun itself restarts nothing. A stop request travels as the file RUN/stop, which rank 0
looks for at every step: a file reaches any node, while srun and torchrun act on signals themselves instead
of passing them on.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from records.events import CRASHED, SUPERVISED, read_outcome, record_event
from records.files import host_name
from records.job import JobSections

from .heartbeat import HangWatch, interval_s
from .signals import StopSignals

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
POLL_S = 0.2  # for the end of the local process and stop requests; files are read much more rarely
NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
NO_NUMA_BINDING = (
    "LANEFORMER_NO_NUMA_BINDING"  # environment variable: resilience.numa_binding = false
)
NUMA_TRIAL_S = 120
SCONTROL_TIMEOUT_S = 60
# torchrun's report on the console names the cause; outcome.json may hold a consequence seen by another rank
ROOT_CAUSE = re.compile(
    r"Root Cause.*?host +: (\S+).*?rank +: (\d+).*?exitcode +: (-?\d+)", re.DOTALL
)
# torchrun gives its workers 30 s between SIGTERM and SIGKILL, and Slurm gives torchrun KillWait, 30
# s by default
SLURM_GRACE_S = 90.0
REPORT_BYTES = 16 << 20  # torchrun's reports are among so many last bytes of the console
FULL_BYTES = 16 << 20  # less room than this is none
HINTS = {
    signal.SIGKILL: "out of memory, or killed from outside",
    signal.SIGBUS: "no room in shared memory, or a file that was cut",
    signal.SIGSEGV: "a fault in native code",
    signal.SIGABRT: "a native library gave up; its words are in the log",
}
DEATH_S = (
    10.0  # a process blocked on a dead file system survives even SIGKILL, so waiting is limited
)


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
    """Start the workers with `start`, then `watch` until they are gone. on_look: called
    every few seconds meanwhile.
    """

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
        self.known: set[psutil.Process] = (
            set()
        )  # workers on this machine, also when torchrun has lost them

    def start(
        self, nodes: list[str] | None, nproc_per_node: int, train_arguments: list[str]
    ) -> None:
        """Clear what an earlier attempt left for its supervisor, and start the workers."""
        shutil.rmtree(self.heartbeats, ignore_errors=True)
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
        """Wait for the end of this attempt; whatever happens here, no worker is left."""
        try:
            ended = self._follow()
        finally:
            self._kill()
        return ended or self._outcome()

    def _follow(self) -> Ended | None:
        """Until the workers have ended by themselves (None), or have to be killed (how
        that ends the attempt).
        """
        section, ranks = self.job.resilience, self.nproc_per_node * len(self.nodes or [""])
        self.hang = HangWatch(
            self.heartbeats, ranks, section.hang_timeout_s, section.start_timeout_s
        )
        asked, next_look_s = False, 0.0
        while self.workers.poll() is None:
            time.sleep(POLL_S)
            if self.stop.asked and not asked:
                with suppress(OSError):  # a full disk: tried again
                    (self.job.run / "stop").touch()
                    asked = True
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
                        return None  # a worker recorded why the job ends, or all have died, but not everything exits
                    return self._on_hang(waited_s)
        return None

    def _outcome(self) -> Ended:
        outcome = read_outcome(self.job.run)
        if outcome is not None and outcome["code"] != CRASHED:
            return Ended(outcome["code"], outcome["step"], outcome["reason"])
        self.hang.look()
        status = exit_words(self.workers.returncode)
        node: str | None = None
        reason = outcome["reason"] if outcome else f"no worker recorded an outcome, {status}"
        suspects: tuple[str, ...] = ()
        if cause := ROOT_CAUSE.search(last_text(self.logs / "console.log", REPORT_BYTES)):
            host, rank, exitcode = cause[1], int(cause[2]), int(cause[3])
            node = self.nodes[rank // self.nproc_per_node] if self.nodes else host
            reason += f" (first to fail: rank {rank} on {node}, {exit_words(exitcode)})"
            if exitcode == -signal.SIGABRT:
                # NCCL's watchdog ends ranks that wait, not the one they wait for
                blamed, words = self.hang.blame(ended=True)
                reason, suspects = f"{reason}; {words}", self._nodes_of(blamed)
                node = None if blamed else node
        places = (self.job.run, self.logs, Path(tempfile.gettempdir()), Path("/dev/shm"))
        reason = "; ".join([reason, *full_disks(places)])
        step = outcome["step"] if outcome else self.hang.step
        return Ended(CRASHED, step, reason, suspects, node)

    def _nodes_of(self, ranks: list[int]) -> tuple[str, ...]:
        return tuple(
            {self.nodes[rank // self.nproc_per_node] for rank in ranks} if self.nodes else ()
        )

    def _on_hang(self, waited_s: float) -> Ended:
        """Keep the evidence: the step of every rank, and the stacks of all."""
        time.sleep(1)  # the workers' own watchdogs have just written, or are about to
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
            self.known |= set(psutil.Process(self.workers.pid).children(recursive=True))

    def _workers_are_gone(self) -> bool:
        """Whether torchrun, on this machine, has outlived all its workers."""
        return self.nodes is None and bool(self.known) and all(map(_is_gone, self.known))

    def _kill(self) -> None:
        """Kill all processes of this attempt: a survivor would write into the run folder of the next.

        Local processes get SIGKILL at once, the only signal that ends a stopped process. srun gets SIGTERM
        first and time to end its tasks on all nodes.
        """
        self._note_workers()
        end_workers(self.workers, SLURM_GRACE_S if self.nodes else 0.0)
        for process in self.known:
            # psutil knows a process by its start, so a reused number is safe
            with suppress(psutil.NoSuchProcess):
                process.kill()
        deadline_s = time.monotonic() + DEATH_S
        while time.monotonic() < deadline_s and not all(map(_is_gone, self.known)):
            time.sleep(0.05)


def _is_gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def exit_words(status: int) -> str:
    """An exit status for people: signals by name, with what usually sends them."""
    number = -status if status < 0 else status - 128  # as a shell says it
    if number not in set(signal.Signals):
        return f"exit status {status}"
    hint = HINTS.get(signal.Signals(number))
    return f"signal {number}, {signal.Signals(number).name}" + (f": {hint}" if hint else "")


def last_text(path: Path, size_bytes: int) -> str:
    """The end of a file, which may be of gigabytes; "" if there is none."""
    with suppress(FileNotFoundError), open(path, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - size_bytes))
        return file.read().decode(errors="replace")
    return ""


def full_disks(paths: Iterable[Path]) -> list[str]:
    """What to say of each disk of these places that has no room, as this machine sees it."""
    full: dict[int, str] = {}  # by device
    for path in paths:
        with suppress(OSError):
            usage, device = shutil.disk_usage(path), path.stat().st_dev
            if usage.free < min(FULL_BYTES, usage.total / 10):
                words = f"the disk of {path} is full: {usage.free >> 10} KiB of {usage.total >> 20} MiB free"
                full.setdefault(device, words)
    return list(full.values())


def hold_port() -> socket.socket:
    """A socket that is bound to a port and does not listen: until it is closed, the kernel gives the port to nobody
    who asks for any, while a program that is told its number can listen at it (SO_REUSEADDR, as servers set it).
    """
    holder = socket.socket()
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        holder.setsockopt(socket.SOL_SOCKET, option, 1)
    holder.bind(("", 0))
    return holder


def start_workers(
    nodes: list[str] | None,
    nproc_per_node: int,
    program: list[str],
    log_folder: Path,
    more_env: dict[str, str],
) -> subprocess.Popen:
    """Start `python -m PROGRAM` on every rank of these nodes, in a process group of its own.

    nodes: names within this Slurm job, or None for this machine. What the process prints goes to
    log_folder/console.log, the output of each rank to log_folder/<node>/. The exit status is 0 when
    every rank's was 0.
    """
    log_folder.mkdir(parents=True, exist_ok=True)
    with hold_port() as holder:
        address, port = "localhost", holder.getsockname()[1]
        if nodes is not None:
            address, port = node_address(nodes[0]), random.randrange(20_000, 30_000)
        torchrun = [
            f"--nnodes={len(nodes or [''])}",
            f"--nproc-per-node={nproc_per_node}",
            "--max-restarts=0",
            "--rdzv-backend=static",
            f"--rdzv-endpoint={address}:{port}",
            "--tee=3",
            f"--rdzv-id={log_folder.parent.parent.name}-{os.getpid()}-{time.monotonic_ns()}",
        ]
        if nodes is None:
            binding = (
                numa_binding(nproc_per_node, log_folder) if NO_NUMA_BINDING not in more_env else []
            )
            launcher = [
                *TORCHRUN,
                *torchrun,
                "--node-rank=0",
                f"--log-dir={log_folder / 'local'}",
                *binding,
            ]
        else:
            join = [
                sys.executable,
                "-m",
                "train.supervise.attempt",
                ",".join(nodes),
                str(log_folder),
            ]
            launcher = [*srun(nodes), "--kill-on-bad-exit=1", *join, *torchrun]
        env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **more_env}
        env.setdefault("OMP_NUM_THREADS", "1")
        # its own default is the home folder, often NFS; by number, as in a container a uid may have no name
        env.setdefault("TRITON_CACHE_DIR", f"{tempfile.gettempdir()}/triton_{os.getuid()}")
        with open(log_folder / "console.log", "ab") as log:
            return subprocess.Popen(
                [*launcher, "-m", *program],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=[
                    holder.fileno()
                ],  # torchrun inherits the port, which its store then listens at
            )


def numa_binding(nproc_per_node: int, log_folder: Path) -> list[str]:
    """torchrun's flag that keeps a rank on the CPUs beside its GPU, where it works: it needs numactl and a GPU, and
    fails without /sys/bus/pci or where a GPU admits one process. Tried with a program that does nothing; what it says
    goes to log_folder/numa.log.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    if (
        hidden
        or NO_NUMA_BINDING in os.environ
        or not NVIDIA_GPUS.is_dir()
        or not shutil.which("numactl")
    ):
        return []
    flag = "--numa-binding=node"
    trial = ["--standalone", f"--nproc-per-node={nproc_per_node}", flag, "--no-python", "true"]
    with open(log_folder / "numa.log", "ab") as log, suppress(subprocess.TimeoutExpired):
        if (
            subprocess.run(
                [*TORCHRUN, *trial], stdout=log, stderr=log, timeout=NUMA_TRIAL_S
            ).returncode
            == 0
        ):
            return [flag]
    print(
        f"NUMA binding does not work here, see {log_folder}/numa.log; ranks start without it. To skip the trial, set "
        "resilience.numa_binding = false",
        file=sys.stderr,
    )
    return []


def end_workers(process: subprocess.Popen, grace_s: float = SLURM_GRACE_S) -> None:
    """SIGTERM and time to end the tasks on all nodes, then SIGKILL."""
    if process.poll() is None and grace_s:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    process.kill()
    process.wait()


def srun(nodes: list[str]) -> list[str]:
    """srun with one task on each of these nodes, which has all CPUs and GPUs of its node, beside other steps."""
    count = len(nodes)
    return [
        "srun",
        f"--nodelist={','.join(nodes)}",
        f"--nodes={count}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
        "--overlap",
        "--cpu-bind=none",
    ]


def node_address(node: str) -> str:
    """The address under which Slurm itself reaches a node; its name where Slurm has none."""
    command = ["scontrol", "show", "node", "-o", node]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SCONTROL_TIMEOUT_S)
    if done.returncode:
        raise OSError(
            f"{' '.join(command)} failed with exit status {done.returncode}: {done.stderr.strip()}"
        )
    address = re.search(r"\bNodeAddr=(\S+)", done.stdout)
    return address[1] if address else node


def main() -> None:
    """`python -m train.supervise.attempt NAMES LOGS ...` on a node: become torchrun, ranked by
    its place in NAMES.
    """
    names, log_folder, *arguments = sys.argv[1:]
    node = host_name()
    logs = Path(log_folder) / node
    logs.mkdir(parents=True, exist_ok=True)
    (count,) = (
        int(flag.partition("=")[2]) for flag in arguments if flag.startswith("--nproc-per-node=")
    )
    here = [
        f"--node-rank={names.split(',').index(node)}",
        f"--log-dir={logs}",
        *numa_binding(count, logs),
    ]
    os.execv(sys.executable, [*TORCHRUN, *here, *arguments])


if __name__ == "__main__":
    main()
