"""Tests of the CUDA engine on a GPU, skipped without one.

    pytest tests/laneformer/cuda/test_gpu.py

tools/check/cuda.py has the planted faults and the references for logits and tokens.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from laneformer import LaneformerConfig
from laneformer.engine import Engine, GenerationOptions, device
from laneformer.engine.cpu import _core
from laneformer.engine.cuda.passes import PassRunner
from laneformer.engine.cuda.structures import Column
from laneformer.engine.decoder import Sampling
from laneformer.engine.requests import make_request
from tests.laneformer.cuda.stand_ins import passes_of
from tools.check.cuda import check_flavor, greedy, score
from tools.check.reference import Weights, hf_logits, hf_model, random_weights, tensors_of

MISSING = device.why_no_cuda()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MISSING is not None, reason=f"no GPU: {MISSING}")]
TINY = LaneformerConfig.from_flavor("tiny")
PROMPT = [3, 1, 4, 1, 5]


def weights_of(config) -> Weights:
    return random_weights(config, device="cuda")


@pytest.fixture(scope="module")
def tiny():
    with Engine(TINY, tensors_of(weights_of(TINY)), device="cuda") as engine:
        yield engine


@pytest.mark.parametrize("flavor", ["tiny", "300m"])
def test_the_verdict(flavor):
    # both versions against Transformers; planted faults are refused
    figures = dict(check_flavor(flavor))
    assert figures["planted faults are refused"]
    assert not [name for name, value in figures.items() if value is False], figures


def test_float16():
    weights = {name: w.half() for name, w in weights_of(TINY).items()}
    ids = PROMPT * 6
    logits = score(PassRunner(TINY, tensors_of(weights), "fp16"), ids)
    # against fp32 the kernels may err no more than Transformers does in fp16
    single, half = (
        hf_logits(hf_model(TINY, weights, dtype), ids) for dtype in (torch.float32, torch.float16)
    )
    assert np.abs(logits - single).mean() <= np.abs(half - single).mean()


def test_lanes_in_two_memories_give_the_same_tokens(tiny):
    # the protocol between GPUs on one: two groups of lanes with their own memories and launches
    decoder = PassRunner(TINY, tensors_of(weights_of(TINY)), "bf16", devices=("cuda:0", "cuda:0"))
    assert greedy(decoder, PROMPT, 40) == tiny.generate(PROMPT, max_new_tokens=40)


def test_a_column_has_the_same_bits_in_any_company():
    # columns are those of a matrix instruction, so none may depend on another
    passes = PassRunner(TINY, tensors_of(weights_of(TINY)), "bf16")

    def logits(columns):
        rows = torch.empty(len(columns), TINY.vocab_size, device="cuda")
        passes.run(
            [Column(*column, sampling=Sampling(top_p=1.0)) for column in columns],
            logits=rows,
        )
        return rows

    alone = torch.cat([logits([(token, i, 0)]) for i, token in enumerate(PROMPT)])
    assert torch.equal(
        logits([(9, 0, 2), *((token, i, 1) for i, token in enumerate(PROMPT)), (8, 0, 3)])[1:-1],
        alone,
    )


# ---- requests ----


def test_a_wait_in_vain_is_reported_and_over(tiny):
    # one block is missing, so the others wait for its words
    passes = passes_of(tiny)
    tokens = greedy(passes, PROMPT, 9)
    kernels, limit_s = passes.kernels[0][0], passes.limit_s
    launch, passes.limit_s = kernels.launch, 0.05
    # a launch of one block less
    kernels.launch = lambda name, argument, blocks=None: launch(
        name, argument, passes.geometry.blocks - 1
    )
    try:
        with pytest.raises(
            RuntimeError, match=r"waited 0.05 s in vain: lane \d+, layer \d+, exchange '"
        ):
            passes.run([Column(5, 0, 0, sampling=Sampling(top_p=1.0))])
    finally:
        passes.limit_s = limit_s
        del kernels.launch
    assert greedy(passes, PROMPT, 9) == tokens


# ---- draws ----


def test_draws_are_those_of_the_core(tiny):
    # both versions, from the same logits, with filters and without
    options = {"max_new_tokens": 40, "temperature": 1.0, "reuse_prefix": False}
    with Engine(TINY, tensors_of(weights_of(TINY)), device="cuda", version="graph") as graph:
        for seed, filters in enumerate(({}, {"top_k": 7}, {"top_p": 0.6}, {"min_p": 0.2})):
            tokens = tiny.generate(PROMPT, seed=seed, **options, **filters)
            assert graph.generate(PROMPT, seed=seed, **options, **filters) == tokens
            request = make_request(
                GenerationOptions(temperature=1.0, seed=seed, **filters), [0], TINY.vocab_size
            )
            rows = score(passes_of(tiny), PROMPT + tokens)[len(PROMPT) - 1 : -1]
            assert tokens == [
                _core.sample(row, request, [], [], i) for i, row in enumerate(rows, len(PROMPT) - 1)
            ]
