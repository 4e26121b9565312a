"""Tests of GGUF blocks: read as ggml defines them, multiplied with equal bits on every instruction set,
and served without a second rounding.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize

from laneformer import Engine
from laneformer.engine.cpu import _core
from laneformer.engine.cpu.spec import choose_types
from laneformer.engine.folder import read_checkpoint
from tests.laneformer.engine.test_integer import ISAS, round_inputs
from tests.laneformer.llama.folders import engine_logits
from tests.laneformer.llama.gguf_assets import BLOCKS, random_blocks, random_llama, write_gguf

single = np.float32
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}  # whole blocks of 256 inputs
NARROW = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
IDS = np.random.default_rng(0).integers(3, 320, 60).tolist()
ROUNDED = 0.03  # of the logits' spread, on average: inputs are rounded to int8


@pytest.mark.parametrize("kind", BLOCKS)
def test_rows_come_out_of_the_tape_as_ggml_widens_them(kind):
    # exact, except for IQ4_XS, whose products of two scales are rounded to fp16; also where lanes
    # split rows
    assert {kind.upper() for kind in _core.BLOCKS} == BLOCKS.keys()
    data = random_blocks(kind, 70, 768)
    whole = dequantize(data, GGMLQuantizationType[kind])
    for first, end in ((0, 768), (384, 768), (160, 480), (224, 256)):
        x, expected = np.zeros((1, end - first), single), whole[:, first:end]
        rows, _ = _core.multiply_blocks(data, x, kind.lower(), "portable", first)
        error = np.abs(rows.reshape(expected.shape) - expected).max() / np.abs(expected).max()
        assert error <= (2.0**-10 if kind == "IQ4_XS" else 0), (first, end)


def test_scales_of_mxfp4_have_every_exponent():
    # from a subnormal scale to the last one whose largest weight is a float32; larger are refused
    data = random_blocks("MXFP4", 253, 32)
    # every exponent of a block's scale
    data[:, 0], data[:, 1] = np.arange(253), 0xF7  # and its largest weight, both ways
    rows, _ = _core.multiply_blocks(data, np.zeros((1, 32), single), "mxfp4", "portable")
    expected = dequantize(data, GGMLQuantizationType.MXFP4)
    np.testing.assert_array_equal(rows.reshape(expected.shape), expected)
    assert np.array_equal(np.abs(expected).max(-1), 6 * 2.0 ** (np.arange(253.0) - 127))
    x = np.full((1, 32), 2.0**-90, single)
    products = [_core.multiply_blocks(data, x, "mxfp4", isa)[1] for isa in ISAS]
    assert all(np.array_equal(products[0], product) for product in products)
    with pytest.raises(ValueError, match="not finite"):
        _core.multiply_blocks(
            np.full((1, 17), 253, np.uint8), np.zeros((1, 32), single), "mxfp4", "portable"
        )


def define_product(rows: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the product (columns, rows) in float64, with inputs rounded as the kernels round them."""
    inputs, scales = round_inputs(x)
    return (inputs * scales[..., None].astype(np.float64)).reshape(len(x), -1) @ rows.astype(
        np.float64
    ).T


@pytest.mark.parametrize("kind", BLOCKS)
def test_products_are_those_of_the_rows(kind):
    # to float32's own error; the same bits on every instruction set and for any number of columns
    x = np.random.default_rng(1).standard_normal((13, 512)).astype(single)
    # a group of zeros has no scale
    x[0, :32] = 0
    for count, before in ((5, 0), (32, 96), (70, 128)):
        data = random_blocks(kind, count, 768)
        rows, first = _core.multiply_blocks(data, x, kind.lower(), ISAS[0], before)
        expected, first = define_product(rows.reshape(count, 512), x), first.reshape(13, count)
        bound = np.abs(x).max() * np.abs(rows).max() * 512 * 2.0**-22
        np.testing.assert_allclose(first, expected, rtol=0, atol=bound)
        for isa, columns in itertools.product(ISAS, (1, 2, 3, 4, 5, 8, 13)):
            _, product = _core.multiply_blocks(data, x[:columns], kind.lower(), isa, before)
            assert np.array_equal(product.reshape(columns, count), first[:columns]), isa


