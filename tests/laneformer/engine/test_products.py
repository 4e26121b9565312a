"""Tests of products with fp32 activations: near float64, and the same bits for a column in any company."""

from __future__ import annotations

import numpy as np
import pytest

from laneformer.engine.cpu import _core
from tests.laneformer.engine.assets import usable_isas

# test_matrix_unit.py runs these on emulated tiles where the CPU has none.
ISAS = usable_isas(("portable", "avx2", "avx512", "avx512_bf16", "amx"))
FEW = 3  # on the matrix unit, more bf16 columns round otherwise
COLUMNS = (2, FEW, 4, 6, 7, 11, 12, 13, 14, 100, 128)
MATHS = ("exact", "bf16")


def multiply(weights, x, dtype, math, isa) -> np.ndarray:
    return _core.multiply(weights, x, dtype, math, isa)[1].reshape(len(x), len(weights))


def in_bf16(x: np.ndarray) -> np.ndarray:
    """Round to the nearest bf16, ties to even; float32."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "int8"])
@pytest.mark.parametrize("isa", ISAS)
def test_a_column_has_the_bits_that_it_has_alone(isa, dtype):
    rng = np.random.default_rng(1)
    for rows, inputs in ((40, 66), (33, 255), (5, 8), (64, 576), (32, 1026)):
        weights = rng.standard_normal((rows, inputs)).astype(np.float32)
        x = rng.standard_normal((max(COLUMNS), inputs)).astype(np.float32)
        alone = np.concatenate([multiply(weights, row[None], dtype, "exact", isa) for row in x])
        # int8's, the coarsest
        rounded = np.abs(x).sum(1, keepdims=True) * np.abs(weights).max() / 254
        assert (np.abs(alone - x @ weights.T) <= 1.01 * rounded).all()
        for columns in COLUMNS:
            if isa == "amx" and dtype == "bf16" and columns > FEW:
                continue
            product = multiply(weights, x[:columns], dtype, "exact", isa)
            np.testing.assert_array_equal(product, alone[:columns], err_msg=f"{columns}")


@pytest.mark.parametrize("math", MATHS)
@pytest.mark.parametrize("isa", ISAS)
def test_a_column_depends_on_no_other_of_a_block(isa, math):
    rng = np.random.default_rng(2)
    weights = in_bf16(rng.standard_normal((72, 1090)))
    x = rng.standard_normal((128, 1090)).astype(np.float32)
    whole = multiply(weights, x, "bf16", math, isa)
    # a tile, a tile and a column, several tiles, wherever in the batch they begin
    for columns in (FEW + 1, 7, 16, 17, 33, 100):
        for first in (0, 1, 19):
            part = slice(first, first + columns)
            np.testing.assert_array_equal(
                multiply(weights, x[part], "bf16", math, isa), whole[part]
            )


def largest_error(isa, math) -> float:
    """Return a sum's largest error relative to the sum of its terms' magnitudes."""
    rng, worst = np.random.default_rng(3), 0.0
    for rows, inputs in (
        (1, 1),
        (16, 31),
        (31, 32),
        (33, 33),
        (64, 65),
        (136, 200),
        (40, 1056),
        (40, 2100),
    ):
        weights = in_bf16(rng.uniform(-1, 1, (rows, inputs)))
        for columns in (1, 3, 4, 15, 17, 32, 33, 128):
            x = rng.uniform(-1, 1, (columns, inputs)).astype(np.float32)
            inputs_used = (in_bf16(x) if math == "bf16" else x).astype(np.float64)
            exact, magnitude = inputs_used @ weights.T, np.abs(inputs_used) @ np.abs(weights.T)
            error = np.abs(multiply(weights, x, "bf16", math, isa) - exact) / magnitude
            worst = max(worst, float(error.max()))
    return worst


@pytest.mark.parametrize("math", MATHS)
@pytest.mark.parametrize("isa", ISAS)
def test_sums_are_near_float64(isa, math):
    error = largest_error(isa, math)
    assert error < 5e-7
    assert error < 3 * largest_error("portable", math)
