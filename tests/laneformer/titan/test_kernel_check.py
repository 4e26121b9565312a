"""Tests that a job checks its kernels before it trains, and names and replaces those that fail."""

from __future__ import annotations

import copy

import pytest
import torch

from laneformer import LaneformerConfig
from laneformer.titan import float8, fused_layer, kernel_check
from laneformer.titan.float8 import RECIPES, Float8, Float8FeedForward, use_float8
from laneformer.titan.kernel_check import with_working_kernels
from laneformer.titan.parallelize import wrap_and_compile_layers
from laneformer.titan.spec import LaneformerArgs, TitanLaneformer
from tests.laneformer.titan.titan_assets import PlainJoinNorm
from train.job_config import load_job

# windowed layers and full ones; from the third on delayed outputs are added
CONFIG = LaneformerConfig.from_flavor(
    "tiny",
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    sliding_window=8,
    swa_layers=(0, 1, 2),
    vocab_size=512,
    use_early_comm=False,
)
SHAPE = (
    "--training.seq_len",
    "32",
    "--training.local_batch_size",
    "2",
    "--training.global_batch_size",
    "2",
)
PRECISION = "--training.mixed_precision_param"
# with selective checkpointing, through autograd's compiler, as a job runs it; a whole micro-batch
# of documents
COMPILED = (
    "--compile.enable",
    "--compile.backend",
    "aot_eager",
    "--activation_checkpoint.mode",
    "selective",
    "--activation_checkpoint.selective_ac_option",
    "op",
    "--model.mask_documents",
)


def job_of(*flags):
    return load_job(["--job.config_file", "configs/debug_phase1.toml", *SHAPE, *flags])


def check(job, attention="sdpa", join_norm="plain", float8=None) -> TitanLaneformer:
    with torch.device("meta"):
        model = TitanLaneformer(
            LaneformerArgs(config=CONFIG, attention=attention, join_norm=join_norm)
        )
        if float8 is not None:
            use_float8(model, float8)
    return with_working_kernels(model, job, wrap_and_compile_layers)


@pytest.mark.parametrize(
    ("flags", "wrong"),
    [
        ((PRECISION, "float32"), 1e-4),
        ((PRECISION, "bfloat16"), 0.05),
        pytest.param(COMPILED, 1e-4, marks=pytest.mark.job),
    ],
    ids=("float32", "bfloat16", "compiled"),
)
def test_a_wrong_kernel_is_replaced(monkeypatch, flags, wrong):
    # wrong by a few per cent in bfloat16; a correct one stays
    for error in (0.0, wrong):
        job = job_of(*flags)
        monkeypatch.setattr(fused_layer, "JoinNorm", PlainJoinNorm(error))
        model = check(job, join_norm="triton")
        assert bool(model.fallback) == bool(error), model.fallback
        assert model.model_args.join_norm == ("plain" if error else "triton")
        prepared = copy.deepcopy(model)
        wrap_and_compile_layers(prepared, job)
        compiled = prepared.layers[0]._compiled_call_impl is not None
        assert compiled == (job.compile.enable and not error)
        assert job.compile.components == ["model", "loss"], "the job is recorded as it was asked"
    assert {type(layer) for layer in model.layers} == {kernel_check.TitanLayer}
    assert {p.dtype for p in model.parameters()} == {torch.float32}, "the job's, not the check's"
    assert "model.join_norm = triton failed: layer 2 is off by" in model.fallback
    assert "this job trains with plain layers instead" in model.fallback


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("wrong", [0.0, 0.5])
def test_float8_products_are_checked(monkeypatch, recipe, wrong):
    # Compared with emulated products; on failure the job trains in its own type. Values that
    # bfloat16
    # rounds differently may round to another float8 value, so the check allows a fifth to a
    # quarter,
    # while a wrong scale is off by a factor. Here one gradient is off by half.
    multiply = float8.multiply_float8

    def plant(a, b, a_scale, b_scale, fast, out):
        of_weights = a.shape[1] == 2 * 32  # the tokens are summed
        multiply(a, b, a_scale * (1 + wrong * of_weights), b_scale, fast, out)

    monkeypatch.setattr(float8, "multiply_float8", plant)
    job = job_of(PRECISION, "bfloat16")
    model = check(job, float8=Float8(RECIPES[recipe], emulate=False))
    assert isinstance(model.layers[0].feed_forward, Float8FeedForward) == (not wrong), (
        model.fallback
    )
    assert bool(model.fallback) == bool(wrong)


def test_plain_kernels_and_emulated_products_cost_nothing(monkeypatch):
    monkeypatch.setattr(kernel_check, "layer_problem", None)
    assert check(job_of("--compile.enable")).fallback == ""
    assert check(job_of(), float8=Float8(RECIPES["rowwise"], emulate=True)).fallback == ""


def test_what_raises(monkeypatch):
    # Triton's kernels and FlexAttention's backward pass raise without a GPU and are replaced; an
    # exception in a plain layer ends the job
    for attention, join_norm, reason in (
        ("sdpa", "triton", "0 active drivers"),
        ("flex", "plain", "FlexAttention does not support backward on CPU"),
    ):
        model = check(job_of(), attention, join_norm)
        assert (model.model_args.attention, model.model_args.join_norm) == ("sdpa", "plain")
        assert reason in model.fallback
    monkeypatch.setattr(kernel_check, "rope_table", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        check(job_of(), join_norm="triton")
