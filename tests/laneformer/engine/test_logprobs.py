"""Log-probabilities of generated tokens and of prompts against PyTorch in float64, and against each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.laneformer.engine.assets import (
    engine_of,
    float32_error,
    random_ids,
    random_model,
    small_config,
    torch_logits,
)

SAMPLED = {"temperature": 1.3, "top_k": 30, "seed": 2, "repetition_penalty": 1.4, "logit_bias": {3: 4.0}}


def reference(model, ids: list[int]) -> tuple[np.ndarray, float]:
    """log p after every position, float64, and the allowed error: log_softmax adds up to twice the logits' error,
    exp and the sum about 1e-6 of the value.
    """
    logits = torch_logits(model, ids)
    logp = torch.log_softmax(torch.from_numpy(logits), -1).numpy()
    return logp, 8 * float32_error(model, ids, logits) + 1e-6 * np.abs(logp).max()


@pytest.mark.parametrize(("sampling", "speculate"), [({}, 5), (SAMPLED, 0)])
def test_generated_tokens_carry_the_models_own_distribution(sampling, speculate):
    model = random_model(small_config(), seed=1)
    prompt, new = random_ids(model.config, 30), {"max_new_tokens": 40, **sampling}
    with engine_of(model, threads=2) as engine:
        result = engine.generate_detailed(prompt, logprobs=5, speculate=speculate, **new)
        assert result.ids == engine.generate(prompt, **new)
        streamed = engine.stream_detailed(prompt, logprobs=5, speculate=speculate, **new)
        assert list(streamed) == result.tokens
        scored = engine.logprobs(prompt + result.ids, start=30)
    np.testing.assert_array_equal(np.array([t.logprob for t in result.tokens], np.float32), scored)
    logp, allowed = reference(model, prompt + result.ids)
    for row, token in zip(logp[29:-1], result.tokens, strict=True):
        assert abs(token.logprob - row[token.id]) <= allowed
        best = np.argsort(-row, kind="stable")[:5]
        assert [i for i, _ in token.top] == best.tolist()
        assert np.abs(np.array([p for _, p in token.top]) - row[best]).max() <= allowed
    shifted = np.abs(logp[28:-2][range(40), result.ids] - [t.logprob for t in result.tokens]).max()
    assert shifted > 100 * allowed, "the comparison would not see positions that are one off"


def test_without_the_option_there_are_none_and_zero_means_the_token_alone():
    with engine_of(random_model(small_config())) as engine:
        plain = engine.generate_detailed([1, 2], max_new_tokens=3)
        alone = engine.generate_detailed([1, 2], max_new_tokens=3, logprobs=0)
    assert all(token.logprob is None and token.top == () for token in plain.tokens)
    assert all(token.logprob < 0 and token.top == () for token in alone.tokens)
    assert plain.ids == alone.ids


@pytest.mark.parametrize("head", ["vocab_parallel", "replicate", "lane"])
def test_prompt_logprobs_with_the_likeliest_ids(head):
    model = random_model(small_config(lm_head_type=head), seed=2)
    ids = random_ids(model.config, 70)
    logp, allowed = reference(model, ids)
    with engine_of(model, threads=3) as engine:
        plain, scores = engine.logprobs(ids), engine.logprobs(ids, top=3)
        assert engine.logprobs(ids, top=0).top_ids.shape == (69, 0)
        assert engine.logprobs(ids[:1]).shape == (0,)
    assert np.abs(plain - logp[np.arange(69), ids[1:]]).max() <= allowed
    np.testing.assert_array_equal(scores.logprobs, plain)
    np.testing.assert_array_equal(scores.top_ids, np.argsort(-logp[:-1], 1, kind="stable")[:, :3])
    assert np.abs(scores.top_logprobs - np.take_along_axis(logp[:-1], scores.top_ids, 1)).max() <= allowed
    dtypes = plain.dtype, scores.top_logprobs.dtype, scores.top_ids.dtype, scores.is_greedy.dtype
    assert dtypes == ("float32", "float32", "int32", "bool")


def test_is_greedy_says_whether_generation_would_have_said_it():
    with engine_of(random_model(small_config(), seed=3)) as engine:
        prompt = random_ids(engine.config, 10)
        answer = engine.generate(prompt, max_new_tokens=20)
        assert engine.logprobs(prompt + answer, top=1, start=10).is_greedy.all()
        changed = [*answer[:7], (answer[7] + 1) % 100, *answer[8:]]
        assert not engine.logprobs(prompt + changed, top=1, start=10).is_greedy[7]


def test_scoring_continuations_of_one_context_reads_the_context_once():
    with engine_of(random_model(small_config(max_position_embeddings=448), seed=6), threads=2) as engine:
        context = random_ids(engine.config, 150)
        for i in range(3):
            ids = context + random_ids(engine.config, 12, seed=i)
            scores = engine.logprobs(ids, top=2, start=150)
            assert engine.statistics.reused_tokens == (149 if i else 0)
            expected = engine.logprobs(ids, top=2, start=150, reuse_prefix=False)
            np.testing.assert_array_equal(scores.logprobs, expected.logprobs)
            np.testing.assert_array_equal(scores.top_logprobs, expected.top_logprobs)


def test_bad_options():
    with engine_of(random_model(small_config())) as engine:
        for options, message in (
            ({"start": 0}, "start = 0 is outside 1 to 5"),
            ({"start": 6}, "start = 6 is outside 1 to 5"),
            ({"top": -1}, "top = -1 is outside 0 to 100"),
            ({"top": 101}, "top = 101"),
            ({"top": 1.5}, "top = 1.5 must be an integer"),
            ({"reuse_prefix": None}, "reuse_prefix = None must be True or False"),
        ):
            with pytest.raises(ValueError, match=message):
                engine.logprobs([1, 2, 3, 4, 5], **options)
