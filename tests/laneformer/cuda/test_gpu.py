"""The CUDA engine on a GPU: right, repeatable, and out of the way when it is told to stop.
Skipped without a GPU.

    pytest tests/laneformer/cuda/test_gpu.py

What the logits and tokens are held against, and the planted faults, are those of tools/check/cuda.py.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from laneformer import LaneformerConfig
from laneformer.engine import Engine, device
from laneformer.engine.cuda.passes import PassDecoder
from laneformer.engine.cuda.structures import Column
from laneformer.engine.decoder import Sampling
from tests.laneformer.cuda.stand_ins import passes_of
from tests.laneformer.engine.assets import byte_tokenizer, write_folder
from tools.check.cuda import check, check_faults, greedy, reference, score, scored_length
from tools.check.reference import Weights, hf_logits, hf_model, random_weights, tensors_of

MISSING = device.why_no_cuda()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MISSING is not None, reason=f"no GPU: {MISSING}")]
TINY = LaneformerConfig.from_flavor("tiny")
PROMPT = [3, 1, 4, 1, 5]


def weights_of(config: LaneformerConfig) -> Weights:
    return random_weights(config, device="cuda")


@pytest.fixture(scope="module")
def tiny() -> Iterator[Engine]:
    with Engine(TINY, tensors_of(weights_of(TINY)), device="cuda") as engine:
        yield engine


@pytest.mark.parametrize("flavor", ["tiny", "300m"])
def test_logits_and_tokens_of_both_versions_against_transformers(flavor):
    """Greedy identity but for ties, KL no worse than bf16's, the same bits 100 times and
    for all launch lengths.
    """
    config = LaneformerConfig.from_flavor(flavor)
    weights = weights_of(config)
    tensors = tensors_of(weights)
    makers = {
        v: functools.partial(PassDecoder, config, tensors, "bf16", version=v) for v in ("passes", "graph")
    }
    report = check(
        makers, reference(config, weights, scored_length(config)), count=12, runs=100, progress=print
    )
    assert len(report["passed"]) == 10
    assert all(report["passed"].values()), report


def test_planted_faults_are_seen():
    report = check_faults(
        TINY, weights_of(TINY), lambda config, tensors: PassDecoder(config, tensors, "bf16")
    )
    assert report["holds"], report


def test_float16():
    weights = {name: w.half() for name, w in weights_of(TINY).items()}
    ids = PROMPT * 6
    logits = score(PassDecoder(TINY, tensors_of(weights), "fp16"), ids)
    single, half = (
        hf_logits(hf_model(TINY, weights, dtype), ids) for dtype in (torch.float32, torch.float16)
    )
    assert np.abs(logits - single).mean() <= np.abs(half - single).mean()


def test_lanes_in_two_memories_give_the_same_tokens(tiny):
    """The protocol between GPUs: two groups of lanes with memories and launches of their own,
    here on one GPU.
    """
    decoder = PassDecoder(TINY, tensors_of(weights_of(TINY)), "bf16", devices=("cuda:0", "cuda:0"))
    assert greedy(decoder, PROMPT, 40) == tiny.generate(PROMPT, max_new_tokens=40)


def test_a_column_has_the_same_bits_in_any_company():
    """A pass's matrix products are an instruction's columns; no column may depend on another."""
    passes = PassDecoder(TINY, tensors_of(weights_of(TINY)), "bf16")

    def logits(columns: list[tuple[int, int, int]]) -> torch.Tensor:
        rows = torch.empty(len(columns), TINY.vocab_size, device="cuda")
        passes.run(
            [Column(*column, sampling=Sampling(top_p=1.0)) for column in columns],
            logits=rows,
        )
        return rows

    alone = torch.cat([logits([(token, i, 0)]) for i, token in enumerate(PROMPT)])
    assert torch.equal(
        logits([(9, 0, 2), *((token, i, 1) for i, token in enumerate(PROMPT)), (8, 0, 3)])[1:-1], alone
    )


# ---- requests ----


def test_streams_batches_and_stops(tiny):
    tokens = tiny.generate(PROMPT, max_new_tokens=40)
    assert len(tokens) == 40
    assert list(tiny.stream(PROMPT, max_new_tokens=40)) == tokens
    stop = tokens[11]
    detailed = tiny.generate_detailed(PROMPT, max_new_tokens=40, stop_ids=[stop])
    assert (detailed.ids, detailed.finish_reason) == (tokens[: tokens.index(stop) + 1], "stop")
    assert tiny.generate_batch([PROMPT, PROMPT[:2]], max_new_tokens=9)[0] == tokens[:9]
    assert tiny.generate(PROMPT, max_new_tokens=40, speculate=7) == tokens
    rest = TINY.max_position_embeddings - len(PROMPT) + 1
    assert len(tiny.generate(PROMPT, max_new_tokens=10**6)) == rest


def test_cancelling_is_prompt_and_leaves_nothing_behind(tiny):
    tokens = tiny.generate(PROMPT, max_new_tokens=20)
    for after in (1, 3, 10):
        stream = tiny.stream(PROMPT, max_new_tokens=TINY.max_position_embeddings - len(PROMPT))
        assert [next(stream) for _ in range(after)] == tokens[:after]
        started = time.monotonic()
        stream.close()
        assert time.monotonic() - started < 5  # a token takes milliseconds; a wait in vain would take 10 s
        assert tiny.generate(PROMPT, max_new_tokens=20) == tokens


def test_other_threads_may_ask(tiny):
    expected, found = tiny.generate(PROMPT, max_new_tokens=20), []
    thread = threading.Thread(target=lambda: found.append(tiny.generate(PROMPT, max_new_tokens=20)))
    thread.start()
    thread.join()
    assert found == [expected]


@pytest.mark.parametrize("version", ["passes", "graph"])
def test_a_text_that_goes_on_is_not_read_again(version):
    with Engine(TINY, tensors_of(weights_of(TINY)), device="cuda", version=version) as engine:
        length = min(TINY.max_position_embeddings // 2, 2 * TINY.sliding_window)
        tokens = engine.generate(PROMPT, max_new_tokens=length)
        for split in (4, length - 5):  # before and after the windows have lost the beginning
            engine.generate(PROMPT, max_new_tokens=split, reuse_prefix=False)
            assert engine.generate(PROMPT + tokens[:split], max_new_tokens=5) == tokens[split : split + 5]
            assert engine.statistics.reused_tokens == len(PROMPT) + split - 1
        assert engine.generate(PROMPT, max_new_tokens=9) == tokens[:9]


def test_a_wait_in_vain_is_reported_and_over(tiny):
    """One block is missing, so the others wait for its words."""
    passes = passes_of(tiny)
    tokens = greedy(passes, PROMPT, 9)
    kernels, limit_s = passes.kernels[0][0], passes.limit_s
    launch, passes.limit_s = kernels.launch, 0.05
    # a launch of one block less
    kernels.launch = lambda name, argument, blocks=None: launch(name, argument, passes.geometry.blocks - 1)
    try:
        with pytest.raises(RuntimeError, match=r"waited 0.05 s in vain: lane \d+, layer \d+, exchange '"):
            passes.run([Column(5, 0, 0, sampling=Sampling(top_p=1.0))])
    finally:
        passes.limit_s = limit_s
        del kernels.launch
    assert greedy(passes, PROMPT, 9) == tokens


# ---- draws ----


def test_draws_repeat_and_differ_by_seed(tiny):
    options = {"max_new_tokens": 40, "temperature": 1.0, "reuse_prefix": False}
    first, again, other = (tiny.generate(PROMPT, seed=seed, **options) for seed in (1, 1, 2))
    assert first == again != other
    with Engine(TINY, tensors_of(weights_of(TINY)), device="cuda", version="graph") as graph:
        for filters in ({}, {"top_k": 7}, {"top_p": 0.6}, {"min_p": 0.2}):
            assert graph.generate(PROMPT, seed=1, **options, **filters) == tiny.generate(
                PROMPT, seed=1, **options, **filters
            )


@pytest.mark.parametrize(
    "filters", [{"top_k": 7}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 20, "top_p": 0.9}]
)
def test_filters_leave_likely_tokens_only(tiny, filters):
    options = {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **filters}
    tokens = tiny.generate(PROMPT, max_new_tokens=60, seed=5, reuse_prefix=False, **options)
    logits = torch.from_numpy(score(passes_of(tiny), PROMPT + tokens)[len(PROMPT) - 1 : -1]).double()
    own = logits.gather(1, torch.tensor(tokens)[:, None])
    if options["top_k"]:
        assert ((logits > own).sum(1) < options["top_k"]).all()
    p = (logits / 1.5).softmax(-1)
    if options["top_p"] < 1 and not options["top_k"]:
        likelier = torch.where(logits > own, p, 0).sum(1)
        assert (likelier < options["top_p"] + 1e-5).all()  # 1e-5: fp32 sums of V probabilities
    if options["min_p"]:
        assert (
            p.gather(1, torch.tensor(tokens)[:, None])[:, 0] >= options["min_p"] * p.amax(1) * (1 - 1e-5)
        ).all()
    assert len(set(tokens)) > 3, "nothing was drawn"


def test_draws_follow_the_softmax(tiny):
    """Pearson's test on the first token: the eight likeliest ids and the rest, 2000 seeds."""
    draws = 2000
    p = torch.from_numpy(score(passes_of(tiny), PROMPT)[-1]).double().softmax(-1)
    top = p.topk(8)
    counts = np.zeros(9)
    for seed in range(draws):
        (made,) = tiny.generate(PROMPT, max_new_tokens=1, temperature=1.0, seed=seed)
        where = (top.indices == made).nonzero()
        counts[int(where[0]) if len(where) else 8] += 1
    expected = draws * np.append(top.values.numpy(), 1 - float(top.values.sum()))
    # 8 degrees of freedom: above 37.3 once in 100,000 correct samplers; the seeds are fixed
    assert ((counts - expected) ** 2 / expected).sum() < 37.3


