"""Tests of every module's partial output against float64, with a fault planted in its module."""

import pytest
import torch

from tests.laneformer.engine.assets import (
    TORCH_DTYPES,
    engine_of,
    random_ids,
    random_model,
    small_config,
    small_model,
    usable_isas,
    widen_model,
)
from tools.check.reference import (
    BLOCK,
    choose_positions,
    limit_error,
    model_outputs,
    module_report,
    output_errors,
)

CONFIG = small_config(max_position_embeddings=176)
LENGTH = 170  # 24 windows of 7, two blocks
ARITHMETIC = [(dtype, "exact") for dtype in TORCH_DTYPES] + [("bf16", "bf16")]


# tools/check/reference.py computes the allowance; planted faults are thousands of times larger.
# test_quality.py plants further faults.
def compare(model, config=None, length=90, **options):
    """Return both models' outputs at chosen positions, and the report on them."""
    ids = random_ids(model.config, length)
    positions = choose_positions(model.config, length)
    _, reference = model_outputs(widen_model(model, torch.float64), ids, positions)
    with engine_of(model, config, **options) as engine:
        partials = engine._partials(ids, positions)
    report = module_report(
        model.config, partials, reference, positions, options.get("math", "exact")
    )
    return partials, reference, report


@pytest.mark.parametrize(("dtype", "math"), ARITHMETIC)
@pytest.mark.parametrize("isa", usable_isas())
def test_every_module_is_within_rounding(isa, dtype, math):
    model = random_model(CONFIG, seed=1, dtype=dtype)
    partials, reference, report = compare(model, length=LENGTH, threads=2, isa=isa, math=math)
    assert report["first_wrong"] is None, report
    depths = {row["depth"] for row in report["by_depth"]}
    assert {1, 7, 8, 7 + BLOCK + 1, LENGTH} <= depths, (
        "the window's edge and the second block are covered"
    )
    # the allowance itself: never so wide that another weight dtype's rounding could hide in it
    widest = limit_error(model.config, LENGTH, "exact").max()
    assert widest < 2.0**-12
    if math == "bf16":
        assert output_errors(partials, reference).max() > widest, "activations were not rounded"


def test_a_longer_window_is_located_in_the_first_layer_beyond_its_edge():
    model = small_model(seed=8)
    report = compare(model, config=small_config(sliding_window=8))[2]
    assert report["first_wrong"] == [0, "attention"]
    assert min(row["depth"] for row in report["by_depth"] if row["of_allowed"] > 1) == 8
