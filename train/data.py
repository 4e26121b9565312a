"""Batches for the trainer: a slice of the mixture's global order, read ahead by threads.

Step N of the whole job takes the global sequences [N G, (N+1) G), G the global batch. A rank takes its slice of every
micro-batch, so ranks, accumulation and readers change who reads a sequence, never which sequences a step has. The state
is one number, the same on every rank, so a checkpoint loads with any world size. Windows that are to be left out move
everything behind them (`train/skips.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchdata.nodes as tn
from torchtitan.components.dataloader import BaseDataLoader

from data_mixtures.mixture import Mixture

from .skips import SkipList, read_skip_list, windows_of

READ_AHEAD_BATCHES = 4


class MixtureLoader(BaseDataLoader):
    """Yields ({"input": int64 (b, S), "source": int64 (b,)}, labels int64 (b, S)) from the current state on.

    b is the local batch size; "source" counts in `mixture.source_names`.
    """

    def __init__(
        self,
        lock: Path,
        dp_rank: int,
        dp_world_size: int,
        local_batch_size: int,
        reader_threads: int,
        skips: SkipList,
    ):
        self.lock = lock
        self.skips = skips
        self.tokenizer = lock.parent / "tokenizer.model"
        self.mixture = Mixture.open(lock)
        self.offsets: dict[str, int] = {}  # windows of each source that earlier phases used
        self.sequences = 0  # positions that the trainer has taken, all ranks together
        self.micro_batch = local_batch_size * dp_world_size
        self.local = range(dp_rank * local_batch_size, (dp_rank + 1) * local_batch_size)
        self.reader_threads = reader_threads

    def _read(self, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        runs = windows_of(self.skips.numbers(first + self.local.start, len(self.local)))
        tokens, source = zip(*(self.mixture.sequences(number, last - number) for number, last in runs), strict=True)
        joined = tokens[0] if len(runs) == 1 else np.concatenate(tokens)
        return torch.from_numpy(joined), torch.from_numpy(np.concatenate(source).astype(np.int64, copy=False))

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        starts = tn.IterableWrapper(_count_from(self.sequences, self.micro_batch))
        node: tn.BaseNode = tn.ParallelMapper(
            starts, self._read, num_workers=self.reader_threads, in_order=True, method="thread",
            max_concurrent=None, snapshot_frequency=2**31,
        )  # fmt: skip
        if torch.cuda.is_available():
            node = tn.PinMemory(node)
        for tokens, source in tn.Loader(tn.Prefetcher(node, READ_AHEAD_BATCHES, snapshot_frequency=2**31)):
            self.sequences += self.micro_batch
            yield {"input": tokens[:, :-1], "source": source}, tokens[:, 1:]

    def continue_after(self, windows: dict[str, int]) -> None:
        """Begin every source behind the windows that an earlier phase has consumed."""
        self.offsets = dict(windows)
        here = {name: windows[name] for name in self.mixture.source_names if name in windows}
        self.mixture = Mixture.open(self.lock, here)

    def check_epochs(self, positions: int) -> None:
        """ValueError when a job of so many sequences would repeat a source more often than its epoch cap allows."""
        self.mixture.check_epochs(self.skips.used(positions))

    def locate(self, first: int, count: int) -> list[dict[str, Any]]:
        """Source, shard and token offset of every sequence at positions first .. first + count."""
        return self.mixture.locate(self.skips.numbers(first, count))

    def windows_per_source(self) -> dict[str, int]:
        """Windows of every source that this phase and those before it have used, in closed form."""
        return {**self.offsets, **self.mixture.windows_per_source(self.skips.used(self.sequences))}

    def state_dict(self) -> dict[str, Any]:
        """One JSON string, equal on all ranks: position, mixture, and the windows of every source used so far."""
        state = {
            "sequences": self.sequences,
            "skip_sequences": self.skips.until(self.skips.used(self.sequences)),
            "fingerprint": self.mixture.fingerprint,
            "offsets": self.offsets,
            "windows": self.windows_per_source(),
        }
        return {"mixture": json.dumps(state)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = json.loads(state_dict["mixture"])
        if state["fingerprint"] != self.mixture.fingerprint:
            raise ValueError(
                f"the checkpoint was trained on mixture {state['fingerprint'][:12]}, but {self.lock} is "
                f"{self.mixture.fingerprint[:12]}; continue with the mixture of the checkpoint, or start a new phase "
                "from it (checkpoint.initial_load_path in a new job.dump_folder)"
            )
        self.sequences = state["sequences"]
        passed, now = SkipList(state["skip_sequences"]), self.skips
        if passed.windows != now.until(now.used(self.sequences)):
            raise ValueError(
                f"the checkpoint has left out the sequences {passed.windows}, but resilience.skip_sequences and "
                f"skip_sequences.json of the run folder say {now.windows}, which would change what it was trained on; "
                "change only windows that lie ahead, or start from an older checkpoint"
            )
        self.continue_after(state["offsets"])


class _count_from:
    """first, first + step, ... without end; an iterable, as torchdata's nodes ask for."""

    def __init__(self, first: int, step: int):
        self.first, self.step = first, step

    def __iter__(self) -> Iterator[int]:
        at = self.first
        while True:
            yield at
            at += self.step


def build_mixture_loader(dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: Any) -> MixtureLoader:
    """TorchTitan's dataloader builder. Raises ValueError when mixture, sequence length or vocabulary do not fit."""
    section = job_config.mixture
    if not section.lock:
        raise ValueError("mixture.lock is empty; give the lock file that `python -m data_mixtures.prepare` wrote")
    lock = Path(section.lock)
    if not lock.is_file():
        raise ValueError(f"mixture.lock = {section.lock} does not exist; `python -m data_mixtures.prepare` makes it")
    batch = job_config.training.local_batch_size
    skips = read_skip_list(Path(job_config.job.dump_folder), job_config.resilience.skip_sequences)
    loader = MixtureLoader(lock, dp_rank, dp_world_size, batch, section.reader_threads, skips)
    if loader.mixture.seq_len != job_config.training.seq_len:
        raise ValueError(
            f"{lock} holds windows of {loader.mixture.seq_len} tokens, but training.seq_len is "
            f"{job_config.training.seq_len}; set training.seq_len = {loader.mixture.seq_len} or prepare the data anew"
        )
    return loader
