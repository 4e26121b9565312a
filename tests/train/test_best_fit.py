"""Batches of documents in best-fit windows: padding is no label, documents are apart, any ranks resume."""

from __future__ import annotations

import dataclasses
from itertools import islice
from pathlib import Path

import pytest
import torch
from torchtitan.components.loss import IGNORE_INDEX

from data_mixtures.mixture import TRAINED
from records.skips import SkipList
from tests.data_mixtures.stages.shuffle_assets import plan_of, prepared, texts_of
from train.data import MixtureLoader
from train.validate import held_out


@pytest.fixture(scope="module")
def lock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    plan = dataclasses.replace(
        plan_of(("notes", "sums"), seq_len=48, windows_per_shard=20), packing="best_fit"
    )
    texts = {"notes": texts_of(260), "sums": texts_of(200, seed=1)}
    return prepared(tmp_path_factory.mktemp("best_fit"), plan, texts) / "phase1.lock.json"


def test_padding_is_never_in_the_loss_and_labels_stay_in_their_document(lock: Path) -> None:
    padding = 0
    loader = MixtureLoader(lock, 0, 1, 6, 1, SkipList([]))
    for inputs, labels in islice(loader, 8):
        tokens, documents, trained = inputs["input"], inputs["documents"], int(inputs["trained"])
        padding += int((tokens == 0).sum())
        counted = labels != IGNORE_INDEX
        assert trained == int(counted.sum()) > 0
        assert not (counted & (tokens == 0)).any()
        assert not (counted & (labels == 0)).any()
        assert not counted[:, -1].any(), "the token behind a window is the next one's"
        inside = documents[:, 1:] == documents[:, :-1]
        assert torch.equal(counted[:, :-1], inside & (tokens[:, :-1] != 0)), (
            "each token of a document but its first"
        )
        assert (documents[:, 1:] > documents[:, :-1])[tokens[:, 1:] == 1].all(), "a begin is another document"
    assert padding


def test_held_out_windows_have_their_flags(lock: Path) -> None:
    found = held_out(lock, 100)
    assert set(found) == {"notes", "sums"}
    for windows, flags in found.values():
        assert windows.shape == flags.shape
        assert not (flags & TRAINED)[windows == 0].any()
        assert (flags & TRAINED).any()
    assert any((windows == 0).any() for windows, _ in found.values())
