"""`generate_batch`: every sequence as if it were alone, with a seed of its own, and its own end."""

from __future__ import annotations

import pytest

from tests.laneformer.engine.assets import engine_of, random_ids, random_model, small_config


def test_sequences_end_each_at_their_own_place():
    with engine_of(random_model(small_config(), seed=4)) as engine:
        prompts = [[1], random_ids(engine.config, 90), random_ids(engine.config, 96), [2, 3]]
        alone = [engine.generate(p, max_new_tokens=40, reuse_prefix=False) for p in prompts]
        assert [len(tokens) for tokens in alone] == [40, 7, 1, 40]
        stop = alone[3][5]
        cut = [t[: t.index(stop) + 1] if stop in t else t for t in alone]
        assert len(cut[3]) < 40
        assert engine.generate_batch(prompts, max_new_tokens=40, stop_ids=[stop]) == cut


def test_equal_prompts_draw_different_tokens_each_with_its_seed():
    with engine_of(random_model(small_config(), seed=6)) as engine:
        options = {"max_new_tokens": 12, "temperature": 1.0}
        derived = engine.generate_batch([[3, 4]] * 8, seed=2**64 - 1, **options)
        assert (
            engine.statistics.passes <= 13
        )  # one serves all; the prompt is read once, before the others' start
        assert len({tuple(tokens) for tokens in derived}) == 8
        assert derived[0] == engine.generate([3, 4], seed=2**64 - 1, **options)
        given = engine.generate_batch([[3, 4]] * 3, seed=[7, 8, 7], **options)
        assert given == [engine.generate([3, 4], seed=seed, **options) for seed in (7, 8, 7)]
        assert engine.generate([3, 4], seed=[7], **options) == given[0]
        with pytest.raises(ValueError, match="seed has 2 values for 3 prompts"):
            engine.generate_batch([[1]] * 3, seed=[1, 2], **options)
        with pytest.raises(ValueError, match=r"seed\[1\] = -1 is outside"):
            engine.generate_batch([[1]] * 2, seed=[1, -1], **options)


def test_bad_batches():
    with engine_of(random_model(small_config())) as engine:
        for prompts, message in (
            ([], "1 to 8 prompts"),
            ([[1]] * 9, "1 to 8 prompts"),
            ("text", "1 to 8 prompts"),
            (5, "1 to 8 prompts"),
            ([[1], []], r"prompts\[1\] is empty"),
            ([1, 2], r"prompts\[0\] must be a flat sequence"),
            ([[1], [100]], r"prompts\[1\] holds 100"),
        ):
            with pytest.raises(ValueError, match=message):
                engine.generate_batch(prompts)
