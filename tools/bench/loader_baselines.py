"""The candidates of `tools.bench loader`, each in a process of its own: the same windows, batches of BATCH, int64.

A loader yields batches (tokens int64 (BATCH, S) or (BATCH, S + 1), sources (BATCH,) or None). The baselines are
unmodified; each reads already tokenized data in the form that its documentation asks for, in the faster of its ways.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
import types
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

from data_mixtures.mixture import Mixture, read_lock
from tools.bench.harness import Result, serve
from train.job_config import patch_torch_for_cpu

BATCH = 8
EPOCH = 20_000  # samples, where a baseline asks for it
MOSAIC_FOLDER = Path(sys.prefix) / "mosaicml-streaming"  # beside the environment, so that none of its packages changes
# its other dependencies are clouds and image data sets, which token streams do not touch
MOSAIC_PACKAGES = "mosaicml-streaming zstd python-snappy cramjam Brotli catalogue"
MOSAIC_INSTALL = f"{sys.executable} -m pip install --no-deps --target {MOSAIC_FOLDER} {MOSAIC_PACKAGES}"
Batches = Iterator[tuple[torch.Tensor, np.ndarray | None]]


class Loader:
    """What is measured; `workers`: processes that read ahead, where the loader needs them for that."""

    def __init__(self, data: Path):
        self.data = data
        lock = read_lock(data / "phase1.lock.json")
        self.seq_len: int = lock["seq_len"]
        self.names = [source["name"] for source in lock["sources"]]
        self.shares = [source["weight"] / sum(s["weight"] for s in lock["sources"]) for source in lock["sources"]]

    def state_at(self, sequence: int) -> Any:
        """The state from which `batches` continues there; LookupError where that is impossible."""
        return sequence

    def parquet(self, name: str, **options: Any) -> Any:
        import datasets

        datasets.disable_progress_bars()
        path, cache = str(self.data / f"{name}.parquet"), str(self.data / "cache")
        return datasets.load_dataset("parquet", data_files=path, split="train", cache_dir=cache, **options)

    def batches(self, state: Any = 0, workers: int = 0) -> Batches:
        raise NotImplementedError


class Sequences(Loader):
    """Ours without the threads around it."""

    def batches(self, state: Any = 0, workers: int = 0) -> Batches:
        mixture = Mixture.open(self.data / "phase1.lock.json")
        while True:
            tokens, sources = mixture.sequences(state, BATCH)
            yield torch.from_numpy(tokens), sources
            state += BATCH


class OurLoader(Loader):
    """Ours as the trainer uses it: two reader threads, on one core too."""

    def batches(self, state: Any = 0, workers: int = 0) -> Batches:
        from records.skips import SkipList
        from train.data import MixtureLoader

        loader = MixtureLoader(self.data / "phase1.lock.json", 0, 1, BATCH, 2, SkipList())
        saved = json.loads(loader.state_dict()["mixture"])
        loader.load_state_dict({"mixture": json.dumps({**saved, "sequences": state})})
        for inputs, _ in loader:
            yield inputs["input"], inputs["source"].numpy()


class BareQueues(OurLoader):
    """Ours with a pair of C queues for each thread in place of torchdata: the difference is torchdata's price."""

    def batches(self, state: Any = 0, workers: int = 0) -> Batches:
        import train.data

        train.data.read_ahead = through_queues
        yield from super().batches(state, workers)


def through_queues(read: Callable[[int], Any], threads: int) -> Iterator[Any]:
    """`train.data.read_ahead` without torchdata; taking a batch costs no lock that a reader can hold."""
    from train.data import READ_AHEAD_BATCHES

    asked: list[SimpleQueue] = [SimpleQueue() for _ in range(threads)]
    done: list[SimpleQueue] = [SimpleQueue() for _ in range(threads)]

    def serve(asked: SimpleQueue, done: SimpleQueue) -> None:
        while (number := asked.get()) is not None:
            done.put(read(number))

    for queues in zip(asked, done, strict=True):
        Thread(target=serve, args=queues, daemon=True).start()
    try:
        for number in range(threads * READ_AHEAD_BATCHES):
            asked[number % threads].put(number)
        for number in count():
            result = done[number % threads].get()
            asked[number % threads].put(number + threads * READ_AHEAD_BATCHES)
            yield result
    finally:
        for queue in asked:
            queue.put(None)


class TorchTitan(Loader):
    """Its own data set and loader on rows of token ids, mixed beforehand, as it reads a single data set."""

    def batches(self, state: Any = 0, workers: int = 0) -> Batches:
        from torchtitan.components.dataloader import ParallelAwareDataloader
        from torchtitan.hf_datasets import DatasetConfig
        from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataset

        DATASETS["rows"] = DatasetConfig("mixed", self.parquet, lambda sample: sample["tokens"])
        no_text = types.SimpleNamespace(encode=lambda tokens, **_: tokens)  # tokenizing would cost it more
        dataset = HuggingFaceTextDataset("rows", None, no_text, self.seq_len, infinite=True)
        dataset.load_state_dict({"token_buffer": [], "sample_idx": state})
        for inputs, _ in ParallelAwareDataloader(dataset, 0, 1, batch_size=BATCH, num_workers=workers):
            yield inputs["input"], None

    def state_at(self, sequence: int) -> Any:
        if sequence >= (rows := pq.read_metadata(self.data / "mixed.parquet").num_rows):
            raise LookupError(f"only by reading beyond its {rows} rows")
        return sequence


