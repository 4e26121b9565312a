"""Tests that the page has every figure of a run, no room for missing ones, and never breaks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from records.files import read_lines
from records.run import Record, read_run
from tests.records.lines import write_lines
from tests.tools.dashboard.made_up_run import charts_of
from tools.dashboard import __main__ as dashboard
from tools.dashboard import header, training
from tools.dashboard.__main__ import page, write_page
from tools.dashboard.charts import LOSS, MACHINE, TRAINING
from tools.dashboard.page import percent, short, table

NOW = 1.79e9 + 3600


def row(step: int, phase: str = "phase1", **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "attempt": 1,
        "phase": phase,
        "loss": 1.0,
        "tokens": 10 * step,
        "time": NOW,
    } | more


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> Path:
    return write_lines(folder / "metrics.jsonl", rows).parent


@pytest.fixture(scope="module")
def text(folder):
    write_page([folder], folder / "dashboard.html", now=NOW)
    return (folder / "dashboard.html").read_text()


def body_of(folder: Path) -> str:
    # without script and style, which hold any word
    whole = page([read_run(folder)], NOW)
    return whole[whole.index("<main>") : whole.index("</main>")]


# the header of a run


FALLING = [row(step, loss=8.0 - 5 * step / 100) for step in range(1, 101)]
RISEN = FALLING + [row(step, loss=7.5) for step in range(101, 131)]
NOISE = [row(step, loss=1.1 + 0.2 * (step < 5) + 0.15 * (step > 90)) for step in range(1, 131)]


@pytest.mark.parametrize(
    ("rows", "age_s", "kind", "words"),
    [
        ([row(5)], 60, "live", "^training: phase1, step 5 of 200$"),
        ([row(5)], 3600, "idle", "^quiet since 2026-09-21 15:13 UTC: phase1, step 5 of 200$"),
        ([row(200)], 60, "done", "^finished: phase1, step 200 of 200$"),
        ([], 0, "idle", "^no step logged yet$"),
        (RISEN, 0, "bad", "step 130 of 200: the loss rose .* to 7.50"),
        ([*FALLING, row(101, loss=40.0), row(102, loss=3.0)], 0, "live", ""),
        (NOISE, 0, "live", ""),
        ([*FALLING, row(101, loss=None)], 0, "bad", "the loss is not a finite number"),
    ],
    ids=[
        "trains",
        "is quiet",
        "finished",
        "empty",
        "risen",
        "a spike",
        "noise of a fine-tuning",
        "not a number",
    ],
)
def test_the_state_of_a_run_is_named_and_a_diverged_one_is_not_green(
    tmp_path, rows, age_s, kind, words
):
    (tmp_path / "config.toml").write_text('[phase]\nname = "phase1"\n[training]\nsteps = 200\n')
    state, sentence = header.state(read_run(write_rows(tmp_path, rows)), NOW + age_s)
    assert state == kind
    assert re.search(words, sentence)


def test_the_loss_of_the_tile_is_smoothed_and_compared_within_its_phase(tmp_path):
    rows = [row(step, loss=8.0) for step in range(1, 50)]
    rows += [row(step, phase="sft", loss=2.0 + (step == 60)) for step in range(1, 61)]
    name, value, note = header.make_loss_tile(read_run(write_rows(tmp_path, rows)))
    assert name == "loss"
    # not the last single batch
    assert 2.0 < float(value) < 2.7
    assert note == "smoothed; sft began with 2.000 at step 1"


def test_time_left_cost_and_device_hours(folder):
    run = read_run(folder)
    assert "training.steps reached" in header.write_tiles(run)
    # of which 30 are done
    run.configs["phase2"]["training"]["steps"] = 3030
    tiles = header.write_tiles(run)
    assert re.search(
        r"time left</h3><strong>1 h \d+ min</strong><small>until 20\d\d-\d\d-\d\d", tiles
    )
    assert re.search(
        r"device-hours</h3><strong>[\d.]+</strong><small>of [\d.]+( k)?, [\d,.]+ EUR", tiles
    )


# what stands on it


def test_every_figure_of_the_input_is_on_the_page(folder, text):
    # and in the browser's test the console names nothing that it has refused
    assert "default-src 'none'" in text
    charts = charts_of(text)
    curves = [curve for chart in charts.values() for curve in chart["curves"]]
    values = {value for curve in curves for value in curve["y"]}
    # of steps that were repeated later only the loss is drawn
    counting = {
        (record["phase"], record["attempt"], record["step"]) for record in read_run(folder).rows
    }
    keys = [panel.key for panel in (*TRAINING, *MACHINE, LOSS)]
    for record in read_lines(folder / "metrics.jsonl"):
        is_kept = (record["phase"], record["attempt"], record["step"]) in counting
        figures = [
            record[key] for key in ([*keys, "valid_loss"] if is_kept else ["loss"]) if key in record
        ]
        figures += record.get("valid_loss_by_source", {}).values() if is_kept else []
        assert {float(f"{figure:.6g}") for figure in figures} <= values, record
    for record in read_lines(folder / "evals.jsonl"):
        for figures in record.get("sources", {}).values():
            assert float(f"{figures['bits_per_byte']:.6g}") in values
    for words in (
        "roll_back",
        "loss z 11.2",
        "SIGUSR1 ten minutes",
        "Synthetic figures: no such run took place.",
        "131.7",
        "0123456789ab",
        "74 % of the memory",
        "held-out text, phase2 step 30",
    ):
        assert words in text, words


def test_steps_tokens_and_time_are_axes_and_a_run_without_them_has_what_is_left(text, tmp_path):
    charts = charts_of(text)
    for name in ("training", "core", "machine", "tasks", "bits"):
        assert charts[f"{name}-made-up"]["axes"] == ["tokens", "steps", "time"], name
    plain = body_of(write_rows(tmp_path, [{"step": 1, "loss": 2.0}]))
    assert charts_of(plain)[f"training-{tmp_path.name}"]["axes"] == ["steps"]


def test_incidents_are_listed_once_and_escaped(folder):
    run = read_run(folder)
    for event in run.events:
        event["text"] = "<b>no</b>"
    incidents = training.write_incidents_card(run)
    # both ranks said it
    assert incidents.count("2 times") == 3
    assert '<span class="missing">roll back</span>' in incidents
    assert "<b>no" not in incidents
    assert [mark["trouble"] for mark in training.make_event_marks(run)] == [False, True, False]
    run.events = [
        Record(run.events[0], kind="supervisor_end", code=code, text=str(code)) for code in (1, 0)
    ]
    # of two ends the one that crashed
    assert training.write_incidents_card(run).count('class="missing"') == 1
    run.events = [Record(kind="supervisor_alert", text=f"call {i}") for i in range(50)]
    incidents = training.write_incidents_card(run)
    assert "The newest 40 of 50." in incidents
    assert incidents.index("call 49") < incidents.index("call 48")


def test_several_runs_share_a_page_and_a_chart_of_their_losses(folder, tmp_path):
    others = [
        write_rows(tmp_path / place / "other", [row(step) for step in range(1, 9)])
        for place in "ab"
    ]
    write_page([folder, *others], tmp_path / "x.html", now=NOW)
    text = (tmp_path / "x.html").read_text()
    assert text.count("<article>") == 3
    curves = charts_of(text)["comparison"]["curves"]
    names = {curve["name"] for curve in curves}
    assert names == {"made-up", "made-up, validation", "other", "other (3)"}


# what is not there, and what should not be there


def test_a_run_of_one_row_has_no_empty_card_and_speaks_of_one_step(tmp_path):
    body = body_of(write_rows(tmp_path / "a <i>run", [row(1, mfu=None)]))
    assert not [words for words in ("not measured", "0 step", "<i>run") if words in body]
    assert "MFU" not in body.partition("</nav>")[0]
    assert "1 logged step." in body
    assert "&lt;i&gt;run" in body
    assert re.findall(r"<h2>(.*?)</h2>", body) == ["Training"]
    assert "Not measured: CORE, Sources" in body


# valid JSON of shapes that no version has written
ODD = """{}
{"tasks": null, "sources": null, "benchmarks": null, "missing": null, "step": null, "phase": null, "change": null}
{"tasks": {"x": null}, "sources": {"y": null}, "benchmarks": {"z": null}, "pass@1_plus": 0.5, "change": 7}
{"tasks": {"x": {"accuracy": null}}, "pass@1_plus": 0.5, "pass@1_plus_interval": [null, 1], "time": "noon"}
{"tasks": {}, "missing": {"<i>squad": "<b>why"}, "step": 3, "protocol": 7, "phase": ["a"]}
{"tasks": 7, "sources": true, "benchmarks": ["a"], "missing": "b", "pass@1_plus": []}
{"tasks": {"x": "y"}, "sources": {"y": 1}, "benchmarks": {"z": 0}, "missing": [7]}"""
KINDS = ("core", "code", "lm_eval", "bits_per_byte", "decode_speed", "contamination")


def test_odd_records_cost_no_page_and_a_card_that_fails_is_named(tmp_path, monkeypatch):
    records = [{"kind": kind, **json.loads(line)} for kind in KINDS for line in ODD.splitlines()]
    folder = write_rows(tmp_path, [row(1), row(2, lr=10**400)])
    write_lines(folder / "evals.jsonl", records)
    body = body_of(folder)
    assert "cannot be drawn" not in body
    assert "<i>squad" not in body
    # there are none without a number of devices
    assert "device-hours" not in body
    write_lines(folder / "attempts.jsonl", [{"attempt": 1, "time": NOW, "world_size": None}])
    monkeypatch.setitem(dashboard.CARDS, "CORE", lambda run: run.evals[0]["<i>"]["x"])
    body = body_of(folder)
    assert "the card CORE cannot be drawn: TypeError" in body
    assert "<h2>Training</h2>" in body


def test_figures_are_short_and_text_is_never_markup():
    numbers = [0, 12, 999, 1000, 1_234_567, 2_320_069_632, 6e12, 999_900]
    assert [*map(short, numbers)] == ["0", "12", "999", "1 k", "1.23 M", "2.32 G", "6 T", "1 M"]
    assert percent(0.4391) == "43.9 %"
    assert all(
        "not measured" in text for text in (percent(None), *map(short, (None, float("nan"), "x")))
    )
    assert "<i>" not in table(["<i>"], [])


# the command


def test_a_call_without_a_run_is_refused():
    with pytest.raises(ValueError, match="no run folder given"):
        dashboard.main(())
