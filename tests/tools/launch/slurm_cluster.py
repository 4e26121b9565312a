"""Run a real Slurm of three virtual nodes on this machine, in one temporary folder."""

from __future__ import annotations

import getpass
import os
import random
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
NODES = ("n1", "n2", "n3")
# short times instead of a real cluster's minutes: a dead node is given up after 10 s, a requeued
# job starts after 5 s
CONFIG = """
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={control_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
TaskProlog={folder}/prolog.sh
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=2
KillWait=5
SlurmdTimeout=10
MessageTimeout=5
TCPTimeout=2
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
{nodes}
PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
# what a task finds on a node that make_bad named: eight GPUs are asked for where there are none
PROLOG = """#!/bin/sh
[ ! -f {folder}/bad-$SLURMD_NODENAME ] || echo export SLURM_GPUS_PER_NODE=8
"""


def missing() -> list[str]:
    """Return the programs of Slurm and munge that this machine lacks."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    return [name for name in DAEMONS if not shutil.which(name, path=path)]


class SlurmCluster:
    """`with SlurmCluster(folder) as cluster:` leaves no process behind, whatever happens inside."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "PYTHON"))}
        self.env |= {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{os.environ['PATH']}:/usr/sbin",
        }
        # the nodes are one machine, whose name may be a loopback address
        self.env["GLOO_SOCKET_IFNAME"] = "lo"
        # in the foreground as children, so that their own process ids end them
        self.daemons: dict[str, subprocess.Popen] = {}

    def __enter__(self) -> SlurmCluster:
        try:
            self._configure()
            socket_path = self.folder / "munge.socket"
            files = [
                f"--{name}-file={self.folder}/munge.{name}"
                for name in ("key", "pid", "log", "seed")
            ]
            self._start(
                "munged", "munged", "--foreground", "--force", f"--socket={socket_path}", *files
            )
            wait_for(socket_path.exists, "munged", 20)
            self._start("slurmctld", "slurmctld", "-D", "-c")
            for node in NODES:
                self.start_node(node)
            wait_for(
                lambda: self.node_states() == dict.fromkeys(NODES, "idle"), "three idle nodes", 60
            )
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for daemon in self.daemons.values():
            daemon.kill()
            daemon.wait(timeout=30)

    def _configure(self) -> None:
        ports = free_ports(1 + len(NODES))
        nodes = "\n".join(
            f"NodeName={node} NodeHostname=localhost Port={port} CPUs=1 RealMemory=1000 State=UNKNOWN"
            for node, port in zip(NODES, ports[1:], strict=True)
        )
        text = CONFIG.format(
            folder=self.folder, control_port=ports[0], user=getpass.getuser(), nodes=nodes
        )
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "state").mkdir()
        prolog = self.folder / "prolog.sh"
        prolog.write_text(PROLOG.format(folder=self.folder))
        prolog.chmod(0o755)
        # munged wants a folder that every user can enter, for its socket
        self.folder.chmod(0o755)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)

    def _start(self, name: str, *command: str) -> None:
        with open(self.folder / f"{name}.out", "ab") as log:
            # not even a killed pytest leaves it behind
            wrapper = ("setpriv", "--pdeathsig", "KILL", *command)
            self.daemons[name] = subprocess.Popen(
                wrapper, env=self.env, stdout=log, stderr=log, start_new_session=True
            )

    def start_node(self, node: str) -> None:
        (self.folder / f"spool-{node}").mkdir(exist_ok=True)
        self._start(node, "slurmd", "-D", "-N", node)

    def lose_node(self, node: str) -> None:
        """Kill a node's daemon and all that it started, as a power cut would."""
        daemon = self.daemons.pop(node)
        daemon.kill()

        def place(process: psutil.Process) -> tuple[int, int]:
            first = {"slurmstepd": 0, "srun": 1}.get(process.name(), 2)
            return first, -process.pid if first == 1 else process.pid

        # first those that could still report a death: slurmstepd reports its tasks, srun's child
        # cancels the step when srun dies, and the batch script exits
        for process in sorted(self.processes(node), key=place):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        daemon.wait(timeout=30)

    def make_bad(self, node: str) -> None:
        """Make this node fail the pre-flight of jobs from now on."""
        (self.folder / f"bad-{node}").touch()

    def processes(self, node: str | None = None) -> list[psutil.Process]:
        """Return processes of this cluster that are not our children; of one node, or of all."""
        # steps and ranks have SLURM_CONF in their environment, which points into the folder
        ours = {daemon.pid for daemon in self.daemons.values()}
        processes = []
        for process in psutil.process_iter():
            try:
                env = process.environ()
                # slurmstepd writes its title over its environment; it keeps the log of its node
                # open
                logs = process.open_files() if process.name().startswith("slurmstepd") else []
            except (psutil.Error, OSError):
                continue
            paths = {log.path for log in logs}
            names = [name for name in NODES if str(self.folder / f"slurmd-{name}.log") in paths]
            if env.get("SLURM_CONF") == self.env["SLURM_CONF"] and process.pid not in ours:
                names.append(env.get("SLURMD_NODENAME", ""))
            if node in names or (node is None and names):
                processes.append(process)
        return processes

    def node_states(self) -> dict[str, str]:
        lines = self.command("sinfo", "-h", "-N", "-o", "%N %t", check=False).split("\n")
        return dict(line.split() for line in lines if line)

    def job(self, job_id: int) -> dict[str, str]:
        """Return `scontrol show job` by field."""
        return dict(
            re.findall(r"(\S+?)=(\S*)", self.command("scontrol", "show", "job", "-o", str(job_id)))
        )

    def signal(self, job_id: int, name: str) -> bool:
        """Signal a job's batch script; False while Slurm is between two states of the job."""
        command = ("scancel", f"--signal={name}", "--batch", str(job_id))
        return (
            subprocess.run(command, env=self.env, capture_output=True, timeout=300).returncode == 0
        )

    def command(self, *command: str, check: bool = True, cwd: Path | None = None) -> str:
        outcome = subprocess.run(
            command, env=self.env, cwd=cwd, capture_output=True, text=True, timeout=60
        )
        assert not check or outcome.returncode == 0, (
            f"{command}: {outcome.stdout[-2000:]}{outcome.stderr[-4000:]}"
        )
        return outcome.stdout


def free_ports(count: int) -> list[int]:
    # below the range from which the system takes ports for connections
    ports: list[int] = []
    for port in random.sample(range(20_000, 32_000), 500):
        with socket.socket() as holder, suppress(OSError):
            holder.bind(("localhost", port))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise OSError(f"{count} free ports are not to be had")


def wait_for(condition: Callable[[], object], what: str, timeout_s: float) -> None:
    """Poll until the condition holds; AssertionError with `what` after timeout_s."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {what}"
        time.sleep(0.2)
