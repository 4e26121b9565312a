"""train.supervise.network with planted faults: every process is a node. Rank SLOW_RANK takes SLOW_S; ranks meet through
the file MEET, as in networks of their own; nobody tries sockets if SOCKETS is 0.
"""

from __future__ import annotations

import os
import time

import torch.distributed as dist

from train.supervise import connections, network

exchange = network.exchange


def slow_exchange(*arguments: object) -> float:
    time.sleep(float(os.environ["SLOW_S"]) * (os.environ["RANK"] == os.environ["SLOW_RANK"]))
    return exchange(*arguments)  # type: ignore[arg-type]


def meet() -> tuple[dist.Store, int, int]:
    ranks = int(os.environ["WORLD_SIZE"])
    return dist.FileStore(os.environ["MEET"], ranks), int(os.environ["RANK"]), ranks


if __name__ == "__main__":
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    if "SLOW_S" in os.environ:
        network.exchange = slow_exchange
    if "MEET" in os.environ:
        network.meet, network.TIMEOUT_S = meet, 5
    if os.environ.get("SOCKETS") == "0":
        connections.unreached = lambda place: ""
    network.main()
