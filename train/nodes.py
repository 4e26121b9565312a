"""How the workers of one attempt are started: torchrun with a rendezvous of its own, which itself restarts nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def start_workers(
    nodes: list[str] | None, nproc_per_node: int, rdzv_id: str, port: int, train_arguments: list[str], log_folder: Path
) -> subprocess.Popen:
    """Start `python -m train` with `train_arguments` on this machine, in a process group of its own.

    What the processes print goes to log_folder/console.log. Raises ValueError for nodes: only this machine is known.
    """
    if nodes is not None:
        raise ValueError(f"nodes = {nodes}: only workers on this machine can be started; leave out --nodes")
    log_folder.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--node-rank=0",
        f"--nproc-per-node={nproc_per_node}", "--max-restarts=0", "--rdzv-backend=static",
        f"--rdzv-endpoint=localhost:{port}", f"--rdzv-id={rdzv_id}", "-m", "train", *train_arguments,
    ]  # fmt: skip
    env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    env.setdefault("OMP_NUM_THREADS", "1")
    with open(log_folder / "console.log", "ab") as log:
        return subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
