"""Charts as data: what is drawn of many rows, where curves stand, and whose colour they have."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from records.page import colour
from records.run import read_run
from tests.tools.dashboard import made_up_run
from tools.dashboard import charts, evaluations, training
from tools.dashboard.charts import MOST, Panel, curve, figure, loss_part, smooth, thin


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_up_run.write_run(tmp_path_factory.mktemp("runs") / "run", steps=60, every=1)


def spec_of(html: str) -> dict[str, Any]:
    return json.loads(html.partition('<script type="application/json">')[2].partition("</script>")[0])


def test_many_points_keep_their_spikes_ends_and_gaps() -> None:
    points = [({"x_step": i}, 1.0 + 0.01 * math.sin(i)) for i in range(100_000)]
    points[70_000] = points[70_000][0], 1e4
    points[30_001] = points[30_001][0], -1e4
    points[40_000:50_000] = [(row, None) for row, _ in points[40_000:50_000]]
    kept = thin(points)
    assert len(kept) <= MOST
    assert {points[i][0]["x_step"] for i in (0, 30_001, 70_000, 99_999)} <= {row["x_step"] for row, _ in kept}
    assert [row["x_step"] for row, _ in kept] == sorted(row["x_step"] for row, _ in kept)
    assert sum(value is None for _, value in kept) > 50, "what was not logged stays a gap"
    assert thin(points[:MOST]) == points[:MOST]


def test_the_mean_follows_a_steep_beginning_and_then_smooths() -> None:
    steep = [8 / (1 + i) for i in range(50)]
    assert list(smooth(steep, 1000))[-1] < 1.1 * steep[-1] < 0.3 * sum(steep) / len(steep)
    assert max(smooth([2.0] * 50 + [1e4] + [2.0] * 50, 20)) < 2.7, "a spike does not carry it away"
    assert list(smooth([2.0] * 50 + [7.0] * 100, 5))[-1] == pytest.approx(7, abs=0.01), (
        "but a divergence does"
    )
    noisy = [3 + (-1) ** i for i in range(5000)]
    assert list(smooth(noisy, 100))[-1] == pytest.approx(3, abs=0.02)
    assert list(smooth([1.0, None, 1.0], 5)) == [1.0, None, 1.0]
    assert list(smooth([4.0, 2.0], 1)) == [4.0, pytest.approx((4 * 0.5 + 2) / 1.5)]


def test_panels_and_curves_without_figures_are_left_out_and_curves_stay_in_their_panels() -> None:
    def points(*values: Any) -> list[tuple[dict[str, Any], Any]]:
        return [({"x_step": i}, value) for i, value in enumerate(values)]

    parts = [
        (Panel("A"), [curve("a", points(None, math.nan), "red")]),
        (Panel("B"), [curve("b", points(1.0, None, math.inf), "red"), curve("empty", points(None), "red")]),
    ]
    chart = figure(parts)
    assert chart
    assert [panel["title"] for panel in chart["panels"]] == ["B"]
    assert [(each["name"], each["panel"], each["y"]) for each in chart["curves"]] == [
        ("b", 0, [1.0, None, None])
    ]
    assert figure(parts[:1]) is None


def test_of_losses_that_are_all_nan_the_validation_stands_in_the_panel_of_the_loss(tmp_path: Path) -> None:
    rows = [{"step": i, "loss": None, "lr": 0.1, "valid_loss": 2.5 if i == 2 else None} for i in (1, 2, 3)]
    chart = spec_of(
        training.training_card(read_run(made_up_run.write_lines(tmp_path / "metrics.jsonl", rows)))
    )
    titles = [panel["title"] for panel in chart["panels"]]
    assert titles == ["Loss", "Learning rate"]
    assert {(each["name"], titles[each["panel"]]) for each in chart["curves"]} == {
        ("validation loss", "Loss"), ("Learning rate", "Learning rate")
    }  # fmt: skip


def test_the_loss_is_drawn_logged_smoothed_validated_and_what_was_repeated_is_dotted(folder: Path) -> None:
    run = read_run(folder)
    curves = loss_part(run)[1]
    of_phase = [each for each in curves if each["group"] == "phase1"]
    assert [(each["name"], each["width"]) for each in of_phase] == [("Loss", 1.2), ("Loss, smoothed", 2.4)]
    assert of_phase[0]["y"] == [float(f"{row['loss']:.6g}") for row in run.rows_of("phase1")]
    assert of_phase[1]["y"] != of_phase[0]["y"]
    assert [each["colour"] for each in curves if each["name"] == "Loss"] == [colour(0), colour(1)]
    again = [value for each in curves if each["group"] == "repeated later" for value in each["y"]]
    assert len(again) == sum(len(segment.rows) for segment in run.segments if not segment.kept) > 0
    assert {each["dash"] for each in curves if each["group"] == "repeated later"} == {"dot"}
    validated = [value for each in curves if each["group"] == "validation loss" for value in each["y"]]
    assert len(validated) == sum(row["valid_loss"] is not None for row in run.kept_rows)


def test_phases_are_shaded_and_restarts_marked_on_every_axis(folder: Path) -> None:
    run = read_run(folder)
    chart = figure([loss_part(run)], run)
    assert chart
    assert [(phase["name"], phase["x"]["steps"]) for phase in chart["phases"]] == [
        ("phase1", [1, 60]),
        ("phase2", [61, 90]),
    ]
    assert chart["phases"][1]["x"]["tokens"][0] == 61 * made_up_run.TOKENS_A_STEP
    assert chart["restarts"]["labels"] == ["↻2", "↻3", "↻2"]
    firsts = [row for row in run.kept_rows if row["attempt"] > 1]
    assert chart["restarts"]["x"]["time"][0] == 1000 * firsts[0]["time"]


def test_a_source_has_one_colour_on_the_whole_page(folder: Path) -> None:
    run = read_run(folder)
    names = charts.sources_of(run)
    assert {*names} == {*made_up_run.SOURCES}
    seen = dict[str, set[str]]()
    for card in (training.sources_card(run), training.positions_card(run), evaluations.bits_card(run)):
        for each in spec_of(card)["curves"]:
            if each["group"] in names:
                seen.setdefault(each["group"], set()).add(each["colour"])
    assert seen == {name: {colour(place)} for place, name in enumerate(names)}


def test_validation_stands_by_source_and_by_position(folder: Path, tmp_path: Path) -> None:
    run = read_run(folder)
    chart = spec_of(training.sources_card(run))
    assert [panel["title"] for panel in chart["panels"]] == [
        "Training loss by source",
        "Validation loss by source",
    ]
    (math_loss,) = [each for each in chart["curves"] if (each["name"], each["panel"]) == ("math", 1)]
    rows = [row for row in run.kept_rows if row["valid_loss"] is not None]
    assert math_loss["y"] == [float(f"{row['valid_loss_by_source']['math']:.6g}") for row in rows]
    lines = [{"step": step, "phase": "phase3", "loss": 2.0} for step in (1, 2, 3)]
    lines[0] |= {"valid_loss_by_position": {"web": {"0": 5.0, "16": 4.0}, "books": {"0": 5.5, "128": 4.25}}}
    lines[2] |= {"valid_loss_by_position": {"web": {"0": 3.0, "16": None}, "books": {"0": 3.5, "128": 2.0}}}
    card = training.positions_card(read_run(made_up_run.write_lines(tmp_path / "metrics.jsonl", lines)))
    assert "Bold: step 3; dotted: step 1" in card
    chart = spec_of(card)
    assert [(each["name"], each.get("dash"), each["y"]) for each in chart["curves"]] == [
        ("web", None, [3.0, None]), ("books", None, [3.5, 2.0]), ("web", "dot", [5.0, 4.0]),
        ("books", "dot", [5.5, 4.25]),
    ]  # fmt: skip
    assert chart["categories"] == ["0", "16", "128"]
