"""Requests that run side by side: `Engine.batch`."""

from __future__ import annotations

import numpy as np
import pytest

from laneformer.engine import Batch, GeneratedToken, Update
from tests.laneformer.engine.assets import engine_of, random_ids, random_model, small_config


def collect(batch: Batch, *tickets: int) -> dict[int, list[Update]]:
    """The updates of these requests until they have ended."""
    found: dict[int, list[Update]] = {ticket: [] for ticket in tickets}
    while any(not updates or updates[-1].finish_reason is None for updates in found.values()):
        for update in batch.updates(10.0):
            found[update.ticket].append(update)
    return found


def tokens_of(updates: list[Update]) -> list[GeneratedToken]:
    return [token for update in updates for token in update.tokens]


def test_a_joined_request_gives_what_it_gives_alone() -> None:
    with engine_of(random_model(small_config())) as engine:
        prompt = random_ids(engine.config, 20)
        alone = engine.generate_detailed(prompt, max_new_tokens=12, logprobs=2, temperature=1.0, seed=3)
        with engine.batch() as batch:
            ticket = batch.join(prompt, max_new_tokens=12, logprobs=2, temperature=1.0, seed=3)
            updates = collect(batch, ticket)[ticket]
        assert tokens_of(updates) == alone.tokens
        assert updates[-1].finish_reason == alone.finish_reason


def test_a_scoring_request_joins_as_well() -> None:
    with engine_of(random_model(small_config())) as engine:
        ids = random_ids(engine.config, 30)
        alone = engine.logprobs(ids, start=5, top=3)
        with engine.batch() as batch:
            ticket = batch.score(ids, start=5, top=3)
            scores = collect(batch, ticket)[ticket][-1].scores
        assert scores is not None
        for name in ("logprobs", "top_ids", "top_logprobs", "is_greedy"):
            assert np.array_equal(getattr(scores, name), getattr(alone, name))


def test_a_request_that_leaves_is_cancelled_and_the_engine_goes_on() -> None:
    with engine_of(random_model(small_config())) as engine:
        with engine.batch() as batch:
            ticket = batch.join(random_ids(engine.config, 4), max_new_tokens=100_000, ignore_eos=True)
            batch.leave(ticket)
            assert collect(batch, ticket)[ticket][-1].finish_reason == "cancelled"
            with pytest.raises(RuntimeError, match="busy with another request"):
                engine.generate([1, 2])
        assert len(engine.generate([1, 2], max_new_tokens=3, ignore_eos=True)) == 3


def test_an_engine_that_closes_ends_its_batch() -> None:
    engine = engine_of(random_model(small_config()))
    batch = engine.batch()
    batch.join(random_ids(engine.config, 4), max_new_tokens=100_000, ignore_eos=True)
    engine.close()
    with pytest.raises(ValueError, match="closed"):
        batch.join([1, 2])
