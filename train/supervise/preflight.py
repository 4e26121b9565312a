"""Check before every attempt that each node is fit to train, and that the chosen ones reach each other.

    python -m train.supervise.preflight [--gpus N] [--free-disk-gib X] --job.config_file X.toml
                                        [--section.key value ...]

prints one JSON line for the node it runs on; exit status 0 if the node is good.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import tyro

from records.checkpoints import BYTES_PER_PARAMETER
from records.files import host_name
from records.job import JobSections, read_job

from .workers import end_workers, srun, start_workers

GIB = 1 << 30
# of all checks of a node; torch's import takes minutes on a cold file system
NODE_DEADLINE_S = 900.0
# until all ranks of an exchange have started
MEET_S = 240
# of gloo and of NCCL, once all ranks are there
TIMEOUT_S = 60
EXCHANGE_DEADLINE_S = MEET_S + 2 * TIMEOUT_S + 120
# times the median of the nodes' products: such a node would slow down all others
SLOW_NODE = 1.5
# share; with less, another process still holds memory
FREE_GPU_MEMORY = 0.95
# room for compile caches
SCRATCH_GIB = 1.0
SHARED_MEMORY = Path("/dev/shm")
# the argument with which every rank runs this module
EXCHANGE = "exchange"
SETTINGS = {
    "gloo": "export GLOO_SOCKET_IFNAME, the name of the interface by which they reach each other, "
    "check that their names do not mean 127.0.0.1, and that no firewall is between them",
    "nccl": "export NCCL_SOCKET_IFNAME and NCCL_IB_HCA, the interface and the InfiniBand adapters by "
    "which they reach each other, or NCCL_IB_DISABLE=1 to go without InfiniBand; NCCL_DEBUG=INFO says "
    "what it has chosen",
}


@dataclass(frozen=True)
class Needs:
    """What the node must have, besides what the job file says."""

    gpus: int
    """GPUs that the node must have"""
    free_disk_gib: float | None = None
    """Free space that the run folder needs, in GiB; default: two checkpoints"""


# --- the supervisor's side: no torch


def check_nodes(
    candidates: list[str], train_arguments: list[str]
) -> tuple[list[str], dict[str, str]]:
    """Check every candidate; return the good ones, and the reason of every bad one."""
    # an srun of its own for each, so that a dead node can be told from the others
    with ThreadPoolExecutor(max(1, len(candidates))) as pool:
        answers = list(pool.map(lambda node: ask_node(node, train_arguments), candidates))
    records = dict(zip(candidates, answers, strict=True))
    bad = {node: record["reason"] for node, record in records.items() if not record["ok"]}
    seconds = {
        node: record["checks"]["matmul"]["matmul_s"]
        for node, record in records.items()
        if record["ok"] and record["gpus"]
    }
    if len(seconds) > 2:
        median_s = statistics.median(seconds.values())
        for node, took_s in seconds.items():
            if took_s > SLOW_NODE * median_s:
                bad[node] = f"matmul: {took_s:.4f} s where the median node needs {median_s:.4f} s"
    return [node for node in candidates if node not in bad], bad


def ask_node(node: str, arguments: list[str]) -> dict[str, Any]:
    """Return the node's own JSON line, or why there is none."""
    command = [*srun([node]), sys.executable, "-m", "train.supervise.preflight", *arguments]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=NODE_DEADLINE_S)
    except subprocess.TimeoutExpired as late:
        # a wedged driver or a dead file system blocks inside a system call, where no timer of the
        # same process helps: the check that was begun last is the one that hangs
        begun = re.findall(rb"^preflight: (\w+)", late.stderr or b"", re.MULTILINE)
        check = begun[-1].decode() if begun else "srun"
        return {"ok": False, "reason": f"{check}: no answer within {NODE_DEADLINE_S:.0f} s"}
    records = [line for line in answer.stdout.splitlines() if line.startswith('{"node"')]
    if records:
        return json.loads(records[-1])
    # srun reports its own failure on stderr, among warnings
    lines = answer.stderr.strip().splitlines() or ["nothing"]
    lines = [line for line in lines if "error" in line.lower()] or lines
    return {"ok": False, "reason": f"srun: exit status {answer.returncode}, said {lines[0]!r}"}


