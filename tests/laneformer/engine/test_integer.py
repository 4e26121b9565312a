"""Tests of int8 and int4 weights, products with activations rounded to int8, and their engines."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from laneformer import Laneformer
from laneformer.engine.cpu import _core
from laneformer.engine.cpu.decoder import choose_math
from tests.laneformer.engine.assets import (
    ISAS_BELOW_AMX,
    engine_of,
    random_ids,
    random_model,
    small_config,
    small_model,
    usable_isas,
)
from tests.laneformer.int8_weights import round_to_int8

ISAS = usable_isas(ISAS_BELOW_AMX)
LEVELS = np.array([0, 14, 26, 35, 43, 51, 58, 64, 70, 76, 82, 89, 96, 104, 114, 127]) - 69
GROUP, LARGEST = 32, 127
HEADS = ("vocab_parallel", "replicate", "lane")
single = np.float32


def draw_weights(rows, inputs, seed=0) -> np.ndarray:
    """Return rows of very different magnitude."""
    # the first four rows have only their largest value, in all combinations of signs
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((rows, inputs)) * 10.0 ** rng.integers(-3, 2, (rows, 1))
    values[:4] = np.where(
        np.arange(inputs) // 2 % 2, [[1], [-1], [1], [-1]], [[1], [1], [-1], [-1]]
    )[: len(values)]
    return values.astype(single)


def in_groups(values: np.ndarray) -> np.ndarray:
    """Reshape (rows, inputs) to (rows, groups, 32), padded with zeros."""
    rows, inputs = values.shape
    return np.pad(values, ((0, 0), (0, -inputs % GROUP))).reshape(rows, -1, GROUP)


def round_inputs(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the inputs' integers (columns, groups, 32) and scales (columns, groups)."""
    groups = in_groups(x)
    largest = np.abs(groups).max(-1)
    scales = largest / single(127)
    scales[scales < np.finfo(single).tiny] = 0
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(scales > 0, single(127) / largest, single(0))
    return np.rint(groups * inverse[..., None]).astype(np.int64), scales


