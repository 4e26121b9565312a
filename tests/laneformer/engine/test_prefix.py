"""Reused prefixes: the numbers of a fresh engine, bit for bit, and as much reuse as there is."""

from __future__ import annotations

import numpy as np
import pytest

from laneformer.engine import Engine
from tests.laneformer.engine.assets import engine_of, random_ids, random_model, small_config

LONG = {"max_position_embeddings": 448}  # 64 windows of 7, four blocks


def details(engine: Engine, prompt: list[int], **options) -> tuple:
    result = engine.generate_detailed(prompt, logprobs=3, **{"max_new_tokens": 8, **options})
    return result.ids, [(token.logprob, token.top) for token in result.tokens]


def test_a_conversation_reads_only_what_is_new():
    with engine_of(random_model(small_config(**LONG), seed=2)) as engine:
        talk, fresh = random_ids(engine.config, 100), 100
        for turn in range(4):
            talk += engine.generate(talk, max_new_tokens=10)
            # all but the new ids and the last answer's last one, which was never read
            assert engine.statistics.reused_tokens == len(talk) - 10 - fresh
            talk, fresh = talk + random_ids(engine.config, 5, seed=turn), 6


@pytest.mark.parametrize("overrides", [{}, {"swa_layers": ()}])
def test_a_prompt_may_part_anywhere_from_the_cached_one(overrides):
    model = random_model(small_config(**LONG, **overrides), seed=3)
    ids = random_ids(model.config, 440)
    with engine_of(model) as engine:
        for kept in (439, 350, 301, 200, 8, 1):
            engine.generate(ids, max_new_tokens=1, reuse_prefix=False)
            other = [*ids[:kept], (ids[kept] + 1) % 100]
            engine.generate(other, max_new_tokens=1)
            assert engine.statistics.reused_tokens == kept


def test_the_same_prompt_again_runs_its_last_id_only_and_a_wrong_reuse_would_be_seen():
    with engine_of(random_model(small_config(), seed=4)) as engine:
        ids = random_ids(engine.config, 40)
        right = details(engine, ids)
        assert details(engine, ids) == right
        assert engine.statistics.reused_tokens == 39
        # what a cache without the comparison of ids would give
        assert details(engine, [*ids[:20], (ids[20] + 1) % 100, *ids[21:]]) != right


@pytest.mark.parametrize("first_is", ["cancelled", "speculating", "scored", "logits"])
def test_what_came_before_changes_no_bit(first_is):
    model = random_model(small_config(**LONG), seed=5)
    ids = random_ids(model.config, 300)
    for length in (20, 130, 280):
        repeating = [3, 4, 5, 6] * (length // 4)
        with engine_of(model) as fresh, engine_of(model) as engine:
            if first_is == "cancelled":
                stream = engine.stream(ids[:length], max_new_tokens=50, speculate=4)
                next(stream), stream.close()
            elif first_is == "speculating":
                engine.generate(repeating, max_new_tokens=20, speculate=31, logit_bias={3: 4.0})
            elif first_is == "scored":
                engine.logprobs(ids[:length])
            else:
                engine.logits(ids[:length])
            for prompt in (ids, ids[: length + 2], repeating, ids[:length]):
                assert details(engine, prompt) == details(fresh, prompt, reuse_prefix=False)


def test_scoring_continuations_of_one_context_reads_the_context_once():
    with engine_of(random_model(small_config(**LONG), seed=6), threads=2) as engine:
        context = random_ids(engine.config, 150)
        for i in range(4):
            ids = context + random_ids(engine.config, 12, seed=i)
            scores = engine.logprobs(ids, top=2, start=150)
            assert engine.statistics.reused_tokens == (149 if i else 0)
            expected = engine.logprobs(ids, top=2, start=150, reuse_prefix=False)
            np.testing.assert_array_equal(scores.logprobs, expected.logprobs)
            np.testing.assert_array_equal(scores.top_logprobs, expected.top_logprobs)
