"""Tests of passes of several columns: equal bits in any company; batches and drafts change no token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from laneformer.engine.cuda.executor import CudaExecutor
from laneformer.engine.decoder import Collected, Request
from tests.laneformer.cuda.emulated import EmulatedPasses, emulator_proof
from tests.laneformer.cuda.stand_ins import answers
from tests.laneformer.cuda.test_ahead import WAYS

pytestmark = emulator_proof


def text(count, seed=1) -> list[int]:
    return torch.randint(96, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def one_by_one(passes, ids) -> torch.Tensor:
    return torch.cat([passes.logits([(token, position, 0)]) for position, token in enumerate(ids)])


def decode(executor, prompts, sampling, **options) -> list[Collected]:
    pairs = zip(prompts, sampling, strict=True)
    return answers(executor, [Request(ids, 9, sampling=s, **options) for ids, s in pairs])


def test_batches_and_drafts_change_no_token(cuda_builds):
    # greedy, drawn and filtered; prompts of several lengths are read beside those that decode
    prompts = [text(3), [5, 6, 7, 5, 6, 7, 5, 6], text(11, 4)]
    single = EmulatedPasses(cuda_builds, 1)
    single.unread = 64
    one = CudaExecutor(single)
    alone = [decode(one, [p], [w])[0].tokens for p, w in zip(prompts, WAYS, strict=True)]
    five = EmulatedPasses(cuda_builds, 5)
    executor = CudaExecutor(five)
    assert [news.tokens for news in decode(executor, prompts, WAYS)] == alone
    assert five.passes <= 5 + 9, "22 ids of prompts, then nine tokens of all three"
    executor.schedule.fix_cost(0.02)
    proposed = accepted = 0
    for prompt, way, tokens in zip(prompts, WAYS, alone, strict=True):
        prediction = [*prompt, *tokens[:2], 95 - tokens[2], *tokens[3:]]
        drafting = decode(executor, [prompt], [way], speculate=4, prediction=prediction)[0]
        assert drafting.tokens == tokens
        proposed += drafting.whole.statistics["proposed_tokens"]
        accepted += drafting.whole.statistics["accepted_tokens"]
    assert proposed > accepted > 6


def test_each_option_as_alone(cuda_builds):
    # the kernel draws some, the schedule others from rows of logits; drafts occur in both
    ids = [70, 70, 22, 70, 70, 22, 62, 70, 70, 22]
    requests = [
        Request(ids, 9, speculate=3),
        Request(ids, 9, speculate=3, repetition_penalty=1.3, frequency_penalty=0.5, logprobs=2),
        Request(
            text(4), 6, sampling=WAYS[2], logit_bias=[(7, 3.0)], stop_ids=[70], min_new_tokens=5
        ),
        Request(text(7), 8, sampling=WAYS[1], logprobs=0),
        Request(text(9), 8, sampling=WAYS[2], stop_ids=range(40)),
    ]
    executor = CudaExecutor(EmulatedPasses(cuda_builds, 5))
    executor.schedule.fix_cost(0.02)
    alone = [answers(executor, [replace(r, reuse_prefix=False)])[0] for r in requests]
    side_by_side = answers(executor, requests)
    for single, other in zip(alone, side_by_side, strict=True):
        assert other.tokens == single.tokens
        for ours, theirs in zip(other.scores or (), single.scores or (), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert side_by_side[1].tokens != side_by_side[0].tokens