def find_exchange_problem(nodes: list[str], nproc_per_node: int, logs: Path) -> str:
    """Say why these nodes cannot train together; "" if they can."""
    program = ["train.supervise.preflight", EXCHANGE, str(logs)]
    # all ranks count themselves over gloo and NCCL, as a job's first groups do
    process = start_workers(nodes, nproc_per_node, program, logs, {})
    with suppress(subprocess.TimeoutExpired):
        process.wait(EXCHANGE_DEADLINE_S)
    end_workers(process)
    if (logs / "done").exists():
        return ""
    for backend in ("nccl", "gloo"):
        notes = sorted(logs.glob(f"{backend}-*"), key=lambda note: note.stat().st_mtime)
        if notes:
            words = [text for text in (note.read_text() for note in notes) if text]
            why = " ".join((words or ["no answer"])[0].split())[:300]
            return (
                f"{backend} does not connect these nodes ({why}); {SETTINGS[backend]}. See {logs}"
            )
    raise ValueError(
        f"no result within {EXCHANGE_DEADLINE_S} s, exit status {process.returncode}, see {logs}"
    )


# --- the node's side: each check returns facts, or raises with the problem


def check_gpus(job: JobSections, needs: Needs) -> dict[str, Any]:
    import torch

    gpus = torch.cuda.device_count()
    if gpus != needs.gpus:
        raise ValueError(f"{gpus} GPUs where {needs.gpus} are needed")
    return {"found": gpus, "kind": torch.cuda.get_device_name(0) if gpus else "cpu"}


def check_memory(job: JobSections, needs: Needs) -> dict[str, Any]:
    import torch

    for gpu in range(needs.gpus):
        free_bytes, total_bytes = torch.cuda.mem_get_info(gpu)
        if free_bytes < FREE_GPU_MEMORY * total_bytes:
            raise ValueError(
                f"GPU {gpu} has {free_bytes / GIB:.1f} of {total_bytes / GIB:.1f} GiB free; "
                "is an old process left?"
            )
    return {"available_gib": round(psutil.virtual_memory().available / GIB, 1)}


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def check_names(job: JobSections, needs: Needs) -> dict[str, Any]:
    """Check that other nodes reach this one where gloo listens."""
    families = (socket.AF_INET, socket.AF_INET6)
    addresses = {
        name: [entry.address for entry in entries if entry.family in families]
        for name, entries in psutil.net_if_addrs().items()
    }
    usable = sorted(name for name in addresses if not all(map(is_loopback, addresses[name])))
    mend = f"export GLOO_SOCKET_IFNAME, one of {', '.join(usable) or 'none: no interface has an address'}"
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    for name in filter(None, interfaces.split(",")):
        if not addresses.get(name):
            raise ValueError(
                f"GLOO_SOCKET_IFNAME = {interfaces}, but {name} has no address on this node; {mend}"
            )
    if interfaces or int(os.environ.get("SLURM_JOB_NUM_NODES", "1")) < 2:
        return {"interface": interfaces or "any"}
    host = socket.gethostname()
    try:
        bindings = [
            str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        ]
    except OSError as problem:
        raise ValueError(
            f"this node cannot look up its own name {host} ({problem}); {mend}"
        ) from None
    node_addresses = {address for listed in addresses.values() for address in listed}
    # gloo takes the first address of the name that it can bind, else 127.0.0.1
    bound = next(
        (address for address in bindings if address in node_addresses or is_loopback(address)),
        "127.0.0.1",
    )
    if is_loopback(bound):
        raise ValueError(
            f"{host} is {', '.join(bindings)} on this node, by which no other node reaches it; {mend}, "
            "or mend /etc/hosts"
        )
    return {"interface": bound}


def check_matmul(job: JobSections, needs: Needs) -> dict[str, Any]:
    """Check and time the same product on every device."""
    import torch

    # small integers are exact
    size = 4096 if needs.gpus else 256
    slowest_s = 0.0
    for device in [f"cuda:{gpu}" for gpu in range(needs.gpus)] or ["cpu"]:
        ones = torch.ones(size, size, device=device)
        # the first one also loads the kernels, so only the second is timed
        for repeat in range(2):
            started = time.perf_counter()
            wrong = int((ones @ ones != size).sum())
            if wrong:
                raise ValueError(
                    f"{device}: {wrong} of {size * size} elements of a product are wrong"
                )
            if repeat:
                slowest_s = max(slowest_s, time.perf_counter() - started)
    return {"matmul_s": slowest_s}


def check_collective(job: JobSections, needs: Needs) -> dict[str, Any]:
    """Let the node's GPUs count themselves, one process each, as in training."""
    import torch.multiprocessing as mp

    if needs.gpus:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(count_gpus, (needs.gpus, f"{folder}/store"), nprocs=needs.gpus)
    return {}


def count_gpus(rank: int, ranks: int, path: str) -> None:
    import torch.distributed as dist

    count_ranks("nccl", dist.FileStore(path, ranks), rank, ranks, rank)