class Interleave(Loader):
    """datasets.interleave_datasets over Arrow files, memory-mapped."""

    streaming = False

    def mixed(self, state: Any = 0) -> Any:
        import datasets

        parts = [self.parquet(name, streaming=self.streaming) for name in self.names]
        mixed = datasets.interleave_datasets(parts, self.shares, seed=1, stopping_strategy="all_exhausted")
        mixed = mixed.with_format("numpy")
        if state and self.streaming:
            mixed.load_state_dict(state)
        return mixed.skip(state) if state and not self.streaming else mixed

    def state_at(self, sequence: int) -> Any:
        if sequence >= (length := len(self.mixed())):
            raise LookupError(f"impossible beyond its {length} rows")
        return sequence

    def batches(self, state: Any = 0, workers: int = 0) -> Batches:
        mixed = self.mixed(state)
        if workers:
            yield from torch.utils.data.DataLoader(mixed, BATCH, num_workers=workers, collate_fn=_collate)
        while True:
            for rows in mixed.iter(BATCH, drop_last_batch=True):
                yield torch.from_numpy(rows["tokens"].astype(np.int64)), rows["source"]
            mixed = self.mixed()


class InterleaveStreaming(Interleave):
    """datasets.interleave_datasets over Parquet files, streamed."""

    streaming = True

    def state_at(self, sequence: int) -> Any:
        if sequence > EPOCH:
            raise LookupError(f"only by reading beyond {EPOCH} sequences")
        mixed = self.mixed()
        for _ in islice(mixed.iter(BATCH), sequence // BATCH):
            pass
        return mixed.state_dict()


class Mosaic(Loader):
    """mosaicml-streaming's StreamingDataset with a proportion per stream and its default shuffle."""

    def __init__(self, data: Path):
        super().__init__(data)
        sys.path.append(str(MOSAIC_FOLDER))
        package = types.ModuleType("streaming")  # its own one imports its image data sets, hence torchvision
        package.__path__ = [str(MOSAIC_FOLDER / "streaming")]
        sys.modules["streaming"] = package
        torch._utils._get_available_device_type = lambda: "cpu"
        if (data / "mds").is_dir():
            return
        from streaming.base import MDSWriter

        columns = {"tokens": f"ndarray:uint16:{self.seq_len + 1}", "source": "uint16"}
        for index, name in enumerate(self.names):
            rows = pq.read_table(data / f"{name}.parquet")["tokens"].combine_chunks()
            with MDSWriter(out=str(data / "mds" / name), columns=columns) as writer:
                for window in rows.flatten().to_numpy().reshape(-1, self.seq_len + 1):
                    writer.write({"tokens": window, "source": np.uint16(index)})

    def batches(self, state: Any = 0, workers: int = 0) -> Batches:
        from streaming.base import Stream, StreamingDataLoader, StreamingDataset
        from streaming.base.util import clean_stale_shared_memory

        clean_stale_shared_memory()
        streams = [
            Stream(local=str(self.data / "mds" / name), proportion=share)
            for name, share in zip(self.names, self.shares, strict=True)
        ]
        dataset = StreamingDataset(streams=streams, batch_size=BATCH, epoch_size=EPOCH, num_canonical_nodes=1,
                                   shuffle=True, shuffle_seed=1)  # fmt: skip
        if state:
            epoch, within = divmod(state, EPOCH)
            dataset.load_state_dict({**dataset.state_dict(within, True), "epoch": epoch})
        for _ in range(1000):
            yield from StreamingDataLoader(dataset, batch_size=BATCH, num_workers=workers, collate_fn=_collate)


def _collate(rows: list[dict[str, Any]]) -> tuple[torch.Tensor, np.ndarray]:
    tokens = np.stack([row["tokens"] for row in rows]).astype(np.int64)
    return torch.from_numpy(tokens), np.array([int(row["source"]) for row in rows])


LOADERS: dict[str, type[Loader]] = {
    "Mixture.sequences": Sequences,
    "MixtureLoader": OurLoader,
    "MixtureLoader, bare queues": BareQueues,
    "torchtitan": TorchTitan,
    "interleave_datasets": Interleave,
    "interleave_datasets, streaming": InterleaveStreaming,
    "mosaicml-streaming": Mosaic,
}


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
    """How long a training step of 20 ms, which leaves the interpreter idle, waits for its batch; on all cores."""
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
    """Largest |sequences of a source - share * sequences| over all prefixes up to 1,000 and up to `sequences`."""
    batches = islice(loader.batches(), -(-sequences // BATCH))
    read = [sources for _, sources in batches if sources is not None]
    return {"deviation": worst_deviation(np.concatenate(read)[:sequences], loader.shares) if read else None}


def worst_deviation(sources: np.ndarray, shares: list[float]) -> dict[str, float]:
    prefixes = np.arange(1, len(sources) + 1)
    apart = np.array([np.abs(np.cumsum(sources == i) - share * prefixes) for i, share in enumerate(shares)]).max(0)
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


MEASURES: dict[str, Callable[..., Result]] = {
    "speed": speed, "first_pass": first_pass, "stalls": stalls, "deviation": deviation, "resume": resume,
}  # fmt: skip


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
