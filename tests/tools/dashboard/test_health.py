"""Time and cost, incidents, layers and samples on the page: every figure of the files, escaped,
and gaps as gaps.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from records.attempts import Segment
from records.page import short
from records.run import Record, read_run
from records.usage import RECENT, money, usage_of, whole
from tests.tools.dashboard import made_up_run
from tools.dashboard.cards import positions_card, tiles_of
from tools.dashboard.figures import positions_figure
from tools.dashboard.health import drafts_card, incidents_card, layers_card, layers_figure, usage_card
from tools.dashboard.listings import samples_card
from tools.dashboard.rows import prepare

PRICE = {"gpu_hour_price": 2.5, "currency": "EUR"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_up_run.write_run(tmp_path_factory.mktemp("runs") / "run", steps=60, every=1)


def append(path: Path, *lines: dict[str, Any]) -> None:
    with open(path, "a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))


def test_gpu_hours_and_cost_by_phase_and_in_all(folder: Path) -> None:
    run = read_run(folder)
    usage, text = usage_of(run), usage_card(run)
    # five attempts: the minute from the line in attempts.jsonl to the first row, then four seconds a row
    seconds = {p: sum(60 + 4 * (sum(len(s.rows) for s in run.segments if (s.phase, s.attempt) == (p, a)) - 1)
                      for q, a, _, _ in made_up_run.PLAN if q == p) for p in run.phases}  # fmt: skip
    for phase in run.phases:
        assert usage[phase].gpu_hours == pytest.approx(192 * seconds[phase] / 3600, rel=0.01)
        assert (
            f"<td>{phase}</td><td>{usage[phase].gpu_hours:,.1f}</td><td>{usage[phase].repeated:,.1f}</td>"
            in text
        )
        assert money(usage[phase].gpu_hours, PRICE) in text
    assert money(whole(usage).gpu_hours, PRICE) in text
    assert "training.steps reached" in tiles_of(run)


def test_a_run_under_way_says_when_it_ends_and_what_it_will_cost(folder: Path, tmp_path: Path) -> None:
    run = read_run(folder)
    run.configs["phase2"]["training"]["steps"] = 3030  # of which 30 are done
    of, rate = (
        whole(usage_of(run)),
        [r["tokens_per_s_per_device"] for r in run.kept_rows if r["phase"] == "phase2"],
    )
    hours = 3000 * made_up_run.TOKENS_A_STEP / sorted(rate)[len(rate) // 2] / 3600
    assert of.gpu_hours_left == pytest.approx(hours, rel=0.01)
    tiles = tiles_of(run)
    assert re.search(
        r"time left</h3><strong>1 h \d+ min</strong><small>until 20\d\d-\d\d-\d\d \d\d:\d\d UTC", tiles
    )
    run.kept_rows[-1]["tokens_per_s"] = 1.0
    speed = sorted(row["tokens_per_s"] for row in run.kept_rows[-RECENT:])
    assert f"{short(median(speed))}</strong><small>tokens per second, median" in tiles_of(run), (
        "not the last row's"
    )
    assert f"{2.5 * (of.gpu_hours + of.gpu_hours_left):,.0f} EUR" in tiles


def test_incidents_are_listed_once_and_escaped(folder: Path, tmp_path: Path) -> None:
    run = read_run(folder)
    for event in run.events:
        event["text"] = "<b>no</b>"
    text = incidents_card(run)
    assert text.count("2 times") == 3, "both ranks said it"
    assert '<span class="missing">roll back</span>' in text
    assert "<b>no" not in text
    run.events = [
        Record(run.events[0], x_step=i, kind="supervisor_alert", text=f"call {i}") for i in range(40)
    ]
    text = incidents_card(run)
    assert "28 earlier ones</summary>" in text
    assert text.index("call 39") < text.index("call 38") < text.index("<details>") < text.index("call 0")
    ends = [
        Record(run.events[0], kind="supervisor_end", x_step=None, step=None, code=code, text=f"{code}")
        for code in (1, 0)
    ]
    run.events = ends
    text = incidents_card(run)
    assert text.count("<tr>") == 3, "the same place, other texts"
    assert text.count('class="missing"') == 1, "the one that crashed"
    without = Record(
        kind="supervisor_bad_node", phase="phase1", text="gpu-7", time=1.0
    )  # nor do skips name one
    run.events = [without]
    assert "<td>phase1</td><td></td><td>gpu-7</td>" in incidents_card(run)
    run.events = []
    assert "no event on record" in incidents_card(run)


def test_layers_are_heat_maps_that_keep_a_spike(folder: Path) -> None:
    run = read_run(folder)
    assert 'id="layers-run"' in layers_card(run)
    rows = run.kept_rows
    norms, streams = layers_figure(rows).data
    for trace, key in ((norms, "layer_grad_norm"), (streams, "layer_stream_rms")):
        assert list(trace.x) == [row["x_step"] for row in rows]
        for layer in range(6):
            assert list(trace.z[layer]) == pytest.approx(
                [math.log10(row[key][layer]) for row in rows], abs=1e-3
            )
    many = [
        {**rows[0], "n": i, "x_step": i, "layer_grad_norm": [0.1] * 5 + [7.0 * (i == 777)]}
        for i in range(5000)
    ]
    run.segments, run.half_life = [Segment("phase1", 1, True, list(many), len(many))], 0
    assert prepare(run)
    assert len(run.kept_rows) < 0.25 * len(many), "groups' extremes, and the row before and behind a spike"
    text = layers_card(run)
    assert len(text) < 400_000
    assert "7.0" in text, "the spike is in none of the first rows"
    assert max(v for v in layers_figure(many[700:800]).data[0].z[5] if v is not None) == pytest.approx(
        math.log10(7), abs=1e-3
    )
    many[3]["layer_grad_norm"] = [None, math.nan]
    many[4]["layer_grad_norm"] = None
    assert layers_figure(many[:9]).data[0].z[0][3] is layers_figure(many[:9]).data[0].z[0][4] is None
    for row in many:
        del row["layer_grad_norm"], row["layer_stream_rms"]
    assert layers_card(run) == ""


def test_samples_by_prompt_newest_first_escaped(folder: Path, tmp_path: Path) -> None:
    text = samples_card(read_run(folder))
    assert re.findall(r"<summary><b>(\w+)</b>", text) == ["prose", "code"]
    assert text.count("<details open>") == 1
    code = text[text.index("<b>code</b>") :]
    steps = [int(step) for step in re.findall(r"    # step (\d+)\n", code)]
    assert steps == [90, 75, 60, 45, 30, 15]
    assert "<b>not" not in text
    assert "&lt;b&gt;not" in text
    other = made_up_run.write_run(tmp_path / "long", steps=60, every=1)
    (other / "evals.jsonl").write_text("")
    for step in range(1, 101):
        append(other / "evals.jsonl", {"kind": "samples", "phase": "phase1", "step": step,
               "samples": [{"name": "a", "prompt": "p", "greedy": f"text of {step}", "sampled": "s"}]})  # fmt: skip
    shown = [int(step) for step in re.findall(r"text of (\d+)<", samples_card(read_run(other)))]
    assert (len(shown), shown[0], shown[-1]) == (8, 100, 1)
    blank = {"name": "b", "prompt": "p", "greedy": "x" + "\n" * 40 + "y\nz", "sampled": ""}
    append(other / "evals.jsonl", {"kind": "samples", "step": 101, "samples": [blank]})
    assert "<td>x ↵×40 y\nz</td>" in samples_card(read_run(other))
    append(other / "evals.jsonl", {"kind": "samples"}, {"kind": "samples", "step": 3, "samples": [{}]})
    assert "text of 100" in samples_card(read_run(other))


def test_drafts_of_the_newest_validation(folder: Path, tmp_path: Path) -> None:
    """Losses and odds by place, and what a pass gives: 1 + 0.5 + 0.5 * 0.4 tokens; no card without a head."""
    assert drafts_card(read_run(folder)) == ""
    rows = [{"step": step, "phase": "mtp", "attempt": 1, "loss": 2.0} for step in (1, 2, 3)]
    rows[0] |= {"valid_acceptance": [0.1, 0.1], "valid_draft_loss": [4.0, 5.0]}
    rows[1] |= {"valid_acceptance": [0.5, 0.4], "valid_draft_loss": [2.5, 3.25]}
    append(tmp_path / "metrics.jsonl", *rows)
    text = drafts_card(read_run(tmp_path))
    assert all(each in text for each in ("<td>2</td>", "2.500, 3.250", "0.500, 0.400", "<td>1.70</td>"))


def test_loss_by_position_of_the_newest_phase(folder: Path, tmp_path: Path) -> None:
    """Bold the newest validation, dotted the first one of its phase; octaves in order."""
    assert "Loss by position" in positions_card(read_run(folder))
    rows = [{"step": step, "phase": "phase3", "attempt": 1, "loss": 2.0} for step in (1, 2, 3)]
    rows[0] |= {
        "valid_loss_by_position": {"web": {"0": 5.0, "16": 4.0}, "books": {"0": 5.5, "16": 4.5, "128": 4.25}}
    }
    rows[2] |= {
        "valid_loss_by_position": {"web": {"0": 3.0, "16": None}, "books": {"0": 3.5, "16": 2.5, "128": 2.0}}
    }
    append(tmp_path / "metrics.jsonl", {**rows[0], "phase": "phase2", "valid_loss_by_position": None})
    assert positions_card(read_run(tmp_path)) == ""
    append(tmp_path / "metrics.jsonl", *rows)
    run = read_run(tmp_path)
    assert "Bold: step 3; dotted: step 1" in positions_card(run)
    figure = positions_figure(run, run.kept_rows[1], run.kept_rows[3])
    drawn = [(trace.name, trace.line.dash, list(trace.x), list(trace.y)) for trace in figure.data]
    assert drawn == [
        ("web", None, ["0", "16"], [3.0, None]),
        ("books", None, ["0", "16", "128"], [3.5, 2.5, 2.0]),
        ("web", "dot", ["0", "16"], [5.0, 4.0]),
        ("books", "dot", ["0", "16", "128"], [5.5, 4.5, 4.25]),
    ]
    assert list(figure.layout.xaxis.categoryarray) == ["0", "16", "128"]
