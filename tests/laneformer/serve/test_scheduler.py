"""Tests of the scheduler on a real engine: order, times and hand-over."""

import asyncio
import itertools
import queue
from typing import Any

import pytest

from laneformer.serve.scheduler import MIN_SHARE_TOKENS, Running, Scheduler
from tests.laneformer.engine.assets import engine_of, random_model, small_config


@pytest.fixture(scope="module")
def engine():
    with engine_of(random_model(small_config(max_position_embeddings=512)), threads=1) as engine:
        yield engine


@pytest.fixture
def scheduler(engine):
    scheduler = Scheduler(engine, max_waiting=3)
    yield scheduler
    scheduler.close()


async def ids_of(running: Running) -> list[int]:
    return [token.id async for tokens in running for token in tokens]


def make_options(seed: int = 0, tokens: int = 20) -> dict[str, Any]:
    sampling = {"max_new_tokens": tokens, "temperature": 1.0, "seed": seed, "ignore_eos": True}
    return {"prompt_ids": [1 + seed % 90, 2, 3], **sampling}


def submit(scheduler: Scheduler, *numbers: int) -> Running:
    return scheduler.submit(scheduler.batch.generation(**make_options(*numbers)))


def test_answers_are_those_of_the_engine_alone(engine):
    expected = [engine.generate(**make_options(i)) for i in range(4)]
    scheduler = Scheduler(engine)

    async def all_at_once():
        return await asyncio.gather(*(ids_of(submit(scheduler, i)) for i in range(4)))

    try:
        assert asyncio.run(all_at_once()) == expected
        assert asyncio.run(all_at_once()) == expected  # another loop
    finally:
        scheduler.close()
    assert engine.generate([1, 2, 3], max_new_tokens=3)  # given back


def test_a_request_reports_its_end_and_times(scheduler):
    async def one():
        running = submit(scheduler, 0, 7)
        assert len(await ids_of(running)) == 7
        return running

    running = asyncio.run(one())
    assert running.finish_reason == "length"
    assert running.statistics is not None
    assert running.submitted_s <= running.started_s <= running.first_token_s
    assert scheduler.totals.generated_tokens == 7
    assert scheduler.totals.prompt_tokens == 3
    assert scheduler.totals.ended == {"length": 1}


@pytest.mark.parametrize(("processor_s", "share"), [(0.0, 0.0), (1e6, 1.0)])
def test_a_busy_machine_is_seen(scheduler, monkeypatch, processor_s, share):
    # the engine's threads get no processor, or all that they want
    times_s = itertools.count(0.0, processor_s)
    monkeypatch.setattr("laneformer.serve.scheduler.time.process_time", lambda: next(times_s))
    asyncio.run(run_one(scheduler, MIN_SHARE_TOKENS - 1))
    assert scheduler.totals.processor_share is None, "too few tokens to tell"
    while (
        scheduler.totals.processor_share is None
    ):  # tokens that came together have no time between them
        asyncio.run(run_one(scheduler, 4 * MIN_SHARE_TOKENS))
    assert scheduler.totals.processor_share == share


async def run_one(scheduler: Scheduler, tokens: int):
    await ids_of(submit(scheduler, 0, tokens))


def test_each_idle_stretch_is_told_once(engine, monkeypatch):
    monkeypatch.setattr("laneformer.serve.scheduler.IDLE_S", 0.0)
    stretches = queue.Queue()
    scheduler = Scheduler(engine, when_idle=lambda: stretches.put(1))
    for _ in range(3):
        stretches.get(timeout=60)
        assert stretches.empty()
        asyncio.run(run_one(scheduler, 1))
    scheduler.close()


def test_first_come_first_served(scheduler):
    async def three():
        running = [submit(scheduler, i, 30) for i in range(scheduler.max_joined + 3)]
        await asyncio.gather(*map(ids_of, running))
        return running

    started = [running.started_s for running in asyncio.run(three())]
    assert started == sorted(started)
