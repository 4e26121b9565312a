"""Tests of what is trained: only answers, each conversation alone, each token alike."""

from __future__ import annotations

import itertools
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from data_mixtures.mixture import BEGINS, TRAINED, Mixture
from laneformer.titan import spec
from tests.train.sft import chats

WINDOWS = 6


@pytest.fixture(scope="module")
def windows(lock):
    mixture = Mixture.open(lock)
    return mixture.sequences(0, WINDOWS)[0], mixture.flags(0, WINDOWS)


def conversations_of(windows: tuple[np.ndarray, np.ndarray]) -> list[tuple[int, int, int]]:
    # (window, first token, one past the last) of every conversation and the padding
    return [
        (number, first, end)
        for number, flags in enumerate(windows[1][:, : chats.SEQ_LEN])
        for first, end in itertools.pairwise(
            [*np.flatnonzero(flags & BEGINS).tolist(), chats.SEQ_LEN]
        )
    ]


def alone(windows: tuple[np.ndarray, np.ndarray]) -> torch.Tensor:
    # float64 losses (B, S) of each conversation alone; 0 if untrained
    model, losses = chats.plain_model(), torch.zeros(WINDOWS, chats.SEQ_LEN, dtype=torch.float64)
    tokens, flags = (torch.from_numpy(array) for array in windows)
    for number, first, end in conversations_of(windows):
        labels = tokens[number, first + 1 : end]
        with torch.no_grad():
            logits = (
                model(tokens[number, None, first : end - 1])[0]
                if end - first > 1
                else torch.zeros(0, 512)
            )
        loss = cross_entropy(logits, labels, reduction="none")
        losses[number, first : end - 1] = loss * (flags[number, first + 1 : end] & TRAINED)
    return losses


def wide_rope_table(config, positions):
    # in float64: angles of large positions lose digits in float32
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    angle = positions[None, :, None].double() / config.rope_theta**exponent
    return angle.cos()[:, :, None], angle.sin()[:, :, None]


def test_packed_losses_are_those_of_each_conversation_alone(windows):
    # In float64 to its rounding, though positions go on across conversations: attention sees their
    # differences.
    inputs, labels = chats.batch(*windows)
    # several conversations in a window
    assert len(conversations_of(windows)) > 2 * WINDOWS
    model = chats.titan_model()
    with torch.no_grad(), patch.object(spec, "rope_table", wide_rope_table):
        with patch("laneformer.model.rope_table", wide_rope_table):
            expected = alone(windows)
        packed = model(inputs["input"], labels, inputs["documents"])
        leaking = model(inputs["input"], labels, torch.zeros_like(inputs["documents"]))
    assert packed.dtype == torch.float64
    assert (packed - expected).abs().max() < 1e-12
    # attention across conversations would be seen
    assert (leaking - expected).abs().max() > 1e-4
    # with the table of float32 that is used: angles up to S are rounded to half a unit of their
    # last digit
    with torch.no_grad():
        difference = (
            (model(inputs["input"], labels, inputs["documents"]) - alone(windows)).abs().max()
        )
    assert difference < chats.SEQ_LEN * torch.finfo(torch.float32).eps
