"""Prepared data for other trainers: a `datasets.IterableDataset`, or a torchdata node that resumes.

    dataset = export.as_dataset("data/own/phase1.lock.json", sequences=100_000, rank=rank, world=world)
    node = export.MixtureNode("data/own/phase1.lock.json", rank, world)

A row is {"input_ids": int64 (S + 1,), "source": its name}: S inputs, and S targets one token further.
Rank r of w reads the sequences r, r + w, ..., so all ranks together read the same for every w.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
from torchdata.nodes import BaseNode

from data_mixtures.mixture import Mixture

Row = dict[str, Any]


def _open_mixture(lock: str | Path) -> Mixture:
    mixture = Mixture.open(lock)
    if mixture.packed:
        raise ValueError(
            f"{lock} holds packed windows, which need flags; only train/ reads those, or export a "
            "mixture of documents in a row"
        )
    return mixture


def _row(mixture: Mixture, number: int) -> Row:
    tokens, source = mixture.sequences(number, 1)
    return {"input_ids": tokens[0], "source": mixture.source_names[int(source[0])]}


def _rows(lock: str, numbers: list[range]) -> Iterator[Row]:
    mixture = _open_mixture(lock)
    for part in numbers:
        for number in part:
            yield _row(mixture, number)


def as_dataset(
    lock: str | Path, sequences: int, start: int = 0, rank: int = 0, world: int = 1
) -> datasets.IterableDataset:
    """Return sequences start <= i < sequences of one rank; ValueError if they pass the epoch cap.

    To continue after n of them on each rank, use start + n * world: it costs nothing, unlike
    `load_state_dict`.
    """
    _open_mixture(lock).check_epochs(sequences)
    numbers = [range(start + rank, sequences, world)]
    dataset = datasets.IterableDataset.from_generator(
        _rows, gen_kwargs={"lock": str(lock), "numbers": numbers}
    )
    assert isinstance(dataset, datasets.IterableDataset)
    return dataset


class MixtureNode(BaseNode[Row]):
    """Endless sequences of one rank; ValueError past the epoch cap. Its state fits any world size."""

    def __init__(self, lock: str | Path, rank: int = 0, world: int = 1) -> None:
        super().__init__()
        self.lock = lock
        self.rank = rank
        self.world = world
        self.mixture = _open_mixture(lock)
        self.sequences = 0

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Continue from a state of `get_state`; ValueError for a state of other sequences."""
        super().reset(initial_state)
        self.sequences = 0
        if initial_state is not None:
            self.sequences = initial_state["sequences"]
            if initial_state["rule"] != self.mixture.rule:
                raise ValueError(
                    f"the state is of another mixture than {self.lock}; continue with the lock it was made with"
                )
            used = self.mixture.windows_per_source(self.sequences)
            for name, identities in initial_state["read"].items():
                self.mixture.check_continues(name, used[name], identities)

    def next(self) -> Row:
        number = self.sequences + self.rank
        self.sequences += self.world
        return _row(self.mixture, number)

    def get_state(self) -> dict[str, Any]:
        # global sequences, not this rank's: any number of ranks can continue from them
        used = self.mixture.windows_per_source(self.sequences)
        files_read = {
            name: self.mixture.identify_files_read(name, windows)
            for name, windows in used.items()
            if windows
        }
        return {"sequences": self.sequences, "rule": self.mixture.rule, "read": files_read}
