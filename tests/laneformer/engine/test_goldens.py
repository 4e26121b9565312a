"""Tests that 200 recorded requests always give the same ids, however they are run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from laneformer.engine import Engine
from tests.laneformer.engine.assets import core, usable_isas
from tests.laneformer.engine.goldens import (
    MODELS,
    ROUNDED,
    GoldenRequest,
    alone,
    engine_of,
    goldens,
    ids_of_tokens,
    requests,
    side_by_side,
)

GOLDENS = goldens()
FIGURES = 4  # of the statistics, after the ids
Answer = Callable[[Engine, list[GoldenRequest]], list[list[int]]]
CHEAP = 0.001  # of the cost of a pass: so that drafts are made


def ids(name) -> list[list[int]]:
    return [answer[:-FIGURES] for answer in GOLDENS[name]]


def check_all(name, **options):
    """Check every request alone and all of them side by side."""
    all_requests = requests(name)
    with engine_of(name, **options) as engine:
        assert [alone(engine, request) for request in all_requests] == GOLDENS[name]
        assert side_by_side(engine, all_requests) == ids(name)


@pytest.mark.parametrize("name", MODELS)
def test_alone_and_side_by_side(name):
    check_all(name, threads=2)


@pytest.mark.job
@pytest.mark.parametrize("name", MODELS)
def test_on_every_instruction_set(name):
    for isa in usable_isas():
        if isa == "portable" and name in ROUNDED:
            continue
        for threads in (1, 3):
            check_all(name, threads=threads, isa=isa)


def test_as_streams_and_at_once():
    with engine_of("delay_2", threads=3) as engine:
        for request, expected in zip(requests("delay_2"), ids("delay_2"), strict=True):
            if not request.start and not request.masks:
                tokens = list(engine.stream_detailed(request.ids, **request.options))
                result = engine.generate_detailed(
                    request.ids, **request.options | {"reuse_prefix": False}
                )
                assert ids_of_tokens(tokens) == ids_of_tokens(result.tokens) == expected


def test_with_masks_that_come_late():
    for threads in (1, 3):
        with engine_of("delay_2", threads=threads) as engine:
            assert side_by_side(engine, requests("delay_2"), late_masks=True) == ids("delay_2")


def one_by_one(engine, all_requests) -> list[list[int]]:
    return [alone(engine, request)[:-FIGURES] for request in all_requests]


def with_drafts(all_requests: list[GoldenRequest]) -> list[GoldenRequest]:
    return [
        request
        if request.start
        else dataclasses.replace(request, options={**request.options, "speculate": 31})
        for request in all_requests
    ]


@pytest.mark.parametrize("answer", [one_by_one, side_by_side])
@pytest.mark.parametrize(
    ("name", "heads"), [("delay_2", 0), ("int4", 0), ("delay_2", 1), ("replicated_head", 1)]
)
def test_with_drafts_of_a_small_model_or_of_an_own_head(name, heads, answer):
    # a head adds tensors and does not change the others
    with (
        engine_of(name, threads=2, num_nextn_predict_layers=heads) as engine,
        engine_of(name, threads=2, seed=12) as small,
    ):
        decoder = core(engine)
        if not heads:
            decoder.draft_with(core(small))
        decoder.fix_cost(CHEAP, CHEAP)
        decoder.recorded_drafts()
        assert answer(engine, with_drafts(requests(name))) == ids(name)
        assert len(decoder.recorded_drafts()) > 30


@pytest.mark.parametrize("name", ["delay_2", "lane_head"])
def test_behind_a_slow_link_between_lanes(name):
    for threads, link_s in ((2, 2e-5), (4, 1e-4)):
        with engine_of(name, threads=threads) as engine:
            assert core(engine).set_latency(link_s)
            assert side_by_side(engine, requests(name)) == ids(name)


@pytest.mark.parametrize("name", ["delay_2", "two_lanes"])
def test_with_prefixes_from_files_after_restarts(name, tmp_path):
    all_requests, answers, hits = requests(name), [], 0
    # a restart after every fifth request
    for first in range(0, len(all_requests), 5):
        with engine_of(name, threads=2, cache_dir=tmp_path) as engine:
            answers += one_by_one(engine, all_requests[first : first + 5])
            hits += engine.saved_prefixes["hits"]
    assert answers == ids(name)
    # or files had no part in the answers
    assert hits > 3
