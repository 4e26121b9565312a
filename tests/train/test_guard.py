"""Tests that the guard does not learn from what it refuses, and survives checkpoints."""

from __future__ import annotations

import math

import numpy as np
import pytest

from records.job import Resilience
from train.guard import BadStep, Guard, RunningZ


def train_guard(**settings: float) -> Guard:
    guard = Guard(Resilience(spike_window=32, **settings))
    for step in range(40):
        guard.check(3.0 + 0.01 * math.sin(step), 1.0 + 0.1 * math.cos(step))
    return guard


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_is_always_refused(value):
    guard = Guard(Resilience())
    with pytest.raises(BadStep, match="the loss is"):
        guard.check(value, 1.0)
    with pytest.raises(BadStep, match="the gradient norm is"):
        guard.check(3.0, value)


def test_spikes_above_the_limit_only():
    guard = train_guard(max_loss_z=10.0, max_grad_norm_z=10.0)
    # a loss that falls is no spike
    guard.check(2.0, 1.0)
    guard.check(3.05, 1.2)
    before = guard.state_dict()
    with pytest.raises(BadStep, match="the loss is 4,"):
        guard.check(4.0, 1.0)
    with pytest.raises(BadStep, match="the gradient norm is 9,"):
        guard.check(3.0, 9.0)
    # a refused step is no example
    assert guard.state_dict() == before
    # limits of 0 let spikes through
    train_guard().check(4.0, 9.0)


def test_its_memory_survives_a_restart():
    restarted = Guard(Resilience(spike_window=32, max_loss_z=10.0))
    restarted.load_state_dict(train_guard().state_dict())
    with pytest.raises(BadStep):
        restarted.check(4.0, 1.0)
    # without memory it is blind
    Guard(Resilience(spike_window=32, max_loss_z=10.0)).check(4.0, 1.0)


def test_z_scores_find_a_spike_after_a_spike():
    z = RunningZ(128)
    noise = np.random.default_rng(0).normal(2.0, 0.1, 128)
    scores = []
    for value in noise:
        scores.append(z.score(value))
        z.add(value)
    assert scores[:32] == [0.0] * 32
    # sqrt(pi / 2 / n) and 1.17 / sqrt(n) are the relative errors of median and deviation: about 15%
    # at 64 values
    assert abs(z.score(3.0) - 10) < 3
    z.add(1e9)
    # one spike moves neither the centre nor the scale
    assert abs(z.score(3.0) - 10) < 3
