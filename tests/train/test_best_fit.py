"""Batches of documents in best-fit windows: padding is no label, documents are apart, any ranks resume."""

from __future__ import annotations

import dataclasses
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


def batches(lock: Path, world: int, steps: int, state: dict | None = None) -> tuple[list, dict]:
    """Micro-batches of six sequences of `world` ranks, put together, and the state after them."""
    ranks = [MixtureLoader(lock, rank, world, 6 // world, 1, SkipList([])) for rank in range(world)]
    for loader in ranks:
        if state is not None:
            loader.load_state_dict(state)
    found, readers = [], [iter(loader) for loader in ranks]
    for _ in range(steps):
        parts = [next(reader) for reader in readers]
        names = ("input", "documents")
        rows = [torch.cat([inputs[name] for inputs, _ in parts]) for name in names]
        found.append(
            [*rows, torch.cat([labels for _, labels in parts]), sum(int(i["trained"]) for i, _ in parts)]
        )
    for reader in readers:
        reader.close()
    return found, ranks[0].state_dict()


def test_padding_is_never_in_the_loss_and_labels_stay_in_their_document(lock: Path) -> None:
    padding = 0
    for tokens, documents, labels, trained in batches(lock, 1, 8)[0]:
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


def test_any_number_of_ranks_resumes_with_the_same_sequences(lock: Path) -> None:
    whole, _ = batches(lock, 1, 6)
    before, state = batches(lock, 2, 2)
    after, _ = batches(lock, 3, 4, state)
    for one, other in zip([*before, *after], whole, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one[:3], other[:3], strict=True))


def test_held_out_windows_have_their_flags(lock: Path) -> None:
    found = held_out(lock, 100)
    assert set(found) == {"notes", "sums"}
    for windows, flags in found.values():
        assert windows.shape == flags.shape
        assert not (flags & TRAINED)[windows == 0].any()
        assert (flags & TRAINED).any()
    assert any((windows == 0).any() for windows, _ in found.values())
