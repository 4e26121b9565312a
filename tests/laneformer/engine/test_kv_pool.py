"""Tests of cached keys and values within `cache_bytes`: eviction, where prompts start, equal bits."""

from __future__ import annotations

import sys

import pytest

from laneformer import LaneformerConfig
from laneformer.engine import Engine
from tests.laneformer.engine.assets import (
    collect,
    core,
    engine_of,
    random_ids,
    random_model,
    resident_bytes,
    small_config,
    small_model,
)
from tests.laneformer.engine.test_running import run_python

# head dimensions of 6, padded to 16, in fp32: 64 positions share a page
PAGE = 64
LONG = {"max_position_embeddings": 1024, "vocab_size": 100}


def answer(engine, prompt, new=8, **options) -> tuple[list[int], list[float | None], int]:
    """Return ids, log-probabilities, and the number of reused prompt ids."""
    result = engine.generate_detailed(
        prompt, max_new_tokens=new, logprobs=0, ignore_eos=True, **options
    )
    return result.ids, [token.logprob for token in result.tokens], result.statistics.reused_tokens


def check_reuse(engine, fresh, prompt, new=8) -> int:
    """Return the number of reused ids, after comparing bits with an engine that reads all of them."""
    *output, reused = answer(engine, prompt, new)
    assert output == [*answer(fresh, prompt, len(output[0]), reuse_prefix=False)[:2]]
    return reused


def kv_bytes(engine) -> int:
    return core(engine).kv_bytes


def bytes_of(positions, config=None, **options) -> int:
    with engine_of(random_model(config or small_config(**LONG)), **options) as engine:
        engine.generate(random_ids(engine.config, positions), max_new_tokens=1)
        return kv_bytes(engine)


@pytest.mark.parametrize("conversations", [2, 12])
def test_a_conversation_is_still_there_after_others(conversations):
    with engine_of(small_model(**LONG, seed=1)) as engine:
        talks = [random_ids(engine.config, 100, seed=i) for i in range(conversations)]
        for turn in range(3):
            for i, talk in enumerate(talks):
                ids, _, reused = answer(engine, talk)
                assert reused == (
                    len(talk) - 6 if turn else 0
                )  # five new ones, and the last of the answer
                talk += ids + random_ids(engine.config, 5, seed=100 + i)


def test_the_least_recently_used_conversation_goes_first():
    config = small_config(**LONG, swa_layers=())
    with engine_of(random_model(config, seed=2), cache_bytes=4 * bytes_of(100, config)) as engine:
        talks = [random_ids(engine.config, 100, seed=i) for i in range(6)]
        for talk in talks:
            answer(engine, talk, 1)
        # the last four of the six fit; 1 takes the room of 4, the only one not asked for again
        assert [answer(engine, talks[i], 1)[2] for i in (3, 5, 2, 1, 3, 5, 2)] == [
            99,
            99,
            99,
            0,
            99,
            99,
            99,
        ]
        assert kv_bytes(engine) == 4 * bytes_of(100, config)


@pytest.mark.parametrize("swa_layers", [(0, 1, 3), ()])
def test_a_prompt_may_part_anywhere_from_the_cached_one(swa_layers):
    # 439 of 440 is the most that can be reused, since the last id is always read
    model = small_model(**LONG, swa_layers=swa_layers, seed=3)
    ids = random_ids(model.config, 440)
    with engine_of(model) as engine, engine_of(model) as fresh:
        for shared in (439, 350, 301, 200, 8, 1):
            engine.generate(ids, max_new_tokens=1, reuse_prefix=False)
            other = [*ids[:shared], (ids[shared] + 1) % 100]
            assert check_reuse(engine, fresh, other, 1) == shared


def test_what_was_cancelled_or_kept_its_logits_changes_no_bit():
    model = small_model(**LONG, seed=5)
    ids = random_ids(model.config, 300)
    for length in (20, 130, 280):
        with engine_of(model) as fresh, engine_of(model) as engine:
            stream = engine.stream(ids[:length], max_new_tokens=50, speculate=4)
            # cancelled with drafts under way
            next(stream), stream.close()
            for prompt in (ids, ids[: length + 2], ids[:length]):
                check_reuse(engine, fresh, prompt)
                engine.logits(ids[:length])


