"""Batches: every sequence as if it were alone, in as many passes as the longest one needs."""

from __future__ import annotations

import numpy as np
import pytest

from laneformer.engine.options import batch_seeds
from tests.laneformer.engine.assets import engine_of, random_ids, random_model, small_config

SWITCHES = [
    {},
    {"lm_head_type": "replicate"},
    {"lm_head_type": "lane"},
    {"broadcast_delay": 0},
    {"flush": True},
]


@pytest.mark.parametrize("switches", SWITCHES)
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.2, "speculate": 3}]
)
def test_every_sequence_is_what_it_is_alone(switches, options):
    model = random_model(small_config(**switches), seed=1)
    rng = np.random.default_rng(2)
    with engine_of(model, threads=2) as engine, engine_of(model) as alone:
        for count in (1, 2, 3, 5, 8):
            prompts = [random_ids(model.config, int(rng.integers(1, 70)), seed=i) for i in range(count)]
            seeds = batch_seeds(options.get("seed", 0), count)
            expected = [
                alone.generate(p, max_new_tokens=25, reuse_prefix=False, **{**options, "seed": seed})
                for p, seed in zip(prompts, seeds, strict=True)
            ]
            assert engine.generate_batch(prompts, max_new_tokens=25, **options) == expected


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_threads_change_no_token(threads):
    model = random_model(small_config(), seed=3)
    prompts = [random_ids(model.config, 10 * i + 1, seed=i) for i in range(6)]
    with engine_of(model, threads=threads) as engine, engine_of(model, threads=1) as other:
        assert engine.generate_batch(prompts, max_new_tokens=30) == other.generate_batch(
            prompts, max_new_tokens=30
        )


def test_sequences_end_each_at_their_own_place():
    with engine_of(random_model(small_config(), seed=4)) as engine:
        prompts = [[1], random_ids(engine.config, 90), random_ids(engine.config, 96), [2, 3]]
        alone = [engine.generate(p, max_new_tokens=40, reuse_prefix=False) for p in prompts]
        assert [len(tokens) for tokens in alone] == [40, 7, 1, 40]
        stop = alone[3][5]
        cut = [t[: t.index(stop) + 1] if stop in t else t for t in alone]
        assert len(cut[3]) < 40
        assert engine.generate_batch(prompts, max_new_tokens=40, stop_ids=[stop]) == cut


def test_a_pass_serves_all_sequences():
    with engine_of(random_model(small_config(), seed=5)) as engine:
        engine.generate_batch([[i] for i in range(8)], max_new_tokens=30)
        assert engine.statistics.passes == 30


def test_equal_prompts_give_equal_tokens_and_different_ones_do_not_mix():
    with engine_of(random_model(small_config(), seed=6)) as engine:
        a, b = random_ids(engine.config, 30), random_ids(engine.config, 30, seed=1)
        first, second, third = engine.generate_batch([a, b, a], max_new_tokens=20)
    assert first == third != second


def test_equal_prompts_draw_different_tokens_each_with_its_seed():
    with engine_of(random_model(small_config(), seed=6)) as engine:
        options = {"max_new_tokens": 12, "temperature": 1.0}
        derived = engine.generate_batch([[3, 4]] * 8, seed=2**64 - 1, **options)
        assert len({tuple(tokens) for tokens in derived}) == 8
        assert derived[0] == engine.generate([3, 4], seed=2**64 - 1, **options)
        given = engine.generate_batch([[3, 4]] * 3, seed=[7, 8, 7], **options)
        assert given == [engine.generate([3, 4], seed=seed, **options) for seed in (7, 8, 7)]
        assert engine.generate([3, 4], seed=[7], **options) == given[0]
        with pytest.raises(ValueError, match="seed has 2 values for 3 prompts"):
            engine.generate_batch([[1]] * 3, seed=[1, 2], **options)
        with pytest.raises(ValueError, match=r"seed\[1\] = -1 is outside"):
            engine.generate_batch([[1]] * 2, seed=[1, -1], **options)


def test_each_sequences_prefix_is_found_again():
    with engine_of(random_model(small_config(), seed=7)) as engine:
        prompts = [random_ids(engine.config, 20, seed=i) for i in range(4)]
        answers = engine.generate_batch(prompts, max_new_tokens=6)
        longer = [prompt + answer + [9] for prompt, answer in zip(prompts, answers, strict=True)]
        expected = [engine.generate(prompt, max_new_tokens=6, reuse_prefix=False) for prompt in longer[::-1]]
        engine.generate_batch(prompts, max_new_tokens=6)
        assert engine.generate_batch(longer[::-1], max_new_tokens=6) == expected
        assert engine.statistics.reused_tokens == 4 * 26  # all but the last id, which `expected` has left


def test_two_conversations_in_turn_keep_a_cache_each():
    with engine_of(random_model(small_config(), seed=8)) as engine:
        talks = [random_ids(engine.config, 20, seed=i) for i in range(2)]
        engine.generate_batch(talks, max_new_tokens=1)
        for turn in range(4):
            talk = talks[turn % 2]
            talk += engine.generate([*talk, 4], max_new_tokens=3)
            assert engine.statistics.reused_tokens >= 19


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "1 to 8 prompts"),
        ([[1]] * 9, "1 to 8 prompts"),
        ("text", "1 to 8 prompts"),
        (5, "1 to 8 prompts"),
        ([[1], []], r"prompts\[1\] is empty"),
        ([1, 2], r"prompts\[0\] must be a flat sequence"),
        ([[1], [100]], r"prompts\[1\] holds 100"),
    ],
)
def test_bad_batches(prompts, message):
    with engine_of(random_model(small_config())) as engine, pytest.raises(ValueError, match=message):
        engine.generate_batch(prompts)
