"""Tests of `Engine.batch`: joining and leaving, masks, and the pace of prompts."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from laneformer.engine import Engine
from laneformer.engine.cpu import _core
from tests.laneformer.engine import goldens
from tests.laneformer.engine.assets import (
    collect,
    engine_of,
    random_ids,
    small_model,
    tokens_of,
)

LONG = {"max_position_embeddings": 20_000}
ENDLESS = {"max_new_tokens": 19_900, "ignore_eos": True}


def test_a_ninth_request_is_refused_until_one_has_been_collected():
    # a place is taken until the end of its request is collected, however early that came
    with engine_of(small_model()) as engine, engine.batch() as batch:
        tickets = [
            batch.join([i], max_new_tokens=1 if i == 0 else 90, ignore_eos=True) for i in range(8)
        ]
        with pytest.raises(RuntimeError, match="8 requests; collect the end of one first"):
            batch.join([1])
        collect(batch, tickets[0])
        batch.join([1])


def test_requests_from_many_threads():
    # eight threads join and leave, one collects; nothing is lost or mixed up
    options = {"max_new_tokens": 40, "ignore_eos": True}
    with engine_of(small_model(), threads=2) as engine:
        expected = {i: engine.generate([i], **options) for i in range(8)}
        owner, leavers, reasons = {}, set(), {}

        def client(i):
            for turn in range(20):
                ticket = batch.join([i], **options)
                owner[ticket] = i
                if turn % 2:
                    leavers.add(ticket)
                    batch.leave(ticket)
                while ticket not in reasons:
                    time.sleep(0.001)

        with engine.batch() as batch:
            clients = [threading.Thread(target=client, args=[i], daemon=True) for i in range(8)]
            for thread in clients:
                thread.start()
            tokens = {}
            while any(thread.is_alive() for thread in clients):
                for update in batch.updates(0.05):
                    tokens.setdefault(update.ticket, []).extend(token.id for token in update.tokens)
                    if update.finish_reason:
                        reasons[update.ticket] = update.finish_reason
        assert len(reasons) == 160
        for ticket, reason in reasons.items():
            ids = tokens[ticket]
            assert ids == expected[owner[ticket]][: len(ids)]
            assert reason == "cancelled" if ticket in leavers and len(ids) < 40 else len(ids) == 40


def failing_at(token) -> Engine:
    """Return an engine whose activations overflow after this token."""
    model = small_model()
    with torch.no_grad():
        model.tok_embeddings.weight[token] = 1e30
    return engine_of(model, threads=3)


def test_an_overflow_ends_one_request_alone():
    with failing_at(7) as engine:
        expected = engine.generate(
            [3, 4], max_new_tokens=60, ignore_eos=True, logit_bias={7: -100.0}
        )
        # the second round shows that the first has left nothing behind
        for _ in range(2):
            with engine.batch() as batch:
                good = batch.join(
                    [3, 4], max_new_tokens=60, ignore_eos=True, logit_bias={7: -100.0}
                )
                bad = [batch.join([5, i, 7], max_new_tokens=60) for i in range(3)]
                scored = batch.score([5, 6, 7, 8])
                updates = collect(batch, good, *bad, scored)
            for ticket in (*bad, scored):
                assert updates[ticket][-1].finish_reason == "error"
                assert "infinite, NaN" in (updates[ticket][-1].error or "")
            assert [token.id for token in tokens_of(updates[good])] == expected
        assert (
            engine.generate([3, 4], max_new_tokens=60, ignore_eos=True, logit_bias={7: -100.0})
            == expected
        )


def mask_of(*ids: int) -> np.ndarray:
    return goldens.mask_of(ids, 100)


def test_a_mask_without_a_possible_id_ends_its_request_with_an_error():
    with engine_of(small_model(**LONG)) as engine, engine.batch() as batch:
        options = {"masked": True, "max_new_tokens": 5, "stop_ids": [9], "min_new_tokens": 2}
        empty, stops = batch.join([1, 2], **options), batch.join([1, 2], **options)
        batch.allow(empty, 0, mask_of(3, 4))
        batch.allow(empty, 1, mask_of())
        batch.allow(stops, 0, mask_of(9))  # which may not come yet
        updates = collect(batch, empty, stops)
        assert len(tokens_of(updates[empty])) == 1
        for ticket in (empty, stops):
            assert updates[ticket][-1].finish_reason == "error"
            assert "leaves no id" in (updates[ticket][-1].error or "")
        batch.allow(empty, 2, mask_of(1))  # it has ended: nothing
        plain = batch.join([1], **ENDLESS)
        with pytest.raises(ValueError, match="without masked"):
            batch.allow(plain, 19_000, mask_of(1))
        with pytest.raises(ValueError, match="a mask has 4 words, not 3"):
            batch.allow(plain, 0, np.zeros(3, np.uint32))


def test_a_request_may_leave_while_it_waits_for_its_mask():
    with engine_of(small_model()) as engine:
        with engine.batch() as batch:
            ticket = batch.join([1, 2], masked=True)
            assert batch.updates(0.05) == []
            with pytest.raises(RuntimeError, match="busy with another request"):
                engine.generate([1, 2])
            batch.leave(ticket)
            assert collect(batch, ticket)[ticket][-1].finish_reason == "cancelled"
            batch.join([1, 2], masked=True)  # left to `close`
        assert len(engine.generate([1], max_new_tokens=3, ignore_eos=True)) == 3


def test_a_long_prompt_is_read_in_parts_beside_others():
    # parts begin with two columns and grow by half at most; alone it is one pass (test_goldens.py)
    with engine_of(small_model(**LONG), threads=2) as engine:
        prompt = random_ids(engine.config, 90)
        with engine.batch() as batch:
            other = batch.join([1], **ENDLESS)
            while not batch.updates(10.0):
                pass
            ticket = batch.join(prompt, max_new_tokens=1, reuse_prefix=False)
            beside = collect(batch, ticket)[ticket][-1].statistics
            batch.leave(other)
        assert 8 <= beside.passes <= 90


# seconds of a pass with 1 + so many columns: bound by memory and then by arithmetic; by arithmetic
# alone; by neither; and one where a second column costs far more than the first
MACHINES = {
    "memory": lambda columns: max(0.013, 0.0011 * (1 + columns)),
    "arithmetic": lambda columns: 0.001 * (1 + columns),
    "neither": lambda columns: 0.02,
    "steep": lambda columns: 1.0 + 3.0 * columns,
}


@pytest.mark.parametrize("machine", MACHINES)
def test_the_pace_keeps_gaps_below_twice_the_usual(machine):
    seconds, pace, rng = MACHINES[machine], _core.Pace(), np.random.default_rng(0)
    best = max([1, *(columns for columns in range(1, 129) if seconds(columns) < 1.7 * seconds(0))])
    column_counts = []
    for turn in range(1000):
        columns = pace.columns()
        assert 0 <= columns <= 128
        column_counts.append(columns)
        disturbed = 5.0 if turn % 100 == 99 else 1.0  # a thread loses its core now and then
        pace.learn(columns, seconds(columns) * disturbed * rng.uniform(1.0, 1.05))
    assert max(column_counts) <= max(2, 1.1 * best)
    assert np.mean(column_counts) >= 0.8 * best, "prompts are not held up for nothing"
    assert 10 <= column_counts.count(0) < 20, "the usual time is measured again and again"


def test_an_engine_may_close_while_requests_run_and_wait():
    engine = engine_of(small_model(**LONG), threads=2)
    batch = engine.batch()
    for i in range(7):
        batch.join([i], **ENDLESS)
    # this one waits for a mask, which never comes
    batch.join([9], masked=True)
    batch.updates(5.0)
    collecting = threading.Thread(target=batch.updates, args=[0.5])
    # and a thread waits within `updates` meanwhile
    collecting.start()
    engine.close()
    collecting.join()
    with pytest.raises(ValueError, match="closed"):
        batch.join([1, 2])
