"""Tests that flags of packed conversations follow their tokens over ranks, skips, epochs."""

from __future__ import annotations

from itertools import islice

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


def test_any_cut_has_the_same_labels_and_documents(lock):
    # Four ranks, across the end of an epoch, at which windows are left out.
    ranks, mixture = 4, Mixture.open(lock)
    epoch = sum(source["windows"] for source in read_lock(lock)["sources"])
    first, skips = epoch - 2 * GLOBAL_BATCH, SkipList([(epoch - 5, epoch + 4)])
    read = []
    for rank in range(ranks):
        loader = MixtureLoader(lock, rank, ranks, GLOBAL_BATCH // ranks, 1, skips)
        loader.state.sequences = first
        read.append([{**inputs, "labels": labels} for inputs, labels in islice(loader, STEPS)])
    numbers = skips.numbers(first, STEPS * GLOBAL_BATCH).tolist()
    # the second reading has another order
    assert numbers[-1] >= epoch
    tokens = np.concatenate([mixture.sequences(number, 1)[0] for number in numbers])
    inputs, labels = chats.batch(
        tokens, np.concatenate([mixture.flags(number, 1) for number in numbers])
    )
    for name, expected in (
        ("input", inputs["input"]),
        ("documents", inputs["documents"]),
        ("labels", labels),
    ):
        parts = [of_rank[step][name] for step in range(STEPS) for of_rank in read]
        assert torch.equal(torch.cat(parts), expected), name
    places = mixture.locate(np.array(numbers[:3]))
    assert [place["token_offset"] % chats.SEQ_LEN for place in places] == [0, 0, 0]


def test_conversations_have_no_document_index(lock):
    with pytest.raises(ValueError, match="packed conversations, which have no document index"):
        show.run(tyro.cli(show.Question, args=[str(lock), "--origin", "x"]), Console())