# ---- scores and folders ----


def test_scores_are_closer_to_float32_than_transformers_in_bf16(tiny):
    weights = weights_of(TINY)
    ids = np.random.default_rng(3).integers(0, TINY.vocab_size, TINY.max_position_embeddings).tolist()
    rows = np.arange(len(ids) - 1), ids[1:]
    single, half = (
        torch.from_numpy(hf_logits(hf_model(TINY, weights, dtype), ids))
        .double()
        .log_softmax(-1)
        .numpy()[rows]
        for dtype in (torch.float32, torch.bfloat16)
    )
    ours = tiny.logprobs(ids)
    # the layers are PyTorch's in bf16 on both sides; the head is better here, but luck has its part
    assert np.abs(ours - single).mean() <= 1.1 * np.abs(half - single).mean()
    found = tiny.logprobs(ids, start=50, top=4)
    assert tiny.statistics.reused_tokens in (0, 49)
    np.testing.assert_allclose(found.logprobs, ours[49:], atol=np.abs(half - single).max())
    np.testing.assert_array_equal(tiny.logits(ids[:20]).shape, (20, TINY.vocab_size))


def test_a_folder_opens_on_the_gpu_by_itself(tmp_path):
    from laneformer import Laneformer

    model = Laneformer(LaneformerConfig.from_flavor("tiny", vocab_size=264))
    model.init_weights()
    folder = write_folder(tmp_path / "hf", model.bfloat16())
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    with Engine.from_pretrained(folder) as engine, Engine.from_pretrained(folder, device="cpu") as cpu:
        assert (engine.isa == "cuda", cpu.isa == "cuda") == (True, False)
        assert engine.generate_text("a b", max_new_tokens=8)