def unpack_tape(tape, rows, inputs, dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return integers (rows, groups, 32), and scales per row and group (int4) or per row (int8)."""
    # the layout is that of kernels.h
    tiles, pairs, groups = -(-rows // 32), -(-inputs // 2), -(-inputs // GROUP)
    tape = tape.reshape(tiles, -1)
    if dtype == "int8":
        # tile, pair of inputs, row, half of the tile, input of the pair
        lines = tape[:, : 64 * pairs].view(np.int8).reshape(tiles, pairs, 16, 2, 2)
        integers = lines.transpose(0, 3, 2, 1, 4).reshape(tiles * 32, 2 * pairs)[:rows]
        scales = np.ascontiguousarray(tape[:, 64 * pairs :]).view(single).reshape(-1)[:rows]
        return in_groups(integers.astype(np.int64)), scales
    # 512 bytes of nibbles and 64 of fp16 scales for each group of 32 inputs of a tile's 32 rows
    tape = tape.reshape(tiles, groups, 576)
    # eight inputs, group of rows, row, byte
    lines = tape[:, :, :512].reshape(tiles, groups, 4, 2, 16, 4)
    nibbles = np.stack([lines & 15, lines >> 4], 5)
    bits = nibbles.transpose(0, 3, 4, 1, 2, 5, 6).reshape(tiles * 32, groups, GROUP)
    scales = (
        np.ascontiguousarray(tape[:, :, 512:])
        .view(np.float16)
        .transpose(0, 2, 1)
        .reshape(tiles * 32, groups)
    )
    return LEVELS[bits[:rows]], scales[:rows].astype(single)


# NumPy defines the products here, and every instruction set must match them bit for bit.
# test_bits.py shows that threads and blocks change no bit.
def multiply_by_definition(tape, x, rows, dtype) -> np.ndarray:
    """Return the product (columns, rows)."""
    # integers are summed exactly; then each float32 operation rounds
    integers, scales = unpack_tape(tape, rows, x.shape[1], dtype)
    inputs, input_scales = round_inputs(x)
    sums = np.einsum("rgk,cgk->gcr", integers, inputs).astype(single)
    total = np.zeros((len(x), rows), single)
    for group, products in enumerate(sums):
        scale = input_scales[:, group, None]
        total += (scales[:, group] * scale if dtype == "int4" else scale) * products
    return total if dtype == "int4" else total * scales


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("isa", ISAS)
def test_products_have_the_bits_of_their_definition(isa, dtype):
    # rows that fill tiles and do not, inputs that are whole groups of 32 and are not
    for rows, inputs in ((32, 32), (40, 34), (5, 8), (70, 96), (33, 136), (64, 12), (96, 576)):
        weights, x = draw_weights(rows, inputs), draw_weights(13, inputs, seed=1)
        tape, _ = _core.multiply(weights, x, dtype, "int8", isa)
        expected = multiply_by_definition(tape, x, rows, dtype)
        for columns in (1, 2, 3, 4, 5, 6, 7, 8, 13):
            same, product = _core.multiply(weights, x[:columns], dtype, "int8", isa)
            np.testing.assert_array_equal(same, tape)
            np.testing.assert_array_equal(
                product.reshape(columns, rows), expected[:columns], err_msg=f"{columns}"
            )


def test_inputs_too_small_for_a_scale_are_zeros():
    x = np.full((2, 64), 1e-37, single)
    # one group of the second column has a scale: zeros go by group, not by column
    x[1, :32] = 3.0
    weights = draw_weights(32, 64)
    tape, product = _core.multiply(weights, x, "int4", "int8", "auto")
    np.testing.assert_array_equal(
        product.reshape(2, 32), multiply_by_definition(tape, x, 32, "int4")
    )
    np.testing.assert_array_equal(product[:32], 0)


def pack_rows(weights: np.ndarray, dtype: str = "int4") -> tuple[np.ndarray, np.ndarray]:
    """Return the packed weights as `unpack_tape` does."""
    # the product is not used
    tape, _ = _core.multiply(weights, weights[:1], dtype, "int8", "portable")
    return unpack_tape(tape, *weights.shape, dtype)


def test_int8_holds_every_weight_rounded_once():
    # whole multiples of a row's scale, as in round_to_int8; rows too small for a scale are zeros
    weights = draw_weights(72, 96)
    weights[5], weights[6] = 0.0, 1e-37  # which over 127 is no normal number any more
    integers, scales = pack_rows(weights, "int8")
    steps = np.abs(weights).max(1).astype(np.float64) / LARGEST
    steps[steps < np.finfo(single).tiny] = 0
    np.testing.assert_allclose(scales, steps, rtol=2**-24)  # one rounding to float32
    expected = round_to_int8({"w": torch.from_numpy(weights)})["w"].numpy()
    np.testing.assert_array_equal(
        integers.reshape(weights.shape) * scales[:, None].astype(np.float64), expected
    )


def test_the_scales_are_nearly_the_best_ones():
    # within 3% of the squared error of a search over 80 scales; a quarter below that of equal steps
    groups = np.random.default_rng(3).standard_normal((2000, GROUP)).astype(single)
    levels, scales = pack_rows(groups)
    error = ((groups - levels[:, 0] * scales) ** 2).sum()
    peak = groups[np.arange(len(groups)), np.abs(groups).argmax(1)][:, None]
    best = np.full(len(groups), np.inf)
    # the levels reach from -69 to 58: search scales that map the peak to either end
    for edge in (*np.linspace(-90, -50, 40), *np.linspace(40, 80, 40)):
        nearest = np.abs(groups[..., None] - LEVELS * (peak / edge)[..., None]).min(-1)
        best = np.minimum(best, (nearest**2).sum(-1))
    assert error < 1.03 * best.sum()
    step = peak / -8
    equal = np.clip(np.rint(groups / step), -8, 7) * step
    assert error < 0.75 * ((groups - equal) ** 2).sum()


def test_zeros_stay_zeros_and_small_or_large_weights_are_no_surprise():
    weights = np.zeros((3, 64), single)
    weights[1, 32:] = 1e-9  # below what a scale in fp16 can hold
    weights[2, 32:] = 2.0**20
    levels, scales = pack_rows(weights)
    np.testing.assert_array_equal(scales[:2], 0)
    np.testing.assert_allclose(levels[2, 1] * scales[2, 1], 2.0**20, rtol=0.01)
    for bad in (2.0**21, np.inf, np.nan):
        weights[0, 40] = bad
        with pytest.raises(ValueError, match="not finite"):
            pack_rows(weights)


def powers_of_two(model) -> Laneformer:
    """Replace weights by values that int8 holds exactly."""
    # whole multiples of a power of two for each row, with 127 of them somewhere
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" not in name and "embeddings" not in name:
                integers = torch.randint(-LARGEST, LARGEST + 1, p.shape, generator=generator)
                # so that the row's scale is the power of two itself
                integers[..., 3] = -LARGEST
                p.copy_(
                    integers * 2.0 ** -torch.randint(7, 11, (*p.shape[:-1], 1), generator=generator)
                )
    return model


@pytest.mark.parametrize("head", HEADS)
def test_a_model_that_int8_holds_gives_the_bits_of_fp32(head):
    # sums of integers scaled by a power of two round as sums of the scaled weights do
    model = powers_of_two(small_model(lm_head_type=head))
    ids = random_ids(model.config, 50)
    for isa in usable_isas():
        with engine_of(model, isa=isa) as single, engine_of(model, dtype="int8", isa=isa) as small:
            np.testing.assert_array_equal(small.logits(ids), single.logits(ids))


@pytest.mark.parametrize("head", HEADS)
def test_logits_are_near_those_of_exact_activations(head):
    # rounding activations costs about a hundredth of the logits' spread; more is a fault
    model = small_model(lm_head_type=head, seed=1, dtype="bf16")
    ids = random_ids(model.config, 50)
    with (
        engine_of(model, dtype="int8") as exact,
        engine_of(model, dtype="int8", math="int8") as integer,
    ):
        reference, logits = exact.logits(ids), integer.logits(ids)
    error = np.linalg.norm(logits - reference) / np.linalg.norm(
        reference - reference.mean(-1, keepdims=True)
    )
    assert 1e-4 < error < 0.04


@pytest.mark.parametrize(
    ("dtype", "isa", "auto", "fast"),
    [
        ("int8", "avx2", "exact", "int8"),
        ("int4", "avx2", "int8", "int8"),
        ("gguf", "avx2", "int8", "int8"),
        ("fp32", "avx512_bf16", "exact", "exact"),
        ("fp16", "avx512_bf16", "exact", "exact"),
        ("bf16", "avx512_vnni", "exact", "exact"),
        ("bf16", "avx512_bf16", "exact", "bf16"),
        ("bf16", "amx", "exact", "bf16"),
    ],
)
def test_what_is_fast_depends_on_the_weights_and_the_cpu(monkeypatch, dtype, isa, auto, fast):
    monkeypatch.setattr(_core, "isa_of", lambda name: isa)
    assert (choose_math("auto", dtype, "auto"), choose_math("fast", dtype, "auto")) == (auto, fast)


def test_a_weight_takes_a_byte_or_half_of_one_and_the_embedding_keeps_its_type():
    # scales and padding to tiles add to it; in int4, outer layers and the head keep more bits
    wide = small_config(hidden_size=256, intermediate_size=512, num_hidden_layers=12, swa_layers=())
    bytes_of = {}
    for dtype in ("bf16", "int8", "int4"):
        with engine_of(random_model(wide, dtype="bf16"), dtype=dtype, threads=2) as engine:
            bytes_of[dtype] = engine.weight_bytes
            assert engine._open().part(2).nbytes == 2 * wide.vocab_size * wide.hidden_size
    assert 0.5 < bytes_of["int8"] / bytes_of["bf16"] < 0.53
    assert 0.3 < bytes_of["int4"] / bytes_of["bf16"] < 0.36