def check_disk(job: JobSections, needs: Needs) -> dict[str, Any]:
    """Check that data open, and that there is room for checkpoints and caches."""
    from data_mixtures.mixture import Mixture
    from laneformer import LaneformerConfig

    Mixture.open(Path(job.mixture.lock))
    job.run.mkdir(parents=True, exist_ok=True)
    parameters = LaneformerConfig.from_flavor(job.model.flavor).parameter_count()["total"]
    checkpoint_gib = BYTES_PER_PARAMETER * parameters / GIB
    needed_gib = {job.run: 2 * checkpoint_gib, Path(tempfile.gettempdir()): SCRATCH_GIB}
    if needs.free_disk_gib is not None:
        needed_gib[job.run] = needs.free_disk_gib
    if job.checkpoint.async_mode == "async_with_pinned_mem":
        # containers often have 64 MB, and then SIGBUS
        shards = job.parallelism.data_parallel_shard_degree
        node_share = needs.gpus / shards if shards > 0 and needs.gpus else 1
        needed_gib[SHARED_MEMORY] = checkpoint_gib * node_share
    free = {str(path): round(shutil.disk_usage(path).free / GIB, 1) for path in needed_gib}
    for path, gib in needed_gib.items():
        if free[str(path)] < gib:
            mend = '; enlarge it, or set checkpoint.async_mode = "async"'
            raise ValueError(
                f"{path} has {free[str(path)]} GiB free where {gib:.1f} are needed"
                + (mend if path == SHARED_MEMORY else "")
            )
    with tempfile.TemporaryFile(dir=job.run) as file:
        file.write(b"written by preflight")
    return {"free_gib": free}


# cheap ones first, each relying on those before it
CHECKS = {
    "gpus": check_gpus,
    "memory": check_memory,
    "names": check_names,
    "matmul": check_matmul,
    "collective": check_collective,
    "disk": check_disk,
}


def check_node(train_arguments: list[str], needs: Needs) -> dict[str, Any]:
    job = read_job(train_arguments)
    facts: dict[str, Any] = {}
    reason = None
    for name, check in CHECKS.items():
        print(f"preflight: {name}", file=sys.stderr, flush=True)
        started = time.perf_counter()
        try:
            facts[name] = check(job, needs)
        except (Exception, SystemExit) as problem:
            # any failure disqualifies the node
            reason = f"{name}: {type(problem).__name__}: {problem}"
            break
        facts[name]["seconds"] = round(time.perf_counter() - started, 3)
    return {
        "node": host_name(),
        "ok": reason is None,
        "reason": reason,
        "gpus": needs.gpus,
        "checks": facts,
    }


# --- every rank's side


def count_ranks(backend: str, store: Any, rank: int, ranks: int, gpu: int) -> None:
    """Sum a one of every rank; ValueError for a wrong sum."""
    import torch
    import torch.distributed as dist

    if backend == "nccl":
        torch.cuda.set_device(gpu)
    limit = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)
    count = torch.ones(1 << 20, device="cuda" if backend == "nccl" else "cpu")
    dist.all_reduce(count)
    if not bool((count == ranks).all()):
        raise ValueError(f"an all-reduce counts {count.unique().tolist()} of {ranks} ranks")
    dist.destroy_process_group()


def exchange(folder: Path) -> None:
    """Count as one rank under torchrun; note in `folder` what begins and fails."""
    import torch
    import torch.distributed as dist

    store, rank, ranks = next(dist.rendezvous("env://", timeout=timedelta(seconds=MEET_S)))
    if store.add("ranks", 1) == ranks:
        store.set("all are here", "")
    # who is late because imports take long is no problem of the network
    store.wait(["all are here"])
    for backend in ["gloo", "nccl"] if torch.cuda.is_available() else ["gloo"]:
        note = folder / f"{backend}-{rank}"
        note.touch()
        try:
            # the keys of two groups in one store would collide
            backend_store = dist.PrefixStore(backend, store)
            count_ranks(backend, backend_store, rank, ranks, int(os.environ["LOCAL_RANK"]))
        except Exception as error:
            note.write_text(str(error))
            raise
    if rank == 0:
        (folder / "done").touch()


def main() -> None:
    if sys.argv[1:2] == [EXCHANGE]:
        exchange(Path(sys.argv[2]))
        return
    # "8", or "h100:8"
    expected = os.environ.get("SLURM_GPUS_PER_NODE", "0").rpartition(":")[2]
    needs, train_arguments = tyro.cli(
        Needs,
        prog="python -m train.supervise.preflight",
        description="Is this node fit to train?",
        default=Needs(int(expected)),
        return_unknown_args=True,
    )
    record = check_node(train_arguments, needs)
    print(json.dumps(record), flush=True)
    sys.exit(0 if record["ok"] else 1)


if __name__ == "__main__":
    main()
