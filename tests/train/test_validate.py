"""Tests of validation: the loss on every held-out window once, on any number of ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchtitan.components.loss import IGNORE_INDEX

from data_mixtures.mixture import Mixture, valid_windows
from tests.train.logged import EPSILON, STEPS, WINDOWS, checkpoint_model, plain_loss
from tests.train.runs import SEQ_LEN, metrics
from train.validate import deal_out, list_octaves, sum_octaves


@pytest.mark.job
def test_validation_is_the_checkpoints_loss_in_one_process(metrics_run, data_folder):
    # Fifteen windows on two ranks of four: one more is padded, which must not count.
    rows = metrics(metrics_run)
    assert [r["step"] for r in rows if "valid_loss" in r] == [3, 6]
    mixture = Mixture.open(data_folder / "phase1.lock.json")
    weights = dict(zip(mixture.source_names, mixture.weights, strict=True))
    model = checkpoint_model(metrics_run, STEPS)
    expected = {
        name: plain_loss(model, valid_windows(data_folder, name, WINDOWS)) for name in weights
    }
    total = sum(weights[name] * expected[name] for name in weights) / sum(weights.values())
    # a sum of float32 over a sequence, and the logits' own
    rounding = 2 * SEQ_LEN * EPSILON * total
    for name, loss in rows[-1]["valid_loss_by_source"].items():
        assert abs(loss - expected[name]) < rounding, name
        # of windows of 32 tokens
        halves = rows[-1]["valid_loss_by_position"][name]
        assert halves.keys() == {"0", "16"}
        assert abs(sum(halves.values()) / 2 - loss) < rounding
    assert abs(rows[-1]["valid_loss"] - total) < rounding
    # step 3 has other weights
    assert abs(rows[2]["valid_loss"] - total) > rounding


def test_a_position_counts_from_the_beginning_of_its_document():
    # Two documents of 40 and 24 tokens in a window, then one of 64; every fourth token is
    # untrained.
    assert list_octaves(64) == [0, 16, 32]
    assert list_octaves(65) == [0, 16, 32, 64]
    assert list_octaves(16) == [0]
    documents = torch.tensor([[1] * 40 + [2] * 24, [1] * 64])
    losses = torch.arange(128, dtype=torch.float32).view(2, 64)
    labels = torch.where(torch.arange(64) % 4 == 3, IGNORE_INDEX, 5).expand(2, 64)
    losses[labels == IGNORE_INDEX] = 0
    position = torch.stack([torch.cat([torch.arange(40), torch.arange(24)]), torch.arange(64)])
    expected = torch.zeros(2, 6, dtype=torch.float64)
    for octave, (first, end) in enumerate([(0, 16), (16, 32), (32, 64)]):
        inside = (position >= first) & (position < end)
        expected[:, octave] = (losses * inside).sum(1)
        expected[:, 3 + octave] = (inside & (labels != IGNORE_INDEX)).sum(1)
    assert torch.equal(sum_octaves(losses, labels, documents, list_octaves(64)), expected)
    whole = sum_octaves(losses[:1], labels[:1], None, list_octaves(64))
    # without marks of documents a position is one in the window
    assert whole[0, 3:].tolist() == [12, 12, 24]


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 5))
def test_every_held_out_window_is_read_once_whatever_the_ranks(windows, ranks, batch):
    rows = np.arange(windows)
    dealt = [
        deal_out([rows[:, None]], np.zeros_like(rows), ranks, rank, batch) for rank in range(ranks)
    ]
    assert len({len(of_rank) for of_rank in dealt}) == 1
    parts = [part for of_rank in dealt for part in of_rank]
    tokens, bins = (torch.cat(column).ravel() for column in zip(*parts, strict=True))
    assert {len(part) for part, _ in parts} == {batch}
    assert sorted(tokens[bins == 0].tolist()) == rows.tolist()
    assert (bins == 1).sum() < ranks * batch
