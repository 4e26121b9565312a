"""Batches of packed conversations: flags follow their tokens through ranks, skipped windows, and epochs."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
import tyro
from rich.console import Console

from data_mixtures import show
from data_mixtures.mixture import Mixture, read_lock
from records.skips import SkipList
from tests.train.sft import chats
from train.data import MixtureLoader

GLOBAL_BATCH, STEPS = 8, 3


def batches(
    lock: Path, ranks: int, first: int, skips: list[tuple[int, int]]
) -> list[dict[str, torch.Tensor]]:
    """Labels, documents and ids of STEPS steps, the ranks' slices in a row."""
    loaders = [
        MixtureLoader(lock, rank, ranks, GLOBAL_BATCH // ranks, 1, SkipList(skips)) for rank in range(ranks)
    ]
    for each in loaders:
        each.state.sequences = first
    steps = zip(*(list(islice(each, STEPS)) for each in loaders), strict=True)
    return [
        {name: torch.cat([inputs[name] if name != "labels" else labels for inputs, labels in of_ranks])
         for name in ("input", "documents", "labels")}
        for of_ranks in steps
    ]  # fmt: skip


def test_any_cut_has_the_same_labels_and_documents(lock: Path) -> None:
    mixture = Mixture.open(lock)
    epoch = sum(source["windows"] for source in read_lock(lock)["sources"])
    first, skips = epoch - 2 * GLOBAL_BATCH, [(epoch - 5, epoch + 4)]
    found = batches(lock, 4, first, skips)
    numbers = SkipList(skips).numbers(first, STEPS * GLOBAL_BATCH)
    for step, each in enumerate(found):
        of_step = numbers[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH].tolist()
        tokens, flags = (np.concatenate(rows) for rows in zip(*((mixture.sequences(n, 1)[0], mixture.flags(n, 1))
                         for n in of_step), strict=True))  # fmt: skip
        inputs, labels = chats.batch(tokens, flags)
        assert torch.equal(each["input"], inputs["input"])
        assert torch.equal(each["documents"], inputs["documents"])
        assert torch.equal(each["labels"], labels)
        assert numbers[-1] >= epoch, "the second reading has another order"
    places = mixture.locate(numbers[:3])
    assert [place["token_offset"] % chats.SEQ_LEN for place in places] == [0, 0, 0]


def test_conversations_have_no_document_index(lock: Path) -> None:
    with pytest.raises(ValueError, match="packed conversations, which have no document index"):
        show.run(tyro.cli(show.Question, args=[str(lock), "--origin", "x"]), Console())
