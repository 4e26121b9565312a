"""Every module's partial output against float64, and faults planted in one module found in that module.

The allowance is computed from the arithmetic (tools/check/reference.py); a planted fault is
thousands of times larger.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from laneformer.config import MODULES
from tests.laneformer.engine.assets import (
    TORCH_DTYPES,
    engine_of,
    random_ids,
    random_model,
    small_config,
    usable_isas,
    widened,
)
from tools.check.reference import (
    BLOCK,
    allowed_error,
    chosen_positions,
    first_affected,
    model_outputs,
    module_report,
    output_errors,
    without_message,
)

CONFIG = small_config(max_position_embeddings=176)
LENGTH = 170  # 24 windows of 7, two blocks
ARITHMETIC = [(dtype, "exact") for dtype in TORCH_DTYPES] + [("bf16", "bf16")]


def compare(model, reference_model=None, config=None, length=90, **options):
    """The engine's and the float64 model's outputs at chosen positions, and the report on them."""
    ids = random_ids(model.config, length)
    positions = chosen_positions(model.config, length)
    _, reference = model_outputs(widened(reference_model or model, torch.float64), ids, positions)
    with engine_of(model, config, **options) as engine:
        partials = engine._partials(ids, positions)
    report = module_report(model.config, partials, reference, positions, options.get("math", "exact"))
    return partials, reference, report


@pytest.mark.parametrize(("dtype", "math"), ARITHMETIC, ids=[f"{dtype}-{math}" for dtype, math in ARITHMETIC])
@pytest.mark.parametrize("isa", usable_isas())
def test_every_module_is_within_rounding(isa, dtype, math):
    model = random_model(CONFIG, seed=1, dtype=dtype)
    partials, reference, report = compare(model, length=LENGTH, threads=2, isa=isa, math=math)
    assert report["first_wrong"] is None, report
    depths = {row["depth"] for row in report["by_depth"]}
    assert {1, 7, 8, 7 + BLOCK + 1, LENGTH} <= depths, "the window's edge and the second block are covered"
    # the allowance itself: never so wide that another weight dtype's rounding could hide in it
    widest = allowed_error(model.config, LENGTH, "exact").max()
    assert widest < 2.0**-12
    if math == "bf16":
        assert output_errors(partials, reference).max() > widest, "activations were not rounded"


def test_positions_outside_the_prompt_or_out_of_order_are_refused():
    model = random_model(small_config())
    with engine_of(model) as engine:
        for positions in ([5, 4], [4, 4], [-1], [0, 20]):
            with pytest.raises(ValueError, match="ascending order"):
                engine._partials(random_ids(model.config, 20), positions)


@pytest.mark.parametrize(("layer", "module"), [(0, "attention"), (4, "mlp")])
def test_two_swapped_lanes_are_located(layer, module):
    right, wrong = (random_model(small_config(), seed=4) for _ in range(2))
    part = wrong.layers[layer].attention.wo if module == "attention" else wrong.layers[layer].feed_forward.w2
    with torch.no_grad():
        part.weight[[1, 2]] = part.weight[[2, 1]]
    partials, reference, report = compare(wrong, right)
    assert report["first_wrong"] == [layer, module]
    wrong_lanes = output_errors(partials, reference)[:, layer, MODULES.index(module)] > 2.0**-12
    np.testing.assert_array_equal(wrong_lanes.all(0), [False, True, True, False])


def test_a_lost_message_is_located_where_it_was_due():
    config = small_config()
    model = random_model(config, seed=6)
    messages = [
        (layer, module) for layer in range(5) for module in MODULES if config.broadcasts(layer, module)
    ]
    assert messages == [(2, "attention"), (2, "mlp")], "from early layers alone, and early enough to arrive"
    for layer, module in messages:
        wrong = without_message(config, (layer, module))
        at = layer + config.broadcast_delay
        due = [at, "mlp"] if module == "attention" else [at + 1, "attention"]
        expected = (
            due if due[0] < config.num_hidden_layers else None
        )  # the last one is read by the head alone
        assert first_affected(config, wrong) == expected
        assert compare(model, config=wrong)[2]["first_wrong"] == expected


@pytest.mark.parametrize(("wrong_delay", "expected"), [(3, [2, "mlp"]), (1, [1, "mlp"])])
def test_a_wrong_delay_is_located(wrong_delay, expected):
    model, wrong = random_model(small_config(), seed=7), small_config(broadcast_delay=wrong_delay)
    assert first_affected(model.config, wrong) == expected
    assert compare(model, config=wrong)[2]["first_wrong"] == expected


def test_a_longer_window_is_located_in_the_first_layer_beyond_its_edge():
    model = random_model(small_config(), seed=8)
    report = compare(model, config=small_config(sliding_window=8))[2]
    assert report["first_wrong"] == [0, "attention"]
    assert min(row["depth"] for row in report["by_depth"] if row["of_allowed"] > 1) == 8
