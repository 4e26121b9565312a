"""The engine on the emulated kernels: the CPU engine's tokens, and nothing of a request that ended
badly in the next.

Everything but the launch is what runs on a GPU: memory, prompts through PyTorch, what is
claimed of the cache.
"""

from __future__ import annotations

import copy
import threading
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from laneformer.engine import Engine
from laneformer.engine.cuda.single import SinglePasses
from laneformer.engine.decoder import RequestFailed
from tests.laneformer.cuda import emulator
from tests.laneformer.cuda.harness import random_model, small_config, tensors_of
from tests.laneformer.cuda.stand_ins import gpu_of, passes_of, without_tiles
from tests.laneformer.engine.test_joined import collect, tokens_of
from tests.proofs import CORE_SOURCES, KERNEL_SOURCES

pytestmark = [
    pytest.mark.proof(*KERNEL_SOURCES, *CORE_SOURCES),
    pytest.mark.skipif(bool(emulator.MISSING), reason=emulator.MISSING),
]
CONFIG = small_config()
MODEL = random_model(CONFIG)
TENSORS = tensors_of(MODEL, "bf16")
LONG_PROMPT = [(5 * i + 1) % 96 for i in range(15)]  # read by the PyTorch model; its ring has room for 6


@pytest.fixture(params=["persistent", "graph"])
def emulated(request, cuda_builds, monkeypatch):
    without_tiles(monkeypatch, cuda_builds)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = Engine(CONFIG, TENSORS, device="cuda", version=request.param, cache_bytes=10**6)
    with engine:
        yield engine


@pytest.fixture(scope="module")
def cpu_tokens() -> dict[int, list[int]]:
    """Greedy tokens of the CPU engine, by the length of the prompt."""
    with Engine(CONFIG, TENSORS, threads=1) as engine:
        return {n: engine.generate(LONG_PROMPT[:n], max_new_tokens=10) for n in (3, 15)}


def test_the_kernels_give_the_cpu_engines_tokens(emulated, cpu_tokens):
    for length, tokens in cpu_tokens.items():
        prompt = LONG_PROMPT[:length]
        assert list(emulated.stream(prompt, max_new_tokens=10)) == tokens
        stop = tokens[4]
        assert (
            emulated.generate(prompt, max_new_tokens=10, stop_ids=[stop]) == tokens[: tokens.index(stop) + 1]
        )
        assert emulated.generate(prompt, max_new_tokens=10, reuse_prefix=False) == tokens
        assert emulated.statistics.reused_tokens == 0


