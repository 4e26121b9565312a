"""Starts the workers of one attempt: torchrun on this machine, or one torchrun per node through srun.

Rank = (position of the node in the list, position in the node), whatever order Slurm gives its tasks: every task looks
up its own name (`python -m train.supervise.nodes NAMES ...` becomes torchrun). The first node in the list hosts the
rendezvous. An attempt has a port and an id of its own, so it cannot meet the remains of a broken one, and torchrun
itself restarts nothing.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from records.files import host_name

SCONTROL_TIMEOUT_S = 60


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
        join = [sys.executable, "-m", "train.supervise.nodes", ",".join(nodes), str(log_folder)]
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
    found = re.search(r"\bNodeAddr=(\S+)", _scontrol("show", "node", "-o", node))
    return found[1] if found else node


def _scontrol(*arguments: str) -> str:
    command = ["scontrol", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SCONTROL_TIMEOUT_S)
    if done.returncode:
        raise OSError(f"{' '.join(command)} failed with exit status {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def main() -> None:
    """On a node: become torchrun with the node's place in the list as its rank."""
    names, log_folder, *arguments = sys.argv[1:]
    node = host_name()
    here = [f"--node-rank={names.split(',').index(node)}", f"--log-dir={Path(log_folder) / node}"]
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *here, *arguments])


if __name__ == "__main__":
    main()
