"""Reused prefixes: the numbers of a fresh engine, bit for bit, and as much reuse as there is."""

from __future__ import annotations

import numpy as np
import pytest

from laneformer.engine import Engine
from tests.laneformer.engine.assets import engine_of, random_ids, random_model, small_config

CONTEXT = 448  # 64 windows of 7, four blocks
LONG = {"max_position_embeddings": CONTEXT}


def details(engine: Engine, prompt: list[int], **options) -> tuple:
    result = engine.generate_detailed(prompt, logprobs=3, **{"max_new_tokens": 8, **options})
    return result.ids, [(token.logprob, token.top) for token in result.tokens]


@pytest.mark.job
def test_any_series_of_prompts_gives_a_fresh_engines_bits():
    rng, model = np.random.default_rng(0), random_model(small_config(**LONG), seed=1)
    last, reused = random_ids(model.config, 150), []
    with engine_of(model, threads=2) as engine:
        for trial in range(60):
            kept = max(0, len(last) - int(rng.integers(0, 210)))
            prompt = (last[:kept] + random_ids(model.config, int(rng.integers(1, 120)), seed=trial))[:420]
            new = int(rng.integers(1, CONTEXT - len(prompt)))
            seen = details(engine, prompt, max_new_tokens=new)
            reused.append(engine.statistics.reused_tokens)
            assert seen == details(engine, prompt, max_new_tokens=new, reuse_prefix=False)
            assert engine.statistics.reused_tokens == 0
            last = prompt + seen[0] if rng.random() < 0.7 else last[: len(last) // 3]
    assert sum(count > 0 for count in reused) > 10


def test_a_conversation_reads_only_what_is_new():
    with engine_of(random_model(small_config(**LONG), seed=2)) as engine:
        talk, fresh = random_ids(engine.config, 100), 100
        for turn in range(4):
            talk += engine.generate(talk, max_new_tokens=10)
            assert engine.statistics.reused_tokens == len(talk) - 10 - fresh, (
                "all but the new ids and the last answer's end"
            )
            talk, fresh = (
                talk + random_ids(engine.config, 5, seed=turn),
                6,
            )  # the last answer's last id was never read


def test_a_prompt_may_part_anywhere_from_the_cached_one():
    model = random_model(small_config(**LONG), seed=3)
    ids = random_ids(model.config, 440)
    with engine_of(model) as engine:
        for kept in (439, 350, 301, 200, 8, 1):
            engine.generate(ids, max_new_tokens=1, reuse_prefix=False)
            other = [*ids[:kept], (ids[kept] + 1) % 100]
            engine.generate(other, max_new_tokens=1)
            assert engine.statistics.reused_tokens == kept


def test_without_windows_every_prefix_is_kept():
    with engine_of(random_model(small_config(swa_layers=(), **LONG))) as engine:
        ids = random_ids(engine.config, 190)
        engine.generate(ids, max_new_tokens=1)
        for kept in (150, 60, 7, 1):
            engine.generate([*ids[:kept], (ids[kept] + 1) % 100], max_new_tokens=1)
            assert engine.statistics.reused_tokens == kept


def test_the_same_prompt_again_runs_its_last_id_only():
    with engine_of(random_model(small_config())) as engine:
        first = details(engine, [1, 2, 3, 4])
        assert details(engine, [1, 2, 3, 4]) == first
        assert engine.statistics.reused_tokens == 3


def test_a_wrong_reuse_would_be_seen():
    """The same ids at other positions: what a cache without the comparison of ids would give."""
    with engine_of(random_model(small_config(), seed=4)) as engine:
        ids = random_ids(engine.config, 40)
        right = details(engine, ids)
        assert details(engine, [*ids[:20], (ids[20] + 1) % 100, *ids[21:]]) != right


@pytest.mark.parametrize("first_is", ["cancelled", "speculating", "scored", "logits"])
def test_what_came_before_changes_no_bit(first_is):
    model = random_model(small_config(**LONG), seed=5)
    ids = random_ids(model.config, 300)
    for length in (20, 130, 280):
        with engine_of(model) as fresh, engine_of(model) as engine:
            if first_is == "cancelled":
                stream = engine.stream(ids[:length], max_new_tokens=50, speculate=4)
                next(stream), stream.close()
            elif first_is == "speculating":
                engine.generate(
                    [3, 4, 5, 6] * (length // 4), max_new_tokens=20, speculate=31, logit_bias={3: 4.0}
                )
            elif first_is == "scored":
                engine.logprobs(ids[:length])
            else:
                engine.logits(ids[:length])
            for prompt in (ids, ids[: length + 2], [3, 4, 5, 6] * (length // 4), ids[:length]):
                assert details(engine, prompt) == details(fresh, prompt, reuse_prefix=False)


def test_scoring_continuations_of_one_context_reads_the_context_once():
    with engine_of(random_model(small_config(**LONG), seed=6), threads=2) as engine:
        context = random_ids(engine.config, 150)
        for i in range(4):
            ids = context + random_ids(engine.config, 12, seed=i)
            seen = engine.logprobs(ids, top=2, start=150)
            assert engine.statistics.reused_tokens == (149 if i else 0)
            expected = engine.logprobs(ids, top=2, start=150, reuse_prefix=False)
            np.testing.assert_array_equal(seen.logprobs, expected.logprobs)
            np.testing.assert_array_equal(seen.top_logprobs, expected.top_logprobs)


@pytest.mark.parametrize(("threads", "speculate"), [(1, 0), (1, 6), (3, 0), (3, 6)])
def test_reuse_on_any_number_of_threads(threads, speculate):
    model = random_model(small_config(**LONG), seed=7)
    ids = random_ids(model.config, 100)
    with engine_of(model, threads=threads) as engine:
        runs = [engine.generate(ids[:n], max_new_tokens=30, speculate=speculate) for n in (100, 90, 100)]
        again = [engine.generate(ids[:n], max_new_tokens=30, reuse_prefix=False) for n in (100, 90, 100)]
    assert runs == again
