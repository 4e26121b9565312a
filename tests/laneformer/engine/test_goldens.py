"""The ids that 200 recorded requests were answered with: the same for ever, however they are run."""

from __future__ import annotations

import pytest

from tests.laneformer.engine.assets import usable_isas
from tests.laneformer.engine.goldens import (
    MODELS,
    ROUNDED,
    alone,
    engine_of,
    goldens,
    requests,
    side_by_side,
    streamed,
)

GOLDENS = goldens()
FIGURES = 4  # of the statistics, after the ids


def ids(name: str) -> list[list[int]]:
    return [answer[:-FIGURES] for answer in GOLDENS[name]]


def check_all(name: str, **options: object) -> None:
    """Every request one after the other, its statistics too, and all side by side."""
    every = requests(name)
    with engine_of(name, **options) as engine:
        assert [alone(engine, asked) for asked in every] == GOLDENS[name]
        assert side_by_side(engine, every) == ids(name)


@pytest.mark.parametrize("name", MODELS)
def test_alone_and_side_by_side(name: str) -> None:
    check_all(name, threads=2)


@pytest.mark.job
@pytest.mark.parametrize("name", MODELS)
def test_on_every_instruction_set(name: str) -> None:
    for isa in usable_isas():
        if isa == "portable" and name in ROUNDED:
            continue
        for threads in (1, 3):
            check_all(name, threads=threads, isa=isa)


@pytest.mark.rotate
@pytest.mark.parametrize("name", MODELS)
def test_in_several_processes(name: str) -> None:
    for processes in (2, 4):
        if MODELS[name].get("num_lanes", 4) >= processes:
            check_all(name, threads=1, processes=processes)


def test_as_streams() -> None:
    with engine_of("delay_2", threads=3) as engine:
        for asked, expected in zip(requests("delay_2"), ids("delay_2"), strict=True):
            if not asked.start and not asked.masks:
                assert streamed(engine, asked) == expected


def test_all_kinds_are_there() -> None:
    asked = [request for name in MODELS for request in requests(name)]
    assert len(asked) == sum(map(len, GOLDENS.values())) == 204
    figures = [answer[-FIGURES:] for name in MODELS for answer in GOLDENS[name]]
    reused, _, proposed, accepted = map(sum, zip(*figures, strict=True))
    assert reused > 1000
    assert proposed > accepted > 100
    for kind in (lambda r: r.start, lambda r: r.masks, lambda r: "temperature" in r.options):
        assert sum(map(bool, map(kind, asked))) > 20
