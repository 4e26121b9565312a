"""Tests of emulated float8 products: two ranks equal one, near the plain job."""

from __future__ import annotations

import pytest

from laneformer.titan.float8 import RECIPES
from records.job import read_sections
from tests.train.runs import metrics, train_toy

CONVERTED = ("--model.converters", "quantize.linear.float8")


@pytest.mark.rotate
@pytest.mark.parametrize("recipe", RECIPES)
def test_ranks_change_nothing(recipe, whole_run, phase1, tmp_path):
    # With equal micro-batches, as scales are theirs: one rank takes two, two ranks one each.
    run = tmp_path / "two"
    job = (
        *CONVERTED,
        "--quantize.linear.float8.emulate",
        "--quantize.linear.float8.recipe_name",
        recipe,
    )
    two = train_toy(run, phase1, *job)
    assert read_sections(run / "config.toml")["model"]["converters"] == ["quantize.linear.float8"]
    losses = [row["loss"] for row in two]
    plain = [row["loss"] for row in metrics(whole_run)]
    assert losses != plain
    # float8, and nothing but float8
    assert losses == pytest.approx(plain, rel=0.005)

    one = train_toy(tmp_path / "one", phase1, *job, ranks=1)
    assert [row["loss"] for row in one] == pytest.approx(losses, rel=1e-6)