@pytest.mark.parametrize("window", [7, 150])
def test_without_room_a_conversation_goes_on_with_its_windows_alone(window):
    model = small_model(**{**LONG, "sliding_window": window}, seed=4)
    with engine_of(model, cache_bytes=0) as engine, engine_of(model) as fresh:
        talk = random_ids(engine.config, 300)
        for turn in range(3):
            new = answer(engine, talk, 100)
            # but for the 60 new ids, and the answer's last token, which no pass has read
            assert new[2] == (len(talk) - 61 if turn else 0)
            talk += new[0] + random_ids(engine.config, 60, seed=turn)
        # parts from it before the windows that are there, so all of it is read again
        edited = [*talk[:550], *random_ids(engine.config, 60, seed=9)]
        assert check_reuse(engine, fresh, edited) == 0


def test_positions_between_starts_go_first():
    # a start keeps its window's pages, so any position of its last page may be a start
    model = small_model(**LONG, seed=5)
    with engine_of(model) as engine, engine_of(model) as fresh:
        talk = random_ids(engine.config, 300)
        talk += answer(engine, talk, 150)[0] + random_ids(engine.config, 200, seed=1)
        talk += answer(engine, talk, 150)[0]
        core(engine).set_cache_limit(kv_bytes(engine) - 1)
        engine.generate(random_ids(engine.config, 20, seed=2), max_new_tokens=1)
        # ends of prompts: 299 and 649; of the first answer: 449
        for shared, start in ((760, 649), (650, 649), (640, 449), (460, 449), (380, 299), (250, 0)):
            prompt = [*talk[:shared], (talk[shared] + 1) % 100]
            assert start <= check_reuse(engine, fresh, prompt, 1) <= -(-start // PAGE) * PAGE


def test_a_request_copies_from_one_that_runs():
    # test_goldens.py checks the tokens
    model = small_model(**LONG, seed=7)
    system = random_ids(model.config, 150)
    prompts = [system + random_ids(model.config, 20, seed=i) for i in range(1, 5)]
    with engine_of(model, threads=3) as engine, engine.batch() as batch:
        tickets = [batch.join(prompts[0], max_new_tokens=200, ignore_eos=True)]
        while not batch.updates(1.0):
            pass
        tickets += [
            batch.join(prompt, max_new_tokens=20, ignore_eos=True) for prompt in prompts[1:]
        ]
        updates = collect(batch, *tickets)
    totals = [updates[ticket][-1].statistics for ticket in tickets]
    assert [statistics and statistics.reused_tokens for statistics in totals] == [0, 150, 150, 150]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_memory_is_taken_as_it_is_written_and_given_back():
    config = LaneformerConfig.from_flavor(
        "tiny", max_position_embeddings=131_072, num_hidden_layers=8, vocab_size=512
    )
    with Engine.random(config, dtype="bf16", threads=2, cache_bytes=1 << 40) as engine:
        # touches the other buffers
        engine.generate(random_ids(config, 2000, seed=9), max_new_tokens=1)
        before, kv_before = resident_bytes(), kv_bytes(engine)
        for i in range(3):
            engine.generate(random_ids(config, 2000, seed=i), max_new_tokens=1, reuse_prefix=False)
        resident, written = resident_bytes() - before, kv_bytes(engine) - kv_before
        assert written == 3 * 2048 * config.cached_bytes(
            1, 2
        )  # pages hold 128 positions of 32 bytes
        assert abs(resident - written) < 0.1 * written
        core(engine).set_cache_limit(0)
        engine.generate([1, 2, 3], max_new_tokens=1)
        assert resident_bytes() - before < 0.1 * written


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc and RLIMIT_AS")
def test_a_cache_without_memory_takes_that_of_an_old_one_or_ends_its_request_alone():
    process = run_python("""
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
    assert process.returncode == 0, process.stderr
    again, first, second, error, passes = process.stdout.splitlines()
    assert (again, first, second) == ("True", "length", "error")
    assert "1048576 positions need more than" in error
    assert "the system does not give" in error
    assert passes == "300 300"  # those that could not run are not counted
