"""The network between nodes: bandwidth and latency of every GPU to the same GPU of other nodes.

    torchrun ... -m train.supervise.network OUT.json

In every round each node exchanges with another one, all pairs at once, as in training. A node is slow if
even its best partner is reached slowly: then it is the node, not the partner. `train.supervise.preflight`
starts this and judges.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from records.files import write_atomically

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


def gloo_problem() -> str:
    """Why the ranks cannot count over gloo, as they do at the start and at each save; "" if they can."""
    try:
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT_S))
        count = torch.ones(1)
        dist.all_reduce(count, group=group)
        assert int(count) == dist.get_world_size(), f"gloo counts {int(count)} ranks"
    except Exception as problem:  # of whatever kind: the job's own first group would meet it
        return (
            f"gloo does not connect these nodes ({' '.join(str(problem).split())[:200]}); export GLOO_SOCKET_IFNAME, "
            "the name of the interface by which they reach each other, and check that their names do not mean 127.0.0.1"
        )
    return ""


def main() -> None:
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    device = torch.device("cuda", rank % local) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=TIMEOUT_S))
    if problem := gloo_problem():
        if rank == 0:
            write_atomically(Path(sys.argv[1]), json.dumps(problem))
        os._exit(1)  # without waiting for what the others cannot say
    nodes, found = dist.get_world_size() // local, []
    for turn in range(min(ROUNDS, nodes - 1 + nodes % 2)):
        dist.all_reduce(torch.zeros(1, device=device))  # rounds do not overlap
        other = partner(rank // local, turn, nodes)
        if other is not None:
            peer = other * local + rank % local
            rate = BYTES[backend] / measure(peer, BYTES[backend], 5, device)
            latency_s = measure(peer, 1, 20, device)
            found.append({"rank": rank, "peer": peer, "latency_s": latency_s, "bytes_per_s": rate})
    everyone: list[list[dict]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, found)
    if rank == 0:
        write_atomically(Path(sys.argv[1]), json.dumps([row for rows in everyone for row in rows]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
