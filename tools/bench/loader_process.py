"""The process of one loader of `tools.bench loader`: answers what to measure until stdin ends."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from tools.bench.harness import Result, serve
from tools.bench.loader_baselines import BATCH, LOADERS, Loader
from train.job_config import patch_torch_for_cpu


def cpu_rate(read: Callable[[], int], seconds: float) -> float:
    """Tokens per second of CPU time of this process; `read` returns how many it has read."""
    tokens, started, wall = 0, time.process_time(), time.perf_counter()
    while time.perf_counter() - wall < seconds:
        tokens += read()
    return tokens / (time.process_time() - started)


def speed(loader: Loader, seconds: float) -> Result:
    """Tokens per second of CPU time on one core, all threads together."""
    batches = loader.batches()
    for _ in islice(batches, 20):
        pass
    return {"tokens_per_s": cpu_rate(lambda: len(next(batches)[0]) * loader.seq_len, seconds)}


def first_pass(loader: Loader, sequences: int) -> Result:
    """Tokens per second of CPU time while everything is read for the first time, hence verified."""
    batches, started, count = loader.batches(), time.process_time(), sequences // BATCH
    for _ in islice(batches, count):
        pass
    return {"first_pass_tokens_per_s": count * BATCH * loader.seq_len / (time.process_time() - started)}


def stalls(loader: Loader, steps: int) -> Result:
    """How long a training step of 20 ms, which leaves the interpreter idle, waits for its
    batch; on all cores.
    """
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    batches, waits = loader.batches(workers=1), []
    for _ in range(steps + 10):
        time.sleep(0.02)
        started = time.perf_counter()
        next(batches)
        waits.append(time.perf_counter() - started)
    p50, p99 = np.quantile(waits[10:], (0.5, 0.99)).tolist()
    return {"stall_p50_s": p50, "stall_p99_s": p99}


def deviation(loader: Loader, sequences: int) -> Result:
    """Largest |sequences of a source - share * sequences| over all prefixes up to 1,000
    and up to `sequences`.
    """
    batches = islice(loader.batches(), -(-sequences // BATCH))
    read = [sources for _, sources in batches if sources is not None]
    return {"deviation": worst_deviation(np.concatenate(read)[:sequences], loader.shares) if read else None}


def worst_deviation(sources: np.ndarray, shares: list[float]) -> dict[str, float]:
    prefixes = np.arange(1, len(sources) + 1)
    apart = np.array(
        [np.abs(np.cumsum(sources == i) - share * prefixes) for i, share in enumerate(shares)]
    ).max(0)
    return {str(limit): float(apart[:limit].max()) for limit in (1000, 10_000) if limit <= len(sources)}


def resume(loader: Loader, sequences: list[int]) -> Result:
    """Seconds from nothing opened to the first batch at each sequence; where that is impossible, the reason."""
    taken: Result = {}
    next(loader.batches())  # imports, and what the first use writes to a cache
    for sequence in sequences:
        try:
            state = loader.state_at(sequence)
        except LookupError as reason:
            taken[str(sequence)] = str(reason)
            continue
        started = time.perf_counter()
        next(loader.batches(state))
        taken[str(sequence)] = time.perf_counter() - started
    return {"resume_s": taken}


def prepare(loader: Loader, _: Any) -> Result:
    """What `loader` wrote when it was made: the data in the form that it reads."""
    return {}


def start(loader: Loader, _: Any) -> Result:
    """Seconds from the start of this process to the first batch, imports of all
    loaders included; then memory.
    """
    batches = loader.batches()
    next(batches)
    taken = time.time() - psutil.Process().create_time()
    for _ in islice(batches, 100):
        pass
    status = Path("/proc/self/status").read_text().split()
    return {"start_s": taken, "memory_bytes": 1024 * int(status[status.index("RssAnon:") + 1])}


MEASURES: dict[str, Callable[..., Result]] = {
    each.__name__: each for each in (prepare, start, speed, first_pass, stalls, deviation, resume)
}


def serve_loader(name: str, data: Path) -> None:
    """The process of one loader: answers what to measure until stdin ends."""
    torch.set_num_threads(1)
    patch_torch_for_cpu()
    loader = functools.cache(lambda: LOADERS[name](data))

    def answer(do: str, argument: Any) -> Result:
        os.sched_setaffinity(0, {0})
        return MEASURES[do](loader(), argument)

    serve(answer)


if __name__ == "__main__":
    serve_loader(sys.argv[1], Path(sys.argv[2]))
