"""The network between nodes: whether a job's groups come about, then bandwidth and latency of every GPU to the same
GPU of other nodes.

    torchrun ... -m train.supervise.network OUT.json

All ranks meet first: what is late because imports take long on a cold file system is no problem of the network. OUT
then holds one of `lost` (who does not reach whom: train.supervise.connections), `problem` (gloo or NCCL fails or hangs
between nodes that do) and `rows`, the measurement. In its rounds each node exchanges with another one, all pairs at
once, as in training. A node is slow if even its best partner is reached slowly: then it is the node, not the partner.
`train.supervise.preflight` starts this and judges.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from records.files import write_atomically

from . import connections

MEET_S = 240  # until all ranks have started
ROUNDS = 4  # partners of a node
BYTES = {"nccl": 256 << 20, "gloo": 4 << 20}  # of an exchange whose bandwidth is measured, each way
TIMEOUT_S = 60


def partner(node: int, turn: int, nodes: int) -> int | None:
    """Whom a node meets in a round, as in a tournament; None: nobody, in one round of an odd number of nodes."""
    even = nodes + nodes % 2
    if node == even - 1:
        other = turn * (even // 2) % (even - 1)
    else:
        other = (turn - node) % (even - 1)
        other = even - 1 if other == node else other
    return other if other < nodes else None


def exchange(peer: int, sent: torch.Tensor, received: torch.Tensor) -> float:
    """Send and receive at once; returns seconds."""
    started = time.perf_counter()
    pair = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
    for request in dist.batch_isend_irecv(pair):
        request.wait()
    if sent.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def measure(peer: int, size_bytes: int, repeats: int, device: torch.device) -> float:
    """Median seconds of an exchange, after one that connects."""
    sent, received = (torch.zeros(size_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    return statistics.median([exchange(peer, sent, received) for _ in range(repeats + 1)][1:])


def meet() -> tuple[dist.Store, int, int]:
    """(torchrun's store, this rank, number of ranks), when all are here."""
    store, rank, ranks = next(dist.rendezvous("env://", timeout=timedelta(seconds=MEET_S)))
    gather(store, "here", ranks)
    return store, rank, ranks


def gather(store: dist.Store, what: str, ranks: int) -> None:
    """Wait for all ranks."""
    if store.add(f"{what}, ranks", 1) == ranks:
        store.set(what, "")
    store.wait([what])


@contextmanager
def necessary(backend: str, store: dist.Store, rank: int, ranks: int, out: Path) -> Iterator[None]:
    """What fails inside would fail in the job: OUT says so, in the words of the rank that fails first.

    What hangs inside, or ends the process, leaves what rank 0 says before.
    """
    if rank == 0:
        write_atomically(out, json.dumps({"problem": connections.problem(backend, "no answer")}))
    gather(store, f"{backend} begins", ranks)
    try:
        yield
    except Exception as error:  # of whatever kind: the job's own first group would meet it
        words = connections.problem(backend, str(error))
        if store.compare_set(f"{backend} fails", "", words).decode() == words:
            write_atomically(out, json.dumps({"problem": words}))
        os._exit(0)  # without waiting for what the others cannot say


def groups(store: dist.Store, rank: int, ranks: int, out: Path, device: torch.device) -> None:
    """Make a job's groups, and count over each."""
    backends = {"cpu": "gloo", **({"cuda": "nccl"} if device.type == "cuda" else {})}
    for kind, backend in backends.items():
        with necessary(backend, store, rank, ranks, out):
            if kind == "cpu":
                both = ",".join(f"{kind}:{backend}" for kind, backend in backends.items())
                own, limit = dist.PrefixStore("groups", store), timedelta(seconds=TIMEOUT_S)
                dist.init_process_group(both, store=own, rank=rank, world_size=ranks, timeout=limit)
            count = torch.ones(1, device=device if kind == "cuda" else "cpu")
            dist.all_reduce(count)
            if int(count) != ranks:
                raise ValueError(f"it counts {int(count)} of {ranks} ranks")


def rates(rank: int, local: int, nodes: int, device: torch.device) -> list[dict[str, Any]]:
    """What this rank measures to its partners of other nodes."""
    size_bytes, found = BYTES["nccl" if device.type == "cuda" else "gloo"], []
    for turn in range(min(ROUNDS, nodes - 1 + nodes % 2)):
        dist.all_reduce(torch.zeros(1, device=device))  # rounds do not overlap
        other = partner(rank // local, turn, nodes)
        if other is not None:
            peer = other * local + rank % local
            rate = size_bytes / measure(peer, size_bytes, 5, device)
            latency_s = measure(peer, 1, 20, device)
            found.append({"rank": rank, "peer": peer, "latency_s": latency_s, "bytes_per_s": rate})
    return found


def main() -> None:
    out, local = Path(sys.argv[1]), int(os.environ["LOCAL_WORLD_SIZE"])
    store, rank, ranks = meet()
    nodes = ranks // local
    if nodes > 1:
        if rank % local == 0:
            connections.connect(store, rank // local, nodes)
        if any(lost := connections.lost(store, nodes)):
            if rank == 0:
                write_atomically(out, json.dumps({"lost": lost}))
            gather(store, "lost is written", ranks)
            return
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank % local)
        torch.cuda.set_device(device)
    groups(store, rank, ranks, out, device)
    everyone: list[list[dict[str, Any]]] = [[] for _ in range(ranks)]
    dist.all_gather_object(everyone, rates(rank, local, nodes, device))
    if rank == 0:
        write_atomically(out, json.dumps({"rows": [row for rows in everyone for row in rows]}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
