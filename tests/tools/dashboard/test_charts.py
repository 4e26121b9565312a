"""Tests of charts as data: thinning of rows, places of curves, colours."""

from __future__ import annotations

import math
from typing import Any

import pytest

from records.run import read_run
from tests.records.lines import write_lines
from tests.tools.dashboard import made_up_run
from tests.tools.dashboard.made_up_run import chart_of
from tools.dashboard import evaluations, training
from tools.dashboard.charts import (
    MOST,
    Panel,
    curve,
    figure,
    list_sources,
    make_loss_part,
    smooth,
    thin,
)
from tools.dashboard.page import colour


def points(*values: Any) -> list[tuple[dict[str, Any], Any]]:
    return [({"x_step": i}, value) for i, value in enumerate(values)]


def test_many_points_keep_their_spikes_ends_and_gaps():
    values: list[float | None] = [1.0 + 0.01 * math.sin(i) for i in range(100_000)]
    # a spike each way, and a tenth of the run without a value
    values[70_000], values[30_001], values[40_000:50_000] = 1e4, -1e4, [None] * 10_000
    chosen = thin(points(*values))
    steps = [row["x_step"] for row, _ in chosen]
    assert len(chosen) <= MOST
    assert {0, 30_001, 70_000, 99_999} <= {*steps}
    assert steps == sorted(steps)
    # what was not logged stays a gap
    assert sum(value is None for _, value in chosen) > 50
    assert thin(points(*values[:MOST])) == points(*values[:MOST])


def test_the_mean_follows_a_steep_beginning_and_then_smooths():
    # like the first steps of a training: a mean over a fixed span would lie far above
    steep = [8 / (1 + i) for i in range(50)]
    assert list(smooth(steep, 1000))[-1] < 1.1 * steep[-1] < 0.3 * sum(steep) / len(steep)
    for spike in (1e4, -1e4):
        mean = list(smooth([2.0] * 50 + [spike] + [2.0] * 50, 20))
        # a spike does not carry it away
        assert 1.3 < min(mean) <= max(mean) < 2.7
    risen = list(smooth([2.0] * 50 + [7.0] * 100, 5))[-1]
    # but a divergence does
    assert risen == pytest.approx(7, abs=0.01)
    assert list(smooth([3 + (-1) ** i for i in range(5000)], 100))[-1] == pytest.approx(3, abs=0.02)
    assert list(smooth([1.0, None, 1.0], 5)) == [1.0, None, 1.0]
    assert list(smooth([4.0, 2.0], 1)) == [4.0, pytest.approx((4 * 0.5 + 2) / 1.5)]


def test_panels_and_curves_without_figures_are_left_out_and_curves_stay_in_their_panels(tmp_path):
    empty = Panel("A"), [curve("a", points(None, math.nan), "red")]
    chart = figure(
        [
            empty,
            (
                Panel("B"),
                [curve("b", points(1.0, None, math.inf), "red"), curve("c", points(None), "red")],
            ),
        ]
    )
    assert chart
    assert [panel["title"] for panel in chart["panels"]] == ["B"]
    lines = [(line["name"], line["panel"], line["y"]) for line in chart["curves"]]
    assert lines == [("b", 0, [1.0, None, None])]
    assert figure([empty]) is None
    # of losses that are all NaN the validation stands in the panel of the loss
    rows = [
        {"step": i, "loss": None, "lr": 0.1, "valid_loss": 2.5 if i == 2 else None}
        for i in (1, 2, 3)
    ]
    run = read_run(write_lines(tmp_path / "metrics.jsonl", rows).parent)
    chart = chart_of(training.write_training_card(run))
    assert [panel["title"] for panel in chart["panels"]] == ["Loss", "Learning rate"]
    assert {(line["name"], line["panel"]) for line in chart["curves"]} == {
        ("validation loss", 0),
        ("Learning rate", 1),
    }


def test_the_loss_is_drawn_logged_and_smoothed_and_what_was_repeated_is_dotted(folder):
    run = read_run(folder)
    curves = make_loss_part(run)[1]
    logged, smoothed = (line for line in curves if line["group"] == "phase1")
    assert (logged["name"], smoothed["name"]) == ("Loss", "Loss, smoothed")
    assert (
        logged["y"]
        == [float(f"{row['loss']:.6g}") for row in run.rows_of("phase1")]
        != smoothed["y"]
    )
    # steps that a later attempt repeated
    again = [line for line in curves if line["group"] == "repeated later"]
    repeated = sum(len(segment.rows) for segment in run.segments if not segment.is_counted)
    assert sum(len(line["y"]) for line in again) == repeated > 0
    assert {line["dash"] for line in again} == {"dot"}


def test_phases_are_shaded_and_restarts_marked_on_every_axis(folder):
    run = read_run(folder)
    chart = figure([make_loss_part(run)], run)
    assert chart
    places = [(phase["name"], phase["x"]["steps"]) for phase in chart["phases"]]
    assert places == [("phase1", [1, 60]), ("phase2", [61, 90])]
    assert chart["phases"][1]["x"]["tokens"][0] == 61 * made_up_run.TOKENS_A_STEP
    assert chart["restarts"]["labels"] == ["↻2", "↻3", "↻2"]
    first = next(row for row in run.rows if row["attempt"] > 1)
    assert chart["restarts"]["x"]["time"][0] == 1000 * first["time"]


def test_a_source_has_one_colour_on_the_whole_page(folder):
    run = read_run(folder)
    names = list_sources(run)
    assert {*names} == {*made_up_run.SOURCES}
    cards = (
        training.write_sources_card(run),
        training.write_positions_card(run),
        evaluations.write_bits_card(run),
    )
    curves = [line for card in cards for line in chart_of(card)["curves"]]
    assert {(line["group"], line["colour"]) for line in curves if line["group"] in names} == {
        (name, colour(place)) for place, name in enumerate(names)
    }


def test_the_last_validation_by_position_stands_beside_the_first(tmp_path):
    lines: list[dict[str, Any]] = [
        {"step": step, "phase": "phase3", "loss": 2.0} for step in (1, 2, 3)
    ]
    lines[0] |= {
        "valid_loss_by_position": {"web": {"0": 5.0, "16": 4.0}, "books": {"0": 5.5, "128": 4.25}}
    }
    lines[2] |= {
        "valid_loss_by_position": {"web": {"0": 3.0, "16": None}, "books": {"0": 3.5, "128": 2.0}}
    }
    card = training.write_positions_card(
        read_run(write_lines(tmp_path / "metrics.jsonl", lines).parent)
    )
    assert "Bold: step 3; dotted: step 1" in card
    chart = chart_of(card)
    assert [(line["name"], line.get("dash"), line["y"]) for line in chart["curves"]] == [
        ("web", None, [3.0, None]),
        ("books", None, [3.5, 2.0]),
        ("web", "dot", [5.0, 4.0]),
        ("books", "dot", [5.5, 4.25]),
    ]
    assert chart["categories"] == ["0", "16", "128"]