def write(folder: Path, kind: Any, **overrides: Any) -> Path:
    return write_gguf(
        folder / "model.gguf", "llama", random_llama("llama", **{**WIDE, **overrides}), kind
    )


def difference(path: Path, exact: np.ndarray, **options: Any) -> float:
    """Return the mean difference between the engine's logits and `exact`, relative to their deviation."""
    return float(np.abs(engine_logits(path, IDS, **options) - exact).mean() / exact.std())


def choose_by_place(name: str) -> str:
    """Return a matrix's type in a mixture such as llama.cpp's."""
    if name in ("token_embd.weight", "output.weight"):
        return "Q6_K"
    parts = {"attn_v": "Q6_K", "ffn_down": "Q5_K", "attn_k": "Q8_0", "attn_output": "F16"}
    return parts.get(name.split(".")[-2], "Q4_K")


@pytest.mark.parametrize(
    ("kind", "tied"), [*((kind, False) for kind in (*BLOCKS, "mixed")), ("mixed", True)]
)
def test_a_file_is_served_as_it_is(tmp_path, kind, tied):
    # Only inputs are rounded, as by int8 arithmetic with any weights. A separate embedding is
    # widened
    # to halves as in ggml. 384 columns per lane split a superblock, and lanes read its scales
    # there.
    shapes = {"tie_word_embeddings": tied, "intermediate_size": 768}
    path = write(tmp_path, choose_by_place if kind == "mixed" else kind, **shapes)
    exact = engine_logits(path, IDS, dtype="fp32", threads=1)
    with Engine.from_pretrained(path, cache=False, threads=1, lanes=1) as engine:
        assert (engine.dtype, engine.math) == ("gguf", "int8")
        alone = engine.logits(IDS)
    assert np.abs(alone - exact).mean() / exact.std() < ROUNDED
    with Engine.from_pretrained(path, cache=False, threads=3, lanes=1) as engine:
        assert np.array_equal(engine.logits(IDS), alone)
    if kind != "mixed":
        checkpoint = read_checkpoint(path, lanes=2)
        assert (
            choose_types(checkpoint.config, checkpoint.tensors)[0][5] == _core.BLOCKS[kind.lower()]
        )
    assert difference(path, exact, threads=2, lanes=2) < ROUNDED


def test_what_cannot_be_held_is_rounded_to_eight_bits(tmp_path):
    # where lanes would split blocks, and where w1 and w3, which share tiles, differ in type
    path = write(tmp_path, "Q4_0", **NARROW)
    cut = read_checkpoint(path, lanes=2)
    assert choose_types(cut.config, cut.tensors)[0] == [*["q4"] * 5, "int8", "q4", "int8"]
    assert read_checkpoint(path, gpus=2).dtype == "int8", "GPUs take eight bits"
    assert difference(path, engine_logits(path, IDS, dtype="fp32"), lanes=2) < ROUNDED
    mixed = write(tmp_path, lambda name: "Q5_1" if "ffn_up" in name else "Q4_0", **NARROW)
    whole = read_checkpoint(mixed, lanes=1)
    assert choose_types(whole.config, whole.tensors)[1] == [
        *["q4"] * 4,
        "int8",
        "q4",
        "int8",
        "int8",
    ]
    assert difference(mixed, engine_logits(mixed, IDS, dtype="fp32"), lanes=1) < ROUNDED


def test_values_that_are_not_finite_are_refused(tmp_path):
    path = write(tmp_path, "Q4_0")
    data = bytearray(path.read_bytes())
    tensor = next(t for t in GGUFReader(path).tensors if t.name == "blk.1.ffn_down.weight")
    # a block of Q4_0 begins with its scale
    data[tensor.data_offset : tensor.data_offset + 2] = np.float16(np.inf).tobytes()
    path.write_bytes(data)
    with pytest.raises(
        ValueError, match=r"layers\.1\.feed_forward\.w2\.weight holds values that are not fin"
    ):
        Engine.from_pretrained(path, cache=False)
