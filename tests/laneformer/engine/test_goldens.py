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


def exact_isas(name: str) -> list[str]:
    return [isa for isa in usable_isas() if isa != "portable" or name not in ROUNDED]


@pytest.mark.parametrize("name", MODELS)
def test_one_after_the_other(name: str) -> None:
    with engine_of(name, threads=1) as engine:
        assert [alone(engine, asked) for asked in requests(name)] == GOLDENS[name]


@pytest.mark.parametrize("name", MODELS)
def test_side_by_side(name: str) -> None:
    with engine_of(name, threads=2) as engine:
        assert side_by_side(engine, requests(name)) == ids(name)


def test_all_kinds_are_there() -> None:
    asked = [request for name in MODELS for request in requests(name)]
    assert len(asked) == sum(map(len, GOLDENS.values())) == 204
    figures = [answer[-FIGURES:] for name in MODELS for answer in GOLDENS[name]]
    reused, _, proposed, accepted = map(sum, zip(*figures, strict=True))
    assert reused > 1000
    assert proposed > accepted > 100
    for kind in (lambda r: r.start, lambda r: r.masks, lambda r: "temperature" in r.options):
        assert sum(map(bool, map(kind, asked))) > 20


@pytest.mark.job
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_on_every_instruction_set(name: str, threads: int) -> None:
    every = requests(name)
    plain = [number for number, asked in enumerate(every) if not asked.start and not asked.masks]
    for isa in exact_isas(name):
        with engine_of(name, threads=threads, isa=isa) as engine:
            assert [alone(engine, asked) for asked in every] == GOLDENS[name]
            assert side_by_side(engine, every) == ids(name)
            for number in plain:
                assert streamed(engine, every[number]) == ids(name)[number]


@pytest.mark.rotate
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_in_several_processes(name: str, processes: int) -> None:
    if MODELS[name].get("num_lanes", 4) < processes:
        pytest.skip("a lane is not cut")
    every = requests(name)
    with engine_of(name, threads=1, processes=processes) as engine:
        assert [alone(engine, asked) for asked in every] == GOLDENS[name]
        assert side_by_side(engine, every) == ids(name)
