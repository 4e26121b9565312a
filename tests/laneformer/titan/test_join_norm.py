"""Tests of the join and norm kernels in Triton's interpreter, compiled for sm_90, and on a GPU."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from laneformer import LaneformerConfig
from laneformer.titan import join_norm_kernels
from laneformer.titan.join_norm import check_kernels
from laneformer.titan.spec import choose_join_norm
from tests.laneformer.titan.join_norm_interpreted import (
    CASES,
    draw,
    kernel_error,
    results,
    run_fused,
)

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.proof("tests/laneformer/titan/*.py")
def test_in_the_interpreter():
    # Triton's interpreter needs a separate process
    tests = Path(__file__).with_name("join_norm_interpreted.py")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", str(tests)]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    child = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1100)
    assert child.returncode == 0, child.stdout[-5000:] + child.stderr[-2000:]


# --- the kernels for sm_90, by Triton's compiler and ptxas, which need no GPU


def compile_for_sm90(kernel: Any, config: LaneformerConfig, **choices: Any) -> tuple[int, int]:
    """Return the registers per thread and the spilled bytes."""
    constants = {"L": config.num_lanes, "D": config.hidden_size, **choices}
    constants |= join_norm_kernels.tile(
        config.num_lanes, config.hidden_size, choices["LANE_SCALES"]
    )
    types = {"eps": "fp32", "T": "i32", "rstd": "*fp32", "d_weight": "*fp32"}
    signature, divisible = {}, {}
    for index, name in enumerate(kernel.arg_names):
        is_stride = name.endswith(("_token", "_lane"))
        kind = "i32" if is_stride else types.get(name, "*bf16")
        signature[name] = "constexpr" if name in constants else kind
        if name not in (*constants, "eps", "T"):
            divisible[(index,)] = [["tt.divisibility", 16]]
    log = io.StringIO()
    with (
        triton.knobs.nvidia.scope(),
        triton.knobs.compilation.scope(),
        contextlib.redirect_stdout(log),
    ):
        triton.knobs.nvidia.dump_ptxas_log = triton.knobs.compilation.always_compile = True
        source = ASTSource(kernel, signature, constexprs=constants, attrs=divisible)
        triton.compile(
            source, target=GPUTarget("cuda", 90, 32), options={"num_warps": join_norm_kernels.WARPS}
        )
    (registers,) = re.findall(r"Used (\d+) registers", log.getvalue())
    spilled = re.findall(r"(\d+) bytes spill", log.getvalue())
    assert len(spilled) == 2, log.getvalue()
    return int(registers), sum(map(int, spilled))


@pytest.mark.proof("tests/laneformer/titan/*.py")
@pytest.mark.parametrize("lane_scales", [False, True])
@pytest.mark.parametrize("flavor", ["2b", "300m"])
def test_the_kernels_compile_for_sm90_without_spills(flavor, lane_scales):
    # a layer has three: norm; join of delayed outputs and norm; the join after the MLP
    config = LaneformerConfig.from_flavor(flavor)
    for join, norm in ((False, True), (True, True), (True, False)):
        choices = {"DELAYED": join, "NORM": norm, "LANE_SCALES": norm and lane_scales}
        forward = compile_for_sm90(join_norm_kernels.forward_kernel, config, JOIN=join, **choices)
        backward = compile_for_sm90(
            join_norm_kernels.backward_kernel, config, HANDED_ON=join, **choices
        )
        print(
            f"{flavor} {join=} {norm=} {lane_scales=}: registers {forward[0]} forward, {backward[0]} backward"
        )
        assert forward[1] == backward[1] == 0, (choices, forward, backward)


# --- which path


def job(kind: str, lane_ranks: int = 1) -> Any:
    parallelism = SimpleNamespace(tensor_parallel_degree=lane_ranks)
    return SimpleNamespace(model=SimpleNamespace(join_norm=kind), parallelism=parallelism)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: the kernels can run")
def test_kernels_are_refused_without_a_gpu():
    assert choose_join_norm(job("auto")) == choose_join_norm(job("plain")) == "plain"
    with pytest.raises(ValueError, match="needs a GPU"):
        check_kernels()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_a_gpu(dtype):
    # the compiled kernels at the 2B model's width
    assert choose_join_norm(job("auto")) == "triton"
    assert choose_join_norm(job("auto", 2)) == "plain", "they sum lanes that a rank does not have"
    for how, delay, scale in CASES:
        assert kernel_error(how, 8, 3072, dtype, delay, scale, "cuda") <= 1, (how, delay, scale)
        inputs, gradients = draw(how, 8, 3072, dtype, delay, scale, "cuda")
        first, again = (results(inputs, gradients, how, run_fused) for _ in range(2))
        assert all(map(torch.equal, first, again)), "a step must repeat bit for bit"
