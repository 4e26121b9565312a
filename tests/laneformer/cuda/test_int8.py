"""Tests of int8 weights on the GPU: the CPU's numbers, every code, every logit on the emulator, prompts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from laneformer.config import HEAD, LaneformerConfig
from laneformer.engine.cuda.bench import weight_bytes
from laneformer.engine.cuda.geometry import H200, OPS
from laneformer.engine.cuda.int8 import quantize
from laneformer.engine.cuda.memory import DeviceMemory
from laneformer.engine.cuda.planning import plan
from laneformer.engine.cuda.tape_model import TapeModel
from tests.laneformer.cuda.emulated import EmulatedPasses, needs_emulator
from tests.laneformer.cuda.harness import SMALL, random_model, small_config, tensors_of
from tests.laneformer.cuda.shapes import SHAPES, Shape
from tests.laneformer.cuda.test_kernels import check
from tests.laneformer.engine.test_integer import draw_weights, pack_rows
from tests.proofs import CORE_SOURCES, KERNEL_SOURCES


def proof(test):
    return pytest.mark.proof(*KERNEL_SOURCES, *CORE_SOURCES)(needs_emulator(test))


# tools/check/reference.py defines the weights that int8 stands for, the reference of all logits.
SHAPES_INT8 = {
    "fp16 beside it": SHAPES["delay 0"],
    # tapes that end within a chunk; most warps have no tile of some matrix
    "eight lanes": Shape(
        {
            "num_lanes": 8,
            "broadcast_delay": 2,
            "hidden_size": 128,
            "intermediate_size": 768,
            "num_key_value_heads": 8,
            "num_attention_heads": 16,
            "head_dim": 48,
            "vocab_size": 768,
        },
        blocks=1,
        warps=3,
        chunk_bytes=1024,
    ),
    "on two GPUs": Shape({"num_hidden_layers": 3}, blocks=3, devices=2),
}


def emulate(name, builds) -> EmulatedPasses:
    """Return the kernels of a shape with int8 weights, whatever its 16-bit type."""
    shape = SHAPES_INT8[name]
    return dataclasses.replace(shape, dtype="int8").emulate(builds, half=shape.dtype)


def test_int8_numbers_are_the_cpus():
    weights = draw_weights(72, 96)
    integers, scales = pack_rows(weights, "int8")
    numbers, own_scales = quantize(torch.from_numpy(weights))
    np.testing.assert_array_equal((numbers ^ -128).numpy(), integers.reshape(weights.shape))
    np.testing.assert_array_equal(own_scales.numpy(), scales)


def test_rows_of_zeros_and_values_that_are_not_finite():
    # rows too small for a scale are zeros; infinite ones must not pass for numbers
    rows = torch.tensor(
        [[0.0, 0.0], [1e-38, -1e-39], [3.0, -1.5], [float("nan"), 1.0], [1.0, -float("inf")]]
    )
    numbers, scales = quantize(rows)
    assert scales[:3].tolist() == [0, 0, np.float32(3) / np.float32(127)]
    assert not scales[3:].isfinite().any()
    assert not (numbers[:2] ^ -128).any()
    tensors = tensors_of(random_model(small_config()), "bf16")
    name = "layers.1.feed_forward.w2.weight"
    # bf16's infinity
    tensors[name].values.flat[3] = 0x7F80
    with pytest.raises(ValueError, match=f"tensor {name} holds values that are not finite"):
        DeviceMemory(plan(small_config(), "int8", SMALL), tensors, 0, "cpu")


@proof
@pytest.mark.parametrize("name", SHAPES_INT8)
def test_every_logit(name, cuda_builds):
    check(emulate(name, cuda_builds), 9, range(1))


def test_prompts_have_the_weights_that_int8_stands_for():
    # rounded to fp32, as in the CPU engine, then to the prompt's 16 bits
    kernels = emulate("on two GPUs", Path())
    stored = kernels.model.state_dict()
    model = TapeModel(kernels.memories)
    for i, layer in enumerate(model.layers()):
        for key, values in layer.state_dict().items():
            assert torch.equal(values, stored[f"layers.{i}.{key}"].float().bfloat16()), key
    assert torch.equal(model.head(), stored[HEAD].float().bfloat16())


def test_tapes_hold_a_byte_for_each_weight():
    # and one scale per row; a token has half as many segments
    config = LaneformerConfig.from_flavor("2b")
    eight, sixteen = plan(config, "int8", H200), plan(config, "bf16", H200)
    assert dataclasses.replace(eight, dtype="bf16") == sixteen
    rows = {op: eight.matrix(op).rows for op in OPS}
    rows_of_all = 8 * (15 * (sum(rows.values()) - rows["head"]) + rows["head"])
    assert weight_bytes(eight) == weight_bytes(sixteen) // 2 + 4 * rows_of_all == 2_226_590_720
