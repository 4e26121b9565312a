"""Curves: sampling and smoothing."""

from __future__ import annotations

import math
import random
from itertools import combinations, product
from typing import Any

from records.page import PALETTE
from tools.dashboard.core import TINT
from tools.dashboard.panels import TRAINING, VALID, extremes_of
from tools.dashboard.rows import Mean, sample


def apart(a: str, b: str) -> float:
    """Distance of two colours #rrggbb."""
    return math.dist(bytes.fromhex(a[1:]), bytes.fromhex(b[1:]))


def test_core_and_validation_have_colours_of_their_own() -> None:
    """No nearer to a phase's or source's colour, nor to each other, than two of those are."""
    nearest = min(apart(a, b) for a, b in combinations(PALETTE, 2))
    assert all(apart(a, b) >= nearest for a, b in [(TINT, VALID), *product((TINT, VALID), PALETTE)])


def test_sampling_keeps_spikes_and_ends_and_is_bounded() -> None:
    rows: list[dict[str, Any]] = [
        {"n": i, "loss": 2.0, "grad_norm": 0.3, "tokens_per_s": 100.0} for i in range(50_000)
    ]
    rows[31_337]["loss"], rows[4242]["grad_norm"], rows[777]["tokens_per_s"] = 9.0, 50.0, 1.0
    chosen = [row["n"] for row in sample(rows, 128, extremes_of(TRAINING))]
    assert {0, 31_337, 4242, 777, 49_999} <= set(chosen)
    assert {31_336, 31_338, 4241, 4243, 776, 778} <= set(chosen), "under zoom a spike is one row wide"
    assert len(chosen) <= 5 * math.ceil(50_000 / 128) + 1
    assert [row["n"] for row in sample(rows[:40_000], 128, extremes_of(TRAINING))][:-1] == chosen[
        : sum(n < 40_000 for n in chosen) - (39_999 in chosen)
    ], "what is drawn of earlier rows stays"


def test_noise_keeps_no_more_than_its_extremes() -> None:
    draw = random.Random(0)
    rows = [{"n": i, "loss": 2 + draw.gauss(0, 0.1)} for i in range(12_800)]
    chosen = sample(rows, 128, [("loss", min), ("loss", max)])
    assert len(chosen) <= 3 * 100 + 1, "the last row of a bucket and its two extremes"


def test_a_mean_of_a_constant_is_the_constant_and_skips_gaps() -> None:
    mean = Mean(half_life=5)
    values = [2.0 if i % 7 else None for i in range(100)]
    means = [mean.add(value) for value in values]
    assert [mean is None for mean in means] == [value is None for value in values]
    # a weighted mean of equal numbers: each of the 100 additions rounds by 2**-53 relative, on both sums
    assert all(abs(mean - 2.0) <= 2.0 * 200 * 2**-53 for mean in means if mean is not None)
    assert mean.add(5.0, last=True) == mean.add(5.0), "the last value may still be replaced"
