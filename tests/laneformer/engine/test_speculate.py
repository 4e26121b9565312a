"""Guessed tokens: the same output as without, token for token and bit for bit, in fewer passes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.laneformer.engine.assets import engine_of, random_ids, random_model, small_config

REPEATING = {"logit_bias": {3: 2.0, 4: 2.0}}
SAMPLING = [
    {},
    {"temperature": 1.0, "seed": 7},
    {
        "temperature": 0.7,
        "top_k": 5,
        "min_p": 0.05,
        "seed": 3,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.1,
    },
]


@pytest.mark.parametrize("sampling", SAMPLING)
def test_speculation_changes_no_token_and_no_bit(sampling):
    proposed = accepted = 0
    for seed in range(4):
        model = random_model(small_config(vocab_size=12, max_position_embeddings=192), seed=seed)
        prompt = random_ids(model.config, 30, seed)
        with engine_of(model, threads=1 + seed) as engine:
            plain = engine.generate_detailed(
                prompt, max_new_tokens=150, logprobs=2, reuse_prefix=False, speculate=0, **sampling
            )
            assert plain.statistics.proposed_tokens == 0
            for speculate in (1, 4, 31):
                quick = engine.generate_detailed(
                    prompt,
                    max_new_tokens=150,
                    logprobs=2,
                    speculate=speculate,
                    reuse_prefix=False,
                    **sampling,
                )
                assert quick.tokens == plain.tokens
                figures = quick.statistics
                proposed, accepted = proposed + figures.proposed_tokens, accepted + figures.accepted_tokens
                assert figures.passes == plain.statistics.passes - figures.accepted_tokens
    assert 0 < accepted < proposed, "both right and wrong guesses must have happened"


def test_a_repetition_is_guessed():
    with engine_of(random_model(small_config(max_position_embeddings=192))) as engine:
        result = engine.generate_detailed([5] * 8, max_new_tokens=100, logit_bias={5: 100}, speculate=9)
    assert result.ids == [5] * 100
    assert result.statistics.accepted_tokens >= 88  # at most ten tokens a pass
    assert result.statistics.passes == 100 - result.statistics.accepted_tokens


def test_the_end_is_the_same_wherever_a_guess_crosses_it():
    with engine_of(random_model(small_config())) as engine:
        force = {"logit_bias": {5: 100}, "speculate": 31}
        for new in range(1, 12):
            assert engine.generate([5] * 8, max_new_tokens=new, **force) == [5] * new
        assert engine.generate([5] * 90, max_new_tokens=50, **force) == [5] * 7  # the context is full
        assert engine.generate([5] * 8, max_new_tokens=50, stop_ids=[5], **force) == [5]


def test_sampling_with_guesses_follows_the_same_distribution():
    """Not needed while the tokens are equal; it holds what a user relies on, whatever the generator does."""
    model = random_model(small_config(vocab_size=8, max_position_embeddings=192), seed=3)
    counts = np.zeros((2, 8))
    with engine_of(model) as engine:
        for row, speculate in enumerate((0, 8)):
            for seed in range(30):
                seeds = {"seed": seed + 1000 * row, "temperature": 1.0}
                tokens = engine.generate([1, 2, 3] * 8, max_new_tokens=60, speculate=speculate, **seeds)
                counts[row] += np.bincount(tokens, minlength=8)
    share = counts / counts.sum(1, keepdims=True)
    # two independent samples of 1800 correlated draws: 5 deviations of a share, as if there were a
    # tenth as many
    assert np.abs(share[0] - share[1]).max() <= 5 * np.sqrt(0.25 * 2 / 180)


def test_tokens_stream_in_order():
    with engine_of(random_model(small_config(vocab_size=12, max_position_embeddings=192))) as engine:
        expected = engine.generate([1, 2, 1, 2], max_new_tokens=150, speculate=0)
        assert list(engine.stream([1, 2, 1, 2], max_new_tokens=150, speculate=7)) == expected
