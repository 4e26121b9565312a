"""Engines with int8 and int4 weights: the packed integers and scales, and the logits they lead to.

What int8 weights stand for is defined twice, in test_integer.py in numpy and in tools.check.reference in PyTorch.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from laneformer import Laneformer
from laneformer.engine import Engine
from laneformer.engine.cpu.decoder import RandomTensors
from tests.laneformer.engine.assets import (
    TORCH_DTYPES,
    engine_of,
    random_ids,
    random_model,
    small_config,
    small_model,
    usable_isas,
)
from tests.laneformer.engine.test_integer import unpacked
from tools.check.reference import dequantised

CONFIG = small_config()
IDS = random_ids(CONFIG, 50)
LARGEST = 127
HEADS = ("vocab_parallel", "replicate", "lane")


def first_matrix(engine: Engine) -> tuple[np.ndarray, np.ndarray]:
    """Integers (rows, D) and scales (rows,) of the first lane's wq, wk and wv, in float64."""
    config = engine.config
    rows = (config.hidden_size + 2 * config.head_dim * config.num_key_value_heads) // config.num_lanes
    tape_bytes = -(-rows // 32) * (64 * -(-config.hidden_size // 2) + 128)
    tape = engine._open().part(0)[:tape_bytes]
    groups, scales = unpacked(tape, rows, config.hidden_size, "int8")
    integers = groups.reshape(rows, -1)[:, : config.hidden_size]
    return integers.astype(np.float64), scales.astype(np.float64)


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_the_tape_holds_every_weight_rounded_once(dtype):
    model = random_model(CONFIG, dtype=dtype)
    layer = [model.state_dict()[f"layers.0.attention.{part}.weight"][0] for part in ("wq", "wk", "wv")]
    weights = torch.cat(layer).double().numpy()
    with engine_of(model, dtype="int8", threads=1) as engine:
        integers, scales = first_matrix(engine)
    steps = np.abs(weights).max(1) / LARGEST
    np.testing.assert_allclose(scales, steps, rtol=2**-24)  # one rounding to float32
    single = weights.astype(np.float32)
    quotients = single / (np.abs(single).max(1) / np.float32(LARGEST))[:, None]
    np.testing.assert_array_equal(integers, np.rint(quotients))
    meant = dequantised(model.state_dict())["layers.0.attention.wq.weight"][0].numpy()
    np.testing.assert_array_equal((integers * scales[:, None])[: len(meant)], meant)


def test_rows_of_zeros_or_nearly_so_stay_zeros():
    model = random_model(CONFIG)
    wq = model.state_dict()["layers.0.attention.wq.weight"]
    wq[0, 0], wq[0, 1] = 0.0, 1e-37  # which over 127 is no normal number any more
    with engine_of(model, dtype="int8", threads=1) as engine:
        integers, scales = first_matrix(engine)
        assert np.isfinite(engine.logits(IDS)).all()
    assert not scales[:2].any()
    assert not integers[:2].any()


def powers_of_two(model: Laneformer) -> Laneformer:
    """Every row in whole multiples of a power of two, 127 of them somewhere: int8 holds such a model exactly."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" not in name and "embeddings" not in name:
                integers = torch.randint(-LARGEST, LARGEST + 1, p.shape, generator=generator)
                integers[..., 3] = -LARGEST
                p.copy_(integers * 2.0 ** -torch.randint(7, 11, (*p.shape[:-1], 1), generator=generator))
    return model


@pytest.mark.parametrize("head", HEADS)
def test_a_model_that_int8_holds_gives_the_bits_of_fp32(head):
    """Sums of integers, scaled at their end by a power of two, round as the sums of the scaled weights do."""
    model = powers_of_two(small_model(lm_head_type=head))
    for isa in usable_isas():
        with engine_of(model, isa=isa) as single, engine_of(model, dtype="int8", isa=isa) as small:
            np.testing.assert_array_equal(small.logits(IDS), single.logits(IDS))


def test_values_that_are_no_numbers_are_refused():
    name = "layers.2.feed_forward.w3.weight"
    for dtype, bad in (("int8", "nan"), ("int8", "inf"), ("int4", "-inf")):
        model = random_model(CONFIG, dtype="bf16")
        model.state_dict()[name][1, 7, 0] = float(bad)
        with pytest.raises(ValueError, match=f"{name} holds values that are not finite"):
            engine_of(model, dtype=dtype)


def test_a_weight_takes_a_byte_or_half_of_one_and_the_embedding_keeps_its_type():
    """int4: but for the outer layers and the head. Scales and padding to tiles come on top."""
    wide = small_config(hidden_size=256, intermediate_size=512, num_hidden_layers=12, swa_layers=())
    bytes_of = {}
    for dtype in ("bf16", "int8", "int4"):
        with engine_of(random_model(wide, dtype="bf16"), dtype=dtype, threads=2) as engine:
            bytes_of[dtype] = engine.weight_bytes
            assert engine._open().part(2).nbytes == 2 * wide.vocab_size * wide.hidden_size
    assert 0.5 < bytes_of["int8"] / bytes_of["bf16"] < 0.53
    assert 0.3 < bytes_of["int4"] / bytes_of["bf16"] < 0.36


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_random_weights_are_the_16_bit_ones_rounded(dtype):
    rounded = Engine(CONFIG, RandomTensors(CONFIG, "bf16", 5), dtype=dtype)
    with Engine.random(CONFIG, dtype, seed=5) as drawn, rounded:
        assert drawn.dtype == dtype
        np.testing.assert_array_equal(drawn.logits(IDS), rounded.logits(IDS))


def test_what_does_not_fit_together_is_refused():
    model = random_model(CONFIG, dtype="bf16")
    for options, message in (
        ({"dtype": "int8", "math": "bf16"}, "math = 'bf16' needs bf16 weights, these are int8"),
        ({"dtype": "int2"}, r"'int2' is unknown; choose from \('auto', .*'int8', 'int4', 'gguf'\)"),
        ({"dtype": "int4", "math": "exact"}, r"math = 'exact' needs .* these are int4; use math = 'int8'"),
        ({"math": "int8"}, "math = 'int8' needs int8 or int4 or gguf weights, these are bf16"),
        ({"math": "int3"}, r"'int3' is unknown; choose from \('auto', 'fast', 'exact', 'bf16', 'int8'\)"),
    ):
        with pytest.raises(ValueError, match=message):
            engine_of(model, **options)
