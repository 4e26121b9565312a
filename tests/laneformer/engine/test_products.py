"""Products with fp32 activations: a column has the same bits alone and among any number of others."""

from __future__ import annotations

import numpy as np
import pytest

from laneformer.engine.cpu import _core
from tests.laneformer.engine.assets import usable_isas

FEW = 3  # on the matrix unit, more bf16 columns round otherwise (test_matrix_unit.py)
COLUMNS = (2, FEW, 4, 6, 7, 11, 12, 13, 14, 100, 128)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "int8"])
@pytest.mark.parametrize("isa", usable_isas(("portable", "avx2", "avx512", "avx512_bf16", "amx")))
def test_a_column_has_the_bits_that_it_has_alone(isa, dtype):
    rng = np.random.default_rng(1)
    for rows, inputs in ((40, 66), (33, 255), (5, 8), (64, 576), (32, 1026)):
        weights = rng.standard_normal((rows, inputs)).astype(np.float32)
        x = rng.standard_normal((max(COLUMNS), inputs)).astype(np.float32)
        alone = np.stack([_core.multiply(weights, row[None], dtype, "exact", isa)[1] for row in x])
        rounded = np.abs(x).sum(1, keepdims=True) * np.abs(weights).max() / 254  # int8's, the coarsest
        assert (np.abs(alone - x @ weights.T) <= 1.01 * rounded).all()
        for columns in COLUMNS:
            if isa == "amx" and dtype == "bf16" and columns > FEW:
                continue
            _, product = _core.multiply(weights, x[:columns], dtype, "exact", isa)
            np.testing.assert_array_equal(
                product.reshape(columns, rows), alone[:columns], err_msg=f"{columns}"
            )
