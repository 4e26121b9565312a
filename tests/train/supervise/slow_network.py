"""train.supervise.network with a planted fault: every process is a node, and rank SLOW_RANK takes its time."""

from __future__ import annotations

import os
import time

from train.supervise import network

exchange = network.exchange


def slow_exchange(*arguments: object) -> float:
    time.sleep(float(os.environ["SLOW_S"]) * (os.environ["RANK"] == os.environ["SLOW_RANK"]))
    return exchange(*arguments)  # type: ignore[arg-type]


if __name__ == "__main__":
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    network.exchange = slow_exchange
    network.main()
