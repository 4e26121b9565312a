"""Latency of one exchange between lanes, beside gloo's all-reduce of the same bytes.

Between two threads and between two processes, through the engine's own exchange (csrc/exchange.h).
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from multiprocessing.pool import ThreadPool
from typing import Any

import numpy as np

from laneformer.engine.machine import this_machine
from tools.bench.harness import Result

POOLS: dict[str, Any] = {"threads": ThreadPool, "processes": multiprocessing.get_context("spawn").Pool}


def compare(payloads: tuple[int, ...], rounds: int) -> list[Result]:
    """A row for each payload in bytes and each way: median and p99 in microseconds, or why it is missing."""
    rows = []
    for size in payloads:
        for name, times in WAYS.items():
            row: Result = {"bytes": size, "way": name}
            try:
                low, high = np.percentile(calmest(times(size // 4, rounds)), (50, 99)) * 1e6
                rows.append({**row, "p50_us": float(low), "p99_us": float(high)})
            except RuntimeError as error:
                rows.append({**row, "missing": str(error)})
    return rows


def calmest(seconds: np.ndarray) -> np.ndarray:
    """The fifth, after a warm-up, with the least median: another process may have taken a core for a while."""
    return min(np.array_split(seconds[len(seconds) // 10 :], 5), key=lambda part: float(np.median(part)))


def ours(place: str, to_and_fro: bool, floats: int, rounds: int) -> np.ndarray:
    """Seconds of one way, half of there and back; or of both at once, which is an all-reduce."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as file:
        return of_two_ranks(place, rank_of_ours, file.name, floats, rounds, to_and_fro) / (1 + to_and_fro)


def rank_of_ours(rank: int, path: str, floats: int, rounds: int, to_and_fro: bool) -> list[float]:
    from laneformer.engine.cpu import _core

    pin(rank)
    with open(path, "r+b") as file:
        return _core.time_exchange(file.fileno(), rank, floats, rounds, to_and_fro)


def pin(rank: int) -> None:
    """The calling thread stays on a core of its own: two ranks on one core would wait for the scheduler."""
    cpus = this_machine().one_cpu_a_core_first()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {cpus[rank % len(cpus)]})


def of_two_ranks(place: str, job: Callable[..., list[float]], *arguments: Any) -> np.ndarray:
    """What rank 0 returns; RuntimeError where a rank fails."""
    with POOLS[place](2) as pool:
        ranks = [pool.apply_async(job, (rank, *arguments)) for rank in (0, 1)]
        try:
            return np.array([rank.get(timeout=60) for rank in ranks])[0]
        except (OSError, multiprocessing.TimeoutError, ImportError) as error:
            raise RuntimeError(f"{type(error).__name__}: {error}") from None


def gloo(floats: int, rounds: int) -> np.ndarray:
    with tempfile.TemporaryDirectory() as folder:
        return of_two_ranks("processes", rank_of_gloo, f"{folder}/meet", floats, rounds)


def rank_of_gloo(rank: int, path: str, floats: int, rounds: int) -> list[float]:
    import torch
    from torch import distributed

    torch.set_num_threads(1)  # not pinned: its transport has a thread of its own
    distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    values, clock = torch.zeros(floats), [time.perf_counter()]
    for _ in range(rounds):
        distributed.all_reduce(values)
        clock.append(time.perf_counter())
    return np.diff(clock).tolist()


WAYS: dict[
    str, Callable[[int, int], np.ndarray]
] = {  # (floats, rounds) -> seconds of each; the first ones warm up
    "one way, threads": functools.partial(ours, "threads", True),
    "all-reduce, threads": functools.partial(ours, "threads", False),
    "one way, processes": functools.partial(ours, "processes", True),
    "all-reduce, processes": functools.partial(ours, "processes", False),
    "all-reduce, gloo, processes": gloo,
}
