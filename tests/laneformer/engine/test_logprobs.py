"""Tests of log-probabilities of tokens and prompts against PyTorch in float64 and each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.laneformer.engine.assets import (
    engine_of,
    float32_error,
    random_ids,
    small_model,
    torch_logits,
)

SAMPLED = {
    "temperature": 1.3,
    "top_k": 30,
    "seed": 2,
    "repetition_penalty": 1.4,
    "logit_bias": {3: 4.0},
}


def reference(model, ids) -> tuple[np.ndarray, float]:
    """Return log p after every position in float64, and the allowed error."""
    # log_softmax adds up to twice the logits' error, exp and the sum about 1e-6 of the value
    logits = torch_logits(model, ids)
    logp = torch.log_softmax(torch.from_numpy(logits), -1).numpy()
    return logp, 8 * float32_error(model, ids, logits) + 1e-6 * np.abs(logp).max()


@pytest.mark.parametrize(("sampling", "speculate"), [({}, 5), (SAMPLED, 0)])
def test_generated_tokens_carry_the_models_own_distribution(sampling, speculate):
    model = small_model(seed=1)
    prompt, new = random_ids(model.config, 30), {"max_new_tokens": 40, **sampling}
    with engine_of(model, threads=2) as engine:
        result = engine.generate_detailed(prompt, logprobs=5, speculate=speculate, **new)
        scored = engine.logprobs(prompt + result.ids, start=30)
    np.testing.assert_array_equal(np.array([t.logprob for t in result.tokens], np.float32), scored)
    logp, allowed = reference(model, prompt + result.ids)
    for row, token in zip(logp[29:-1], result.tokens, strict=True):
        assert abs(token.logprob - row[token.id]) <= allowed
        # stable: of equally likely ids the lowest comes first
        best = np.argsort(-row, kind="stable")[:5]
        assert [i for i, _ in token.top] == best.tolist()
        assert np.abs(np.array([p for _, p in token.top]) - row[best]).max() <= allowed


def test_without_the_option_there_are_none_and_zero_means_the_token_alone():
    with engine_of(small_model()) as engine:
        plain = engine.generate_detailed([1, 2], max_new_tokens=3)
        alone = engine.generate_detailed([1, 2], max_new_tokens=3, logprobs=0)
    assert all(token.logprob is None and token.top == () for token in plain.tokens)
    assert all(token.logprob < 0 and token.top == () for token in alone.tokens)
    assert plain.ids == alone.ids


@pytest.mark.parametrize("head", ["vocab_parallel", "replicate", "lane"])
def test_prompt_logprobs_with_the_likeliest_ids(head):
    model = small_model(lm_head_type=head, seed=2)
    ids = random_ids(model.config, 70)
    logp, allowed = reference(model, ids)
    with engine_of(model, threads=3) as engine:
        plain, scores = engine.logprobs(ids), engine.logprobs(ids, top=3)
        assert engine.logprobs(ids, top=0).top_ids.shape == (69, 0)
        # nothing comes before the first id, so it has no log-probability
        assert engine.logprobs(ids[:1]).shape == (0,)
    assert np.abs(plain - logp[np.arange(69), ids[1:]]).max() <= allowed
    np.testing.assert_array_equal(scores.logprobs, plain)
    np.testing.assert_array_equal(scores.is_greedy, scores.top_ids[:, 0] == ids[1:])
    np.testing.assert_array_equal(scores.top_ids, np.argsort(-logp[:-1], 1, kind="stable")[:, :3])
    assert (
        np.abs(scores.top_logprobs - np.take_along_axis(logp[:-1], scores.top_ids, 1)).max()
        <= allowed
    )
