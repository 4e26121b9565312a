"""A loader of `tools.bench loader`, and what is measured of it in a process of its own."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq
import torch

from data_mixtures.mixture import read_lock
from tools.bench.harness import Result

BATCH = 8
EPOCH = 20_000  # samples, where a baseline asks for it
FOLDER = Path(sys.prefix)
Batches = Iterator[tuple[torch.Tensor, np.ndarray | None]]


class Loader:
    """Batches of the benchmark's data, and their figures: the methods that give a `Result`.

    What is read is in the folder `data`.
    """

    def __init__(self, data: Path):
        self.data = data
        lock = read_lock(data / "phase1.lock.json")
        self.seq_len: int = lock["seq_len"]
        self.names = [source["name"] for source in lock["sources"]]
        weights = [source["weight"] for source in lock["sources"]]
        self.shares = [weight / sum(weights) for weight in weights]

    def state_at(self, sequence: int) -> Any:
        """The state from which `batches` continues there; LookupError where that is impossible."""
        return sequence

    def batches(self, state: Any = 0, workers: int = 0) -> Batches:
        """Tokens int64 (BATCH, S) or (BATCH, S + 1), sources (BATCH,) or None, endlessly.

        workers: processes that read ahead, where the loader needs them for that.
        """
        raise NotImplementedError

    def prepare(self, _: Any) -> Result:
        """What was written when the loader was made: the data in the form that it reads."""
        return {}

    def start(self, _: Any) -> Result:
        """Seconds from the start of this process to the first batch, imports of all
        loaders included; then memory.
        """
        batches = self.batches()
        next(batches)
        taken = time.time() - psutil.Process().create_time()
        skip(batches, 100)
        status = Path("/proc/self/status").read_text().split()
        return {"start_s": taken, "memory_bytes": 1024 * int(status[status.index("RssAnon:") + 1])}

    def speed(self, seconds: float) -> Result:
        """Tokens per second of CPU time on one core, all threads together."""
        batches = self.batches()
        skip(batches, 20)
        return {"tokens_per_s": cpu_rate(lambda: len(next(batches)[0]) * self.seq_len, seconds)}

    def first_pass(self, sequences: int) -> Result:
        """Tokens per second of CPU time while everything is read for the first time, hence verified."""
        batches, started, count = self.batches(), time.process_time(), sequences // BATCH
        skip(batches, count)
        return {"first_pass_tokens_per_s": count * BATCH * self.seq_len / (time.process_time() - started)}

    def stalls(self, steps: int) -> Result:
        """How long a training step of 20 ms, which leaves the interpreter idle, waits for its
        batch; on all cores.
        """
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
        batches, waits = self.batches(workers=1), []
        for _ in range(steps + 10):
            time.sleep(0.02)
            started = time.perf_counter()
            next(batches)
            waits.append(time.perf_counter() - started)
        p50, p99 = np.quantile(waits[10:], (0.5, 0.99)).tolist()
        return {"stall_p50_s": p50, "stall_p99_s": p99}

    def deviation(self, sequences: int) -> Result:
        """Largest |sequences of a source - share * sequences| over all prefixes up to 1,000
        and up to `sequences`; empty where a loader does not say the sources.
        """
        batches = islice(self.batches(), -(-sequences // BATCH))
        read = [sources for _, sources in batches if sources is not None]
        return {"deviation": worst_deviation(np.concatenate(read)[:sequences], self.shares) if read else {}}

    def resume(self, sequences: list[int]) -> Result:
        """Seconds from nothing opened to the first batch at each sequence; where that is
        impossible, the reason.
        """
        taken: Result = {}
        next(self.batches())  # imports, and what the first use writes to a cache
        for sequence in sequences:
            try:
                state = self.state_at(sequence)
            except LookupError as reason:
                taken[str(sequence)] = str(reason)
                continue
            started = time.perf_counter()
            next(self.batches(state))
            taken[str(sequence)] = time.perf_counter() - started
        return {"resume_s": taken}


class Installed(Loader):
    """A loader in a folder beside the environment, without its dependencies, which reading tokens does not
    need.
    """

    name = ""

    def __init__(self, data: Path):
        super().__init__(data)
        sys.path.append(str(FOLDER / self.name))

    def tokens_of(self, source: str) -> np.ndarray:
        """All tokens of a source, uint16, as the shards have them."""
        rows = pq.read_table(self.data / f"{source}.parquet")["tokens"].combine_chunks()
        return rows.flatten().to_numpy().reshape(-1, self.seq_len + 1)


def skip(batches: Batches, count: int) -> None:
    for _ in islice(batches, count):
        pass


def cpu_rate(read: Callable[[], int], seconds: float) -> float:
    """Tokens per second of CPU time of this process; `read` returns how many it has read."""
    tokens, started, wall = 0, time.process_time(), time.perf_counter()
    while time.perf_counter() - wall < seconds:
        tokens += read()
    return tokens / (time.process_time() - started)


def worst_deviation(sources: np.ndarray, shares: list[float]) -> dict[str, float]:
    prefixes = np.arange(1, len(sources) + 1)
    apart = np.array([np.abs(np.cumsum(sources == i) - share * prefixes) for i, share in enumerate(shares)])
    return {str(limit): float(apart[:, :limit].max()) for limit in (1000, 10_000) if limit <= len(sources)}
