"""Start and end the processes of an attempt: one torchrun on this machine, or one per node through srun."""

from __future__ import annotations

import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from records.files import host_name

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
# environment variable: resilience.numa_binding = false
NO_NUMA_BINDING = "LANEFORMER_NO_NUMA_BINDING"
NUMA_TRIAL_S = 120
SCONTROL_TIMEOUT_S = 60
# torchrun gives its workers 30 s between SIGTERM and SIGKILL, and Slurm gives torchrun KillWait, 30
# s by default
SLURM_GRACE_S = 90.0


def hold_port() -> socket.socket:
    """Bind a socket to a free port, and do not listen."""
    # until it is closed, the kernel gives the port to nobody who asks for any, while a program with its number can
    # listen at it (SO_REUSEADDR, as servers set it)
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

    Args:
        nodes: names within this Slurm job, or None for this machine.
        log_folder: gets console.log of the process, and <node>/ with the output of each rank.

    Returns:
        The process, whose exit status is 0 when every rank's was 0.
    """
    log_folder.mkdir(parents=True, exist_ok=True)
    with hold_port() as holder:
        if nodes is None:
            endpoint = f"localhost:{holder.getsockname()[1]}"
            binds = NO_NUMA_BINDING not in more_env
            start = [
                *TORCHRUN,
                "--node-rank=0",
                f"--log-dir={log_folder / 'local'}",
                *(numa_binding(nproc_per_node, log_folder) if binds else []),
            ]
        else:
            endpoint = f"{find_node_address(nodes[0])}:{random.randrange(20_000, 30_000)}"
            join = ["-m", "train.supervise.workers", ",".join(nodes), str(log_folder)]
            start = [*srun(nodes), "--kill-on-bad-exit=1", sys.executable, *join]
        # port and id are new in every attempt: it cannot meet the remains of a broken one. Ranks count by the
        # node's position in the list, then by the position in the node
        torchrun = [
            f"--nnodes={len(nodes or [''])}",
            f"--nproc-per-node={nproc_per_node}",
            "--max-restarts=0",
            "--rdzv-backend=static",
            f"--rdzv-endpoint={endpoint}",
            "--tee=3",
            f"--rdzv-id={log_folder.parent.parent.name}-{os.getpid()}-{time.monotonic_ns()}",
        ]
        env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **more_env}
        env.setdefault("OMP_NUM_THREADS", "1")
        # its own default is the home folder, often NFS; by number, as in a container a uid may have no name
        env.setdefault("TRITON_CACHE_DIR", f"{tempfile.gettempdir()}/triton_{os.getuid()}")
        with open(log_folder / "console.log", "ab") as log:
            return subprocess.Popen(
                [*start, *torchrun, "-m", *program],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                # torchrun inherits the port, which its store then listens at
                pass_fds=[holder.fileno()],
            )


def numa_binding(nproc_per_node: int, log_folder: Path) -> list[str]:
    """Return torchrun's flag that keeps a rank beside its GPU, where it works."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    if (
        hidden
        or NO_NUMA_BINDING in os.environ
        or not NVIDIA_GPUS.is_dir()
        or not shutil.which("numactl")
    ):
        return []
    # it needs numactl, and fails without /sys/bus/pci or where a GPU admits one process: tried with no program
    flag = "--numa-binding=node"
    trial = ["--standalone", f"--nproc-per-node={nproc_per_node}", flag, "--no-python", "true"]
    command = [*TORCHRUN, *trial]
    with open(log_folder / "numa.log", "ab") as log, suppress(subprocess.TimeoutExpired):
        if not subprocess.run(command, stdout=log, stderr=log, timeout=NUMA_TRIAL_S).returncode:
            return [flag]
    print(
        f"NUMA binding does not work here, see {log_folder}/numa.log; ranks start without it. To skip the trial, set "
        "resilience.numa_binding = false",
        file=sys.stderr,
    )
    return []


def end_workers(process: subprocess.Popen, grace_s: float = SLURM_GRACE_S) -> None:
    """Terminate the workers, wait for all nodes' tasks, then kill."""
    if process.poll() is None and grace_s:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    process.kill()
    process.wait()


def srun(nodes: list[str]) -> list[str]:
    """Return the srun command of one task on each node, which has all of it."""
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


def find_node_address(node: str) -> str:
    command = ["scontrol", "show", "node", "-o", node]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=SCONTROL_TIMEOUT_S)
    if answer.returncode:
        raise OSError(
            f"{' '.join(command)} failed with exit status {answer.returncode}: {answer.stderr.strip()}"
        )
    address = re.search(r"\bNodeAddr=(\S+)", answer.stdout)
    return address[1] if address else node


def main() -> None:
    """Become the torchrun of a node: `python -m train.supervise.workers NAMES LOGS ...`."""
    names, log_folder, *arguments = sys.argv[1:]
    node = host_name()
    logs = Path(log_folder) / node
    logs.mkdir(parents=True, exist_ok=True)
    (count,) = (
        int(flag.partition("=")[2]) for flag in arguments if flag.startswith("--nproc-per-node=")
    )
    node_flags = [
        f"--node-rank={names.split(',').index(node)}",
        f"--log-dir={logs}",
        *numa_binding(count, logs),
    ]
    os.execv(sys.executable, [*TORCHRUN, *node_flags, *arguments])


if __name__ == "__main__":
    main()
