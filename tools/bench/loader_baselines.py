"""The candidates of `tools.bench loader`, each in a process of its own: the same windows,
batches of BATCH, int64.

A loader yields batches (tokens int64 (BATCH, S) or (BATCH, S + 1), sources (BATCH,) or None). The
baselines are unmodified; each reads already tokenized data in the form that its documentation asks for, in
the faster of its ways.
"""

from __future__ import annotations

import json
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

BATCH = 8
EPOCH = 20_000  # samples, where a baseline asks for it
Batches = Iterator[tuple[torch.Tensor, np.ndarray | None]]


class Loader:
    """What is measured; `workers`: processes that read ahead, where the loader needs them for that."""

    def __init__(self, data: Path):
        self.data = data
        lock = read_lock(data / "phase1.lock.json")
        self.seq_len: int = lock["seq_len"]
        self.names = [source["name"] for source in lock["sources"]]
        self.shares = [
            source["weight"] / sum(s["weight"] for s in lock["sources"]) for source in lock["sources"]
        ]

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
    """Ours with a pair of C queues for each thread in place of torchdata: the
    difference is torchdata's price.
    """

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
            yield from torch.utils.data.DataLoader(mixed, BATCH, num_workers=workers, collate_fn=collate)
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


def collate(rows: list[dict[str, Any]]) -> tuple[torch.Tensor, np.ndarray]:
    tokens = np.stack([row["tokens"] for row in rows]).astype(np.int64)
    return torch.from_numpy(tokens), np.array([int(row["source"]) for row in rows])


BASELINES: dict[str, type[Loader]] = {
    "Mixture.sequences": Sequences,
    "MixtureLoader": OurLoader,
    "MixtureLoader, bare queues": BareQueues,
    "torchtitan": TorchTitan,
    "interleave_datasets": Interleave,
    "interleave_datasets, streaming": InterleaveStreaming,
}