REQUESTS: list[Any] = [
    {
        "temperature": 1.5,
        "seed": 3,
        "top_p": 0.8,
        "logprobs": 2,
        "frequency_penalty": -2.0,
        "min_new_tokens": 6,
    },
    pytest.param({"logprobs": 3}, marks=pytest.mark.slow),
    pytest.param({"logprobs": 0, "repetition_penalty": 1.5, "presence_penalty": 0.8}, marks=pytest.mark.slow),
    pytest.param({"temperature": 1.5, "seed": 6, "top_k": 9, "logit_bias": {7: 3.0}}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("options", REQUESTS, ids=str)
def test_every_option_as_the_cpu_has_it(emulated, cpu_tokens, options):
    """Tokens and log-probabilities."""
    options = {"max_new_tokens": 10, **options}
    if "min_new_tokens" in options:
        options["stop_ids"] = cpu_tokens[3]
    with Engine(
        CONFIG, TENSORS, threads=1, kv_dtype="bf16", math="exact"
    ) as engine:  # as the kernels compute
        expected = engine.generate_detailed(LONG_PROMPT[:3], **options)
    found = emulated.generate_detailed(LONG_PROMPT[:3], **options)
    assert (found.ids, found.finish_reason) == (expected.ids, expected.finish_reason)
    for ours, theirs in zip(found.tokens, expected.tokens, strict=True):
        assert [i for i, _ in ours.top] == [i for i, _ in theirs.top]
        # 64 products of a head's row, in fp32, in another order: as in test_decoder.py
        bound = 64 * 2**-24 * 200
        assert ours.logprob == (
            theirs.logprob if theirs.logprob is None else pytest.approx(theirs.logprob, abs=bound)
        )
        np.testing.assert_allclose([x for _, x in ours.top], [x for _, x in theirs.top], rtol=0, atol=bound)
    assert emulated.statistics.passes == len(found.ids)
    assert list(emulated.stream_detailed(LONG_PROMPT[:3], **options)) == found.tokens


def test_a_cancelled_request_with_scores_starts_no_more(emulated, cpu_tokens):
    stream = emulated.stream_detailed(LONG_PROMPT[:3], max_new_tokens=10, logprobs=1)
    assert next(stream).id == cpu_tokens[3][0]
    stream.close()
    assert emulated.generate(LONG_PROMPT[:3], max_new_tokens=10) == cpu_tokens[3]


def test_a_text_that_goes_on_is_not_read_again(emulated, cpu_tokens):
    tokens = cpu_tokens[15]
    emulated.generate(LONG_PROMPT, max_new_tokens=4, reuse_prefix=False)
    assert emulated.generate(LONG_PROMPT + tokens[:4], max_new_tokens=6) == tokens[4:]
    assert emulated.statistics.reused_tokens == 15 + 3
    # another text, shorter than the last: the windows' rings have lost its positions, but not those of
    # its prompt's end
    assert emulated.generate(LONG_PROMPT, max_new_tokens=10) == tokens
    assert emulated.statistics.reused_tokens == 14


def test_a_graph_that_ran_past_a_stop_has_lost_its_ring(emulated, cpu_tokens):
    tokens, stop = cpu_tokens[15], cpu_tokens[15][1]
    options = {"max_new_tokens": 10, "reuse_prefix": False}
    assert emulated.generate(LONG_PROMPT, stop_ids=[stop], **options) == tokens[:2]
    assert emulated.generate([*LONG_PROMPT, *tokens[:2]], max_new_tokens=8) == tokens[2:]
    assert emulated.statistics.reused_tokens == (16 if gpu_of(emulated).version == "persistent" else 15)


@pytest.mark.parametrize("emulated", ["persistent"], indirect=True)
def test_sequences_take_turns(emulated, cpu_tokens):
    """Each goes on where it was, in its own memory; a launch writes to the slot of its sequence."""
    first, second = LONG_PROMPT, LONG_PROMPT[:3]
    for reused in ((0, 2), (14, 2)):  # the second begins like the first, whose ring has not forgotten that
        for prompt, count in zip((first, second), reused, strict=True):
            assert emulated.generate(prompt, max_new_tokens=10) == cpu_tokens[len(prompt)]
            assert emulated.statistics.reused_tokens in (count, 0 if prompt is second else count)
    assert emulated.generate(first + cpu_tokens[15][:5], max_new_tokens=5) == cpu_tokens[15][5:]
    assert emulated.statistics.reused_tokens >= 14


def test_scores_start_from_what_is_there(emulated, cpu_tokens):
    ids = LONG_PROMPT + cpu_tokens[15]
    emulated.generate(ids[:15], max_new_tokens=6, reuse_prefix=False)
    reused = emulated.logprobs(ids, start=21)
    assert emulated.statistics.reused_tokens == 20
    assert emulated.generate(ids, max_new_tokens=1) == emulated.generate(
        ids, max_new_tokens=1, reuse_prefix=False
    )
    exact = MODEL(torch.tensor([ids]))[0].log_softmax(-1)[range(20, 24), ids[21:]].detach().numpy()
    plain = copy.deepcopy(MODEL).bfloat16()(torch.tensor([ids]))[0].double()
    plain = plain.log_softmax(-1)[range(20, 24), ids[21:]]
    # as good as PyTorch in bf16: of four positions, so with room for luck
    assert np.abs(reused - exact).max() <= 4 * np.abs(plain.detach().numpy() - exact).max()


@pytest.mark.parametrize("emulated", ["persistent"], indirect=True)
def test_a_request_given_up_before_its_first_token_leaves_nothing_behind(emulated, cpu_tokens):
    gpu = gpu_of(emulated)
    gpu.go = threading.Event()
    gpu.start(LONG_PROMPT[:3], 10)
    gpu.cancel()
    gpu.go.set()
    assert gpu.wait() == []
    assert emulated.generate(LONG_PROMPT[:3], max_new_tokens=10) == cpu_tokens[3]
    assert emulated.statistics.reused_tokens == 0


@pytest.mark.parametrize("emulated", ["persistent"], indirect=True)
def test_a_caller_that_went_away_disturbs_nobody(emulated, cpu_tokens):
    gpu_of(emulated).start(LONG_PROMPT[:2], 30)  # never polled, as after Ctrl-C between launch and wait
    assert list(emulated.stream(LONG_PROMPT[:3], max_new_tokens=10)) == cpu_tokens[3]


@pytest.mark.parametrize("emulated", ["persistent"], indirect=True)
def test_a_wait_in_vain_is_reported_to_everybody(emulated):
    gpu = gpu_of(emulated)
    gpu.missing_blocks, gpu.limit_s = 1, 0.05
    with pytest.raises(RequestFailed, match=r"waited 0.05 s in vain: lane \d, layer \d, exchange '"):
        emulated.generate(LONG_PROMPT[:3], max_new_tokens=10)
    gpu.missing_blocks, gpu.limit_s = 0, 10.0
    with pytest.raises(RuntimeError, match="the GPU has failed, and with it all requests: the decode kernel"):
        emulated.generate(LONG_PROMPT[:3], max_new_tokens=10)


@pytest.mark.parametrize("emulated", ["persistent"], indirect=True)
def test_a_prompt_that_was_not_read_to_its_end_is_not_reused(emulated, cpu_tokens, monkeypatch):
    passes = passes_of(emulated)

    def fails(*given: Any) -> Any:
        yield from SinglePasses.read(passes, *given)
        raise torch.OutOfMemoryError("tried to allocate 3 GiB")

    emulated.generate(LONG_PROMPT[:3], max_new_tokens=2, reuse_prefix=False)
    monkeypatch.setattr(passes, "read", fails)
    with pytest.raises(
        RequestFailed, match="the GPU has no memory for this request: tried to allocate 3 GiB"
    ):
        emulated.generate(LONG_PROMPT[1:])
    monkeypatch.undo()
    assert emulated.generate(LONG_PROMPT[1:], max_new_tokens=1)
    assert emulated.statistics.reused_tokens == 0
    assert emulated.generate(LONG_PROMPT[:3], max_new_tokens=10) == cpu_tokens[3]


@pytest.mark.parametrize("emulated", ["persistent"], indirect=True)
def test_requests_join_one_after_the_other(emulated, cpu_tokens):
    """`Engine.batch`, as a server uses it; drafts have no effect."""
    prompt = LONG_PROMPT[:3]
    with emulated.batch() as batch:
        assert batch.max_joined == 1
        assert batch.updates(0.01) == []
        for _ in range(2):
            ticket = batch.join(prompt, max_new_tokens=10, speculate=4)
            with pytest.raises(RuntimeError, match="at most 1 requests"):
                batch.join(prompt)
            updates = collect(batch, ticket)[ticket]
            assert [token.id for token in tokens_of(updates)] == cpu_tokens[3]
            assert updates[-1].finish_reason == "length"
            assert updates[-1].statistics.proposed_tokens == 0
        ticket = batch.score(prompt, start=2, top=1)
        scores = collect(batch, ticket)[ticket][-1].scores
        batch.leave(ticket)  # it has ended
        ticket = batch.join(prompt, max_new_tokens=29)
        batch.leave(ticket)
        assert collect(batch, ticket)[ticket][-1].finish_reason == "cancelled"
        batch.join(prompt, max_new_tokens=29)  # ends with the batch
    assert np.array_equal(scores.logprobs, emulated.logprobs(prompt, start=2))


@pytest.mark.parametrize("emulated", ["persistent"], indirect=True)
def test_a_batch_is_one_prompt_after_the_other(emulated, cpu_tokens):
    """Several tokens come of a launch, as nothing of the host is needed between them."""
    prompts, before = [LONG_PROMPT[:3], LONG_PROMPT], gpu_of(emulated).launches
    assert emulated.generate_batch(prompts, max_new_tokens=10) == [cpu_tokens[len(p)] for p in prompts]
    assert gpu_of(emulated).launches - before == 4


def test_masks(emulated):
    """Only ids of a mask are drawn, each as the next token is due."""
    mask = np.zeros(3, np.uint32)
    mask[1] = 0b1010  # 33 and 35
    with emulated.batch() as batch:
        ticket = batch.join(LONG_PROMPT, max_new_tokens=6, masked=True, temperature=2.0, seed=1)
        for index in range(6):
            batch.allow(ticket, index, mask)
        found = [token.id for token in tokens_of(collect(batch, ticket)[ticket])]
    assert len(found) == 6
    assert set(found) == {33, 35}
