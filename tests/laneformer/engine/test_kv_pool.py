"""Keys and values of earlier requests within `cache_bytes`: what stays, where prompts start,
and the same bits.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from laneformer import LaneformerConfig
from laneformer.engine import Engine
from tests.laneformer.engine.assets import (
    collect,
    core,
    engine_of,
    generate_together,
    random_ids,
    random_model,
    small_config,
    tokens_of,
)
from tests.laneformer.engine.test_running import run_python

# head dimensions of 6, padded to 16, in fp32: 64 positions share a page
PAGE = 64
LONG = {"max_position_embeddings": 1024, "vocab_size": 100}


def answer(
    engine: Engine, prompt: list[int], new: int = 8, **options
) -> tuple[list[int], list[float | None], int]:
    """Ids, log-probabilities, and how many prompt ids were not read again."""
    result = engine.generate_detailed(prompt, max_new_tokens=new, logprobs=0, ignore_eos=True, **options)
    return result.ids, [token.logprob for token in result.tokens], result.statistics.reused_tokens


def kv_bytes(engine: Engine) -> int:
    return core(engine).kv_bytes


def bytes_of(positions: int, config: LaneformerConfig | None = None, **options) -> int:
    """What one request of so many positions takes."""
    with engine_of(random_model(config or small_config(**LONG)), **options) as engine:
        engine.generate(random_ids(engine.config, positions), max_new_tokens=1)
        return kv_bytes(engine)


@pytest.mark.parametrize("conversations", [2, 12])
def test_a_conversation_is_still_there_after_others(conversations):
    with engine_of(random_model(small_config(**LONG), seed=1)) as engine:
        talks = [random_ids(engine.config, 100, seed=i) for i in range(conversations)]
        for turn in range(3):
            for i, talk in enumerate(talks):
                ids, _, reused = answer(engine, talk)
                assert reused == (len(talk) - 6 if turn else 0)  # five new ones, and the last of the answer
                talk += ids + random_ids(engine.config, 5, seed=100 + i)


def test_the_least_recently_used_conversation_goes_first():
    config = small_config(**LONG, swa_layers=())
    with engine_of(random_model(config, seed=2), cache_bytes=4 * bytes_of(100, config)) as engine:
        talks = [random_ids(engine.config, 100, seed=i) for i in range(6)]
        for talk in talks:
            answer(engine, talk, 1)
        assert [answer(engine, talks[i], 1)[2] for i in (3, 5, 2, 1, 3, 5, 2)] == [99, 99, 99, 0, 99, 99, 99]
        assert kv_bytes(engine) == 4 * bytes_of(100, config)


def test_another_conversation_with_the_same_beginning_leaves_the_first_as_it_is():
    with engine_of(random_model(small_config(**LONG), seed=3)) as engine:
        system = random_ids(engine.config, 200)
        talks = [system + random_ids(engine.config, 230, seed=i) for i in range(1, 5)]
        assert [answer(engine, talk)[2] for talk in talks] == [0, 200, 200, 200]
        assert [answer(engine, talk)[2] for talk in talks] == [429] * 4


@pytest.mark.parametrize("swa_layers", [(0, 1, 3), ()])
def test_a_prompt_may_part_anywhere_from_the_cached_one(swa_layers):
    model = random_model(small_config(**LONG, swa_layers=swa_layers), seed=3)
    ids = random_ids(model.config, 440)
    with engine_of(model) as engine, engine_of(model) as fresh:
        for kept in (439, 350, 301, 200, 8, 1):
            engine.generate(ids, max_new_tokens=1, reuse_prefix=False)
            other = [*ids[:kept], (ids[kept] + 1) % 100]
            seen = answer(engine, other, 1)
            assert seen[2] == kept
            assert seen[:2] == answer(fresh, other, 1, reuse_prefix=False)[:2]


def test_what_was_cancelled_or_kept_its_logits_changes_no_bit():
    model = random_model(small_config(**LONG), seed=5)
    ids = random_ids(model.config, 300)
    for length in (20, 130, 280):
        with engine_of(model) as fresh, engine_of(model) as engine:
            stream = engine.stream(ids[:length], max_new_tokens=50, speculate=4)
            next(stream), stream.close()
            for prompt in (ids, ids[: length + 2], ids[:length]):
                assert answer(engine, prompt)[:2] == answer(fresh, prompt, reuse_prefix=False)[:2]
                engine.logits(ids[:length])


@pytest.mark.parametrize("window", [7, 150])
def test_without_room_a_conversation_goes_on_with_its_windows_alone(window):
    model = random_model(small_config(**{**LONG, "sliding_window": window}), seed=4)
    with engine_of(model, cache_bytes=0) as engine, engine_of(model) as fresh:
        talk = random_ids(engine.config, 300)
        for turn in range(3):
            new = answer(engine, talk, 100)
            assert new[2] == (len(talk) - 61 if turn else 0)
            talk += new[0] + random_ids(engine.config, 60, seed=turn)
        edited = [*talk[:550], *random_ids(engine.config, 60, seed=9)]
        seen = answer(engine, edited)
        assert seen[:2] == answer(fresh, edited, reuse_prefix=False)[:2]
        assert seen[2] == 0


def test_positions_between_starts_go_first():
    """A start keeps the pages of its window, so that any position of its last page may be one."""
    model = random_model(small_config(**LONG), seed=5)
    with engine_of(model) as engine, engine_of(model) as fresh:
        talk = random_ids(engine.config, 300)
        talk += answer(engine, talk, 150)[0] + random_ids(engine.config, 200, seed=1)
        talk += answer(engine, talk, 150)[0]
        core(engine).set_cache_limit(kv_bytes(engine) - 1)
        engine.generate(random_ids(engine.config, 20, seed=2), max_new_tokens=1)
        # ends of prompts: 299 and 649; of the first answer: 449
        for kept, start in ((760, 649), (650, 649), (640, 449), (460, 449), (380, 299), (250, 0)):
            prompt = [*talk[:kept], (talk[kept] + 1) % 100]
            seen = answer(engine, prompt, 1)
            assert seen[:2] == answer(fresh, prompt, 1, reuse_prefix=False)[:2]
            assert start <= seen[2] <= -(-start // PAGE) * PAGE


def test_a_window_that_is_there_in_part_is_no_start():
    """Of 600 positions, a window of 150 keeps 128..319 and 448..599 for the starts 299 and 599."""
    model = random_model(small_config(**{**LONG, "sliding_window": 150}), seed=5)
    with engine_of(model) as engine, engine_of(model) as fresh:
        talk = random_ids(engine.config, 600)
        engine.generate(talk[:300], max_new_tokens=1)
        engine.generate(talk, max_new_tokens=1)
        core(engine).set_cache_limit(kv_bytes(engine) - 1)
        engine.generate(random_ids(engine.config, 20, seed=2), max_new_tokens=1)
        for kept, start in ((598, 598), (597, 597), (560, 320)):
            prompt = [*talk[:kept], (talk[kept] + 1) % 100]
            seen = answer(engine, prompt, 1)
            assert seen[:2] == answer(fresh, prompt, 1, reuse_prefix=False)[:2]
            assert seen[2] == start


def test_choices_of_one_prompt_read_it_once():
    model = random_model(small_config(**LONG), seed=6)
    prompt = random_ids(model.config, 300)
    options = {"max_new_tokens": 12, "temperature": 1.0, "seeds": [1, 2, 3]}
    with engine_of(model, threads=2) as engine, engine_of(model, threads=2) as fresh:
        given = generate_together(engine, [prompt] * 3, **options)
        assert engine.statistics.reused_tokens == 2 * 299
        assert engine.statistics.passes == 3 + 12  # the others' first tokens come one pass later
        assert given == generate_together(fresh, [prompt] * 3, reuse_prefix=False, **options)
        assert fresh.statistics.reused_tokens == 0


def test_a_request_copies_from_one_that_runs():
    threads = 3
    model = random_model(small_config(**LONG), seed=7)
    system = random_ids(model.config, 150)
    prompts = [system + random_ids(model.config, 20, seed=i) for i in range(1, 5)]
    with engine_of(model, threads=threads) as engine, engine_of(model, threads=threads) as fresh:
        with engine.batch() as batch:
            tickets = [batch.join(prompts[0], max_new_tokens=200, ignore_eos=True)]
            while not batch.updates(1.0):
                pass
            tickets += [batch.join(prompt, max_new_tokens=20, ignore_eos=True) for prompt in prompts[1:]]
            updates = collect(batch, *tickets)
        ended = [updates[ticket][-1].statistics for ticket in tickets]
        assert [statistics and statistics.reused_tokens for statistics in ended] == [0, 150, 150, 150]
        for prompt, ticket in list(zip(prompts, tickets, strict=True))[1:]:
            expected = fresh.generate(prompt, max_new_tokens=20, ignore_eos=True, reuse_prefix=False)
            assert [token.id for token in tokens_of(updates[ticket])] == expected


@pytest.mark.job
@pytest.mark.parametrize(
    ("threads", "kv_dtype", "window", "cached"),
    [(2, "fp16", 7, 3.0), (3, "int8", 90, 0.0)],
)
def test_any_conversations_give_a_fresh_engines_bits(threads, kv_dtype, window, cached):
    """Continued, edited, regenerated, branched, side by side; `cached`: conversations of
    600 positions that fit.
    """
    rng = np.random.default_rng(int(1000 * cached) + threads)
    model = random_model(small_config(**{**LONG, "sliding_window": window}), seed=8)
    limit = int(cached * bytes_of(600, kv_dtype=kv_dtype))
    options = {"threads": threads, "kv_dtype": kv_dtype}
    reused, talks = 0, [random_ids(model.config, 40)]
    with (
        engine_of(model, cache_bytes=limit, **options) as engine,
        engine_of(model, cache_bytes=0, **options) as fresh,
    ):
        for trial in range(20):
            talk, how = talks[rng.integers(len(talks))], rng.random()
            new = random_ids(model.config, int(rng.integers(1, 200)), seed=trial)
            kept = (
                len(talk) if how < 0.4 else int(rng.integers(len(talk) + 1)) if how < 0.6 else len(talk) - 30
            )
            prompts = [[*talk[: max(0, kept)], *new][:900]]
            prompts *= 3 if how > 0.9 else 1
            if how > 0.8:
                prompts.append([*talk[: len(talk) // 2], *new[:50]][:900])
            length = int(rng.integers(1, 100))
            given = generate_together(
                engine, prompts, max_new_tokens=length, seed=trial, temperature=0.7, speculate=3
            )
            reused += engine.statistics.reused_tokens
            expected = generate_together(
                fresh, prompts, max_new_tokens=length, seed=trial, temperature=0.7, reuse_prefix=False
            )
            assert given == expected
            assert kv_bytes(engine) <= max(limit, len(prompts) * bytes_of(1000, kv_dtype=kv_dtype))
            talks = [*talks[-8:], prompts[0] + given[0], prompts[-1] + given[-1]]
            talks = [talk if len(talk) < 800 else talk[:300] for talk in talks]
    assert reused > (0 if not cached else 1000)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_memory_is_taken_as_it_is_written_and_given_back():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    config = LaneformerConfig.from_flavor(
        "tiny", max_position_embeddings=131_072, num_hidden_layers=8, vocab_size=512
    )
    with Engine.random(config, dtype="bf16", threads=2, cache_bytes=1 << 40) as engine:
        engine.generate(random_ids(config, 2000, seed=9), max_new_tokens=1)  # touches the other buffers
        before, counted = resident(), kv_bytes(engine)
        for i in range(3):
            engine.generate(random_ids(config, 2000, seed=i), max_new_tokens=1, reuse_prefix=False)
        taken, written = resident() - before, kv_bytes(engine) - counted
        assert written == 3 * 2048 * config.cached_bytes(1, 2)  # pages hold 128 positions of 32 bytes
        assert abs(taken - written) < 0.1 * written
        core(engine).set_cache_limit(0)
        engine.generate([1, 2, 3], max_new_tokens=1)
        assert resident() - before < 0.1 * written


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc and RLIMIT_AS")
def test_a_cache_without_memory_takes_that_of_an_old_one_or_ends_its_request_alone():
    done = run_python("""
        import resource
        from laneformer import LaneformerConfig
        config = LaneformerConfig.from_flavor("tiny", max_position_embeddings=1 << 20, vocab_size=64)
        engine = Engine.random(config, dtype="bf16", threads=1, cache_bytes=1 << 50)
        first = engine.generate([1, 2, 3], max_new_tokens=4)
        cache = (1 << 20) * config.cached_bytes(1, 2)  # its address space alone
        used = 4096 * int(open("/proc/self/statm").read().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (used + 3 * cache // 4, resource.RLIM_INFINITY))
        print(engine.generate([1, 2, 3], max_new_tokens=4, reuse_prefix=False) == first)
        with engine.batch() as batch:
            tickets = [batch.join([n % 60, 2], max_new_tokens=n, speculate=0) for n in (300, 5)]
            ends = {}
            while len(ends) < 2:
                ends |= {u.ticket: u for u in batch.updates(1.0) if u.finish_reason}
        print(*(ends[t].finish_reason for t in tickets), ends[tickets[1]].error, sep="\\n")
        print(engine.statistics.passes, ends[tickets[0]].statistics.passes)
    """)
    assert done.returncode == 0, done.stderr
    again, first, second, error, passes = done.stdout.splitlines()
    assert (again, first, second) == ("True", "length", "error")
    assert "1048576 positions need more than" in error
    assert "the system does not give" in error
    assert passes == "300 300"  # those that could not run are not counted
