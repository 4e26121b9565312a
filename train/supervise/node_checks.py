"""The pre-flight checks of one node; a JSON line reports the end of each.

`train.supervise.preflight` runs them in a process of their own: a wedged driver or a dead file system
blocks inside a system call, where no timer of the same process helps. A check raises with the problem, or
returns facts to keep.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from data_mixtures import shards
from data_mixtures.mixture import Mixture, read_lock
from laneformer import LaneformerConfig
from records.checkpoints import BYTES_PER_PARAMETER
from records.files import host_name
from records.job import read_job

from . import node_settings

GIB = 1 << 30
SCRATCH_GIB = 1.0  # compile caches
SHARED_MEMORY = Path("/dev/shm")
MATMUL_SIZE = 4096
FREE_GPU_MEMORY = 0.95  # less: another process still holds memory
READ_BYTES = 4096


class NodeChecks:
    """The checks of one node. `needs` holds gpus, and free_disk_gib or None for two checkpoints' worth."""

    def __init__(self, train_arguments: list[str], needs: dict[str, Any]):
        self.job = read_job(train_arguments)
        self.count: int = needs["gpus"]
        self.free_disk_gib: float | None = needs["free_disk_gib"]

    def gpus(self) -> dict[str, Any]:
        found = torch.cuda.device_count()
        if found != self.count and (self.count or found):
            raise ValueError(f"{found} GPUs where {self.count} are needed")
        return {"found": found, "kind": torch.cuda.get_device_name(0) if found else "cpu"}

    def memory(self) -> dict[str, Any]:
        for gpu in range(self.count):
            free_bytes, total_bytes = torch.cuda.mem_get_info(gpu)
            if free_bytes < FREE_GPU_MEMORY * total_bytes:
                raise ValueError(
                    f"GPU {gpu} has {free_bytes / GIB:.1f} of {total_bytes / GIB:.1f} GiB free; is an old process left?"
                )
        return {"available_gib": round(psutil.virtual_memory().available / GIB, 1)}

    def settings(self) -> dict[str, Any]:
        """Names, limits and folders that would fail the job late: train.supervise.node_settings."""
        nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
        pinned = self.job.checkpoint.async_mode == "async_with_pinned_mem"
        return (
            node_settings.names(os.environ, nodes)
            | node_settings.locked(pinned, self.count, nodes)
            | node_settings.caches(os.environ)
        )

    def matmul(self) -> dict[str, Any]:
        """The same product on every device: its time, and that it is exactly right (small
        integers are, in float32).
        """
        size = MATMUL_SIZE if self.count else 256
        slowest_s = 0.0
        for device in [torch.device("cuda", i) for i in range(self.count)] or [torch.device("cpu")]:
            ones = torch.ones(size, size, device=device)
            for repeat in range(2):  # the first also loads the kernels
                started = time.perf_counter()
                product = ones @ ones
                wrong = int((product != size).sum().item())
                if wrong:
                    raise ValueError(f"{device}: {wrong} of {size * size} elements of a product are wrong")
                slowest_s = max(slowest_s, time.perf_counter() - started) if repeat else slowest_s
        return {"matmul_s": slowest_s}

    def collective(self) -> dict[str, Any]:
        """An all-reduce among the node's GPUs, one process each, as in training."""
        with tempfile.TemporaryDirectory() as folder:
            meeting = f"file://{folder}/rendezvous"
            if self.count:
                mp.spawn(all_reduce, (self.count, meeting, "nccl"), nprocs=self.count)
            else:
                all_reduce(0, 1, meeting, "gloo")
        return {}

    def mixture(self) -> dict[str, Any]:
        """Every shard opens and its first bytes arrive; one of them, another on each node,
        has its manifest's hash.
        """
        lock_path = Path(self.job.mixture.lock)
        Mixture.open(lock_path)
        files = []
        for source in read_lock(lock_path)["sources"]:
            folder = lock_path.parent / source["name"]
            entries = shards.read_manifest(folder)["shards"]
            files += [(folder / entry["name"], entry["sha256"]) for entry in entries]
        for path, _ in files:
            with open(path, "rb") as file:
                if not file.read(READ_BYTES):
                    raise ValueError(f"{path} is empty")
        path, sha256 = files[int(hashlib.sha256(host_name().encode()).hexdigest(), 16) % len(files)]
        with open(path, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                raise ValueError(f"{path} is not what its manifest says: another sha256")
        return {"shards": len(files), "hashed": str(path)}

    def disk(self) -> dict[str, Any]:
        """Room for two checkpoints where the run is written, for caches, and for the state
        that a save stages.
        """
        run = self.job.run
        run.mkdir(parents=True, exist_ok=True)
        parameters = LaneformerConfig.from_flavor(self.job.model.flavor).parameter_count()["total"]
        checkpoint_gib = BYTES_PER_PARAMETER * parameters / GIB
        needed_gib = {run: self.free_disk_gib if self.free_disk_gib is not None else 2 * checkpoint_gib}
        needed_gib[Path(tempfile.gettempdir())] = SCRATCH_GIB
        if (
            self.job.checkpoint.async_mode == "async_with_pinned_mem"
        ):  # containers often have 64 MB, and then SIGBUS
            shards = self.job.parallelism.data_parallel_shard_degree
            needed_gib[SHARED_MEMORY] = checkpoint_gib * (
                self.count / shards if shards > 0 and self.count else 1
            )
        free: dict[str, Any] = {}
        for path, gib in needed_gib.items():
            free[str(path)] = round(shutil.disk_usage(path).free / GIB, 1)
            if free[str(path)] < gib:
                remedy = (
                    '; enlarge it, or set checkpoint.async_mode = "async"' if path == SHARED_MEMORY else ""
                )
                raise ValueError(f"{path} has {free[str(path)]} GiB free where {gib:.1f} are needed{remedy}")
        with tempfile.TemporaryFile(dir=run) as file:
            file.write(b"written by preflight")
        return {"free_gib": free}


def all_reduce(rank: int, ranks: int, meeting: str, backend: str) -> None:
    """One process of the collective: sum the ranks' numbers. Raises ValueError for a wrong sum."""
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=ranks)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    values = torch.full((1 << 20,), float(rank + 1), device=device)
    dist.all_reduce(values)
    expected = ranks * (ranks + 1) / 2
    if not bool((values == expected).all()):
        raise ValueError(
            f"all-reduce over {ranks} ranks gave {values.unique().tolist()} where {expected} is right"
        )
    dist.destroy_process_group()


def main() -> None:
    """Run the checks named in the first argument until one fails.

    The reports go to the original stdout, one JSON object a line.
    """
    names, needs, *train_arguments = sys.argv[1:]
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no report

    node = NodeChecks(train_arguments, json.loads(needs))
    for name in names.split(","):
        started = time.perf_counter()
        try:
            facts = getattr(node, name)()
            facts["seconds"] = round(time.perf_counter() - started, 3)
        except (Exception, SystemExit) as problem:  # any failure disqualifies the node, and must be named
            facts = {"error": f"{type(problem).__name__}: {problem}"}
        print(json.dumps(facts), file=reports, flush=True)
        if "error" in facts:
            return


if __name__ == "__main__":
    main()
