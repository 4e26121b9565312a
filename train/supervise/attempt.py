"""One attempt, from the supervisor's side: start the workers, pass on stop requests, kill what hangs.

The workers are one torchrun on this machine, or one per node through srun. Rank = (position of the node in the list,
position in the node), whatever order Slurm gives its tasks: every task looks up its own name. The first node hosts the
rendezvous. An attempt has a port and an id of its own, so it cannot meet the remains of a broken one, and torchrun
itself restarts nothing.
A stop request travels as the file RUN/stop, which rank 0 looks for at every step: a file reaches any node, while srun
and torchrun act on signals themselves instead of passing them on.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from records.events import CRASHED, read_outcome, record_event
from records.files import host_name
from records.job import JobSections

from .heartbeat import HangWatch, laggards, read_heartbeats
from .signals import StopSignals

POLL_S = 0.2
SCONTROL_TIMEOUT_S = 60
# torchrun's report on the console names the cause; outcome.json may hold a consequence seen by another rank
ROOT_CAUSE = re.compile(r"Root Cause.*?host +: (\S+).*?rank +: (\d+).*?exitcode +: (-?\d+)", re.DOTALL)
# torchrun gives its workers 30 s between SIGTERM and SIGKILL, and Slurm gives torchrun KillWait, 30 s by default
SLURM_GRACE_S = 90.0
DEATH_S = 10.0  # a process blocked on a dead file system survives even SIGKILL, so waiting is limited


@dataclass(frozen=True)
class Ended:
    """How an attempt ended; step: the last one reached."""

    code: int
    step: int
    reason: str
    suspects: tuple[str, ...] = ()  # nodes that a hang points at


class Attempt:
    """Start the workers with `start`, then `watch` until they are gone."""

    def __init__(self, job: JobSections, number: int, stop: StopSignals):
        self.job, self.number, self.stop = job, number, stop
        self.heartbeats = job.run / "heartbeats"
        self.logs = job.run / "logs" / f"attempt-{number}-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}"
        self.known: set[psutil.Process] = set()  # workers on this machine, also when torchrun has lost them

    def start(self, nodes: list[str] | None, nproc_per_node: int, train_arguments: list[str]) -> None:
        """Clear what an earlier attempt left for its supervisor, and start the workers."""
        shutil.rmtree(self.heartbeats, ignore_errors=True)
        for stale in ("outcome.json", "stop"):
            (self.job.run / stale).unlink(missing_ok=True)
        name = f"{self.job.run.name}-{os.getpid()}-{time.monotonic_ns()}"
        self.on_nodes = nodes is not None
        port = free_port() if nodes is None else random.randrange(20_000, 30_000)
        self.workers = start_workers(nodes, nproc_per_node, name, port, train_arguments, self.logs)

    def watch(self) -> Ended:
        """Wait for the end of this attempt."""
        section = self.job.resilience
        hang = HangWatch(self.heartbeats, section.hang_timeout_s, section.start_timeout_s)
        ended, told = None, False
        while self.workers.poll() is None:
            time.sleep(POLL_S)
            self._note_workers()
            if self.stop.asked and not told:
                (self.job.run / "stop").touch()
                told = True
            if self.stop.forced:
                ended = Ended(CRASHED, 0, "killed: a second signal, or no end within resilience.stop_deadline_s")
            elif (waited_s := hang.hung_for_s()) is not None:
                if read_outcome(self.job.run) is not None or self._workers_are_gone():
                    break  # a worker recorded why the job ends, or all have died, but not everything exits
                ended = self._on_hang(waited_s)
            if ended:
                break
        self._kill()
        return ended or self._outcome()

    def _outcome(self) -> Ended:
        outcome = read_outcome(self.job.run)
        if outcome is not None and outcome["code"] != CRASHED:
            return Ended(outcome["code"], outcome["step"], outcome["reason"])
        said = outcome["reason"] if outcome else f"no worker recorded an outcome, exit status {self.workers.returncode}"
        console = self.logs / "console.log"
        found = ROOT_CAUSE.search(console.read_text(errors="replace")) if console.is_file() else None
        if found:
            said += f" (first to fail: rank {found[2]} on {found[1]}, exit status {found[3]})"
        steps = [beat["step"] or 0 for beat in read_heartbeats(self.heartbeats)]
        return Ended(CRASHED, outcome["step"] if outcome else max(steps, default=0), said)

    def _on_hang(self, waited_s: float) -> Ended:
        """Keep the evidence: the step of every rank, and the stacks of all."""
        time.sleep(1)  # the workers' own watchdogs have just written, or are about to
        beats = read_heartbeats(self.heartbeats)
        blamed = laggards(beats)
        evidence = self.logs / "hang"
        if self.heartbeats.is_dir():
            shutil.copytree(self.heartbeats, evidence)
        facts: list[dict[str, Any]] = [{key: beat[key] for key in ("rank", "host", "pid", "step")} for beat in blamed]
        step = max((beat["step"] or 0 for beat in beats), default=0)
        reason = f"no rank finished a step for {waited_s:.0f} s"
        record_event(self.job.run, "hang", step=step, reason=reason, laggards=facts, stacks=str(evidence))
        ranks = ", ".join(f"rank {fact['rank']} on {fact['host']}" for fact in facts[:4]) or "no rank reported"
        return Ended(CRASHED, step, f"{reason}; {ranks}", tuple({fact["host"] for fact in facts}))

    def _note_workers(self) -> None:
        with suppress(psutil.NoSuchProcess):
            self.known |= set(psutil.Process(self.workers.pid).children(recursive=True))

    def _workers_are_gone(self) -> bool:
        """Whether torchrun, on this machine, has outlived all its workers."""
        return not self.on_nodes and bool(self.known) and all(map(_is_gone, self.known))

    def _kill(self) -> None:
        """Kill all processes of this attempt: a survivor would write into the run folder of the next.

        Local processes get SIGKILL at once, the only signal that ends a stopped process. srun gets SIGTERM first and
        time to end its tasks on all nodes.
        """
        if self.workers.poll() is None and self.on_nodes:
            self.workers.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.workers.wait(SLURM_GRACE_S)
        self.workers.kill()
        self.workers.wait()
        for process in self.known:
            with suppress(psutil.NoSuchProcess):  # psutil knows a process by its start, so a reused number is safe
                process.kill()
        deadline_s = time.monotonic() + DEATH_S
        while time.monotonic() < deadline_s and not all(map(_is_gone, self.known)):
            time.sleep(0.05)


def _is_gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def start_workers(
    nodes: list[str] | None, nproc_per_node: int, rdzv_id: str, port: int, train_arguments: list[str], log_folder: Path
) -> subprocess.Popen:
    """Start `python -m train` with `train_arguments` on every rank of these nodes, in a process group of its own.

    nodes: names within this Slurm job, or None for this machine. What the process prints goes to
    log_folder/console.log, the output of each rank to log_folder/<node>/. The exit status is 0 when every rank's was 0.
    """
    log_folder.mkdir(parents=True, exist_ok=True)
    address = "localhost" if nodes is None else node_address(nodes[0])
    torchrun = [
        f"--nnodes={len(nodes or [''])}", f"--nproc-per-node={nproc_per_node}", "--max-restarts=0",
        "--rdzv-backend=static", f"--rdzv-endpoint={address}:{port}", f"--rdzv-id={rdzv_id}", "--tee=3",
    ]  # fmt: skip
    program = ["-m", "train", *train_arguments]
    if nodes is None:
        here = ["--node-rank=0", f"--log-dir={log_folder / 'local'}"]
        command = [sys.executable, "-m", "torch.distributed.run", *torchrun, *here, *program]
    else:
        join = [sys.executable, "-m", "train.supervise.attempt", ",".join(nodes), str(log_folder)]
        command = [*srun(nodes), "--kill-on-bad-exit=1", *join, *torchrun, *program]
    env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    env.setdefault("OMP_NUM_THREADS", "1")
    with open(log_folder / "console.log", "ab") as log:
        return subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )


def srun(nodes: list[str]) -> list[str]:
    """srun with one task on each of these nodes, which has all CPUs and GPUs of its node, beside other steps."""
    count = len(nodes)
    return [
        "srun", f"--nodelist={','.join(nodes)}", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1",
        "--overlap", "--cpu-bind=none",
    ]  # fmt: skip


def node_address(node: str) -> str:
    """The address under which Slurm itself reaches a node; its name where Slurm has none."""
    command = ["scontrol", "show", "node", "-o", node]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SCONTROL_TIMEOUT_S)
    if done.returncode:
        raise OSError(f"{' '.join(command)} failed with exit status {done.returncode}: {done.stderr.strip()}")
    found = re.search(r"\bNodeAddr=(\S+)", done.stdout)
    return found[1] if found else node


def main() -> None:
    """`python -m train.supervise.attempt NAMES LOGS ...` on a node: become torchrun, ranked by its place in NAMES."""
    names, log_folder, *arguments = sys.argv[1:]
    node = host_name()
    here = [f"--node-rank={names.split(',').index(node)}", f"--log-dir={Path(log_folder) / node}"]
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *here, *arguments])


if __name__ == "__main__":
    main()
