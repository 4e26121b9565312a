"""The page: every figure of the run's files stands on it, what is missing takes no room, and nothing breaks it."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from records.run import Record, read_run
from tests.tools.dashboard import made_up_run
from tools.dashboard import __main__ as dashboard
from tools.dashboard import training
from tools.dashboard.__main__ import page, write_page

NOW = 1.79e9 + 3600


def row(step: int, attempt: int = 1, phase: str = "phase1", **more: Any) -> dict[str, Any]:
    return {"step": step, "attempt": attempt, "phase": phase, "loss": 1.0, "tokens": 10 * step} | more


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> Path:
    return made_up_run.write_lines(folder / "metrics.jsonl", rows)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_up_run.write_run(tmp_path_factory.mktemp("runs") / "made-up", steps=60, every=1)


@pytest.fixture(scope="module")
def text(run_folder: Path) -> str:
    write_page([run_folder], run_folder / "dashboard.html", now=NOW)
    return (run_folder / "dashboard.html").read_text()


def body_of(folder: Path) -> str:
    """The page without its script and style."""
    whole = page([read_run(folder)], NOW)
    return whole[whole.index("<main>") : whole.index("</main>")]


def charts_of(text: str) -> dict[str, dict[str, Any]]:
    pairs = re.findall(
        r'<div id="([^"]+)"></div><script type="application/json">(.*?)</script>', text, flags=re.S
    )
    return {name: json.loads(content) for name, content in pairs}


# the state of a run


def test_state_tells_finished_running_and_quiet(tmp_path: Path) -> None:
    folder = write_rows(tmp_path, [row(5, time=NOW - 60)])
    (folder / "config.toml").write_text('[phase]\nname = "phase1"\n[training]\nsteps = 9\n')
    assert training.state(read_run(folder), NOW) == ("live", "training: phase1, step 5 of 9")
    assert training.state(read_run(folder), NOW + 3600)[0] == "idle"
    write_rows(tmp_path, [row(9, time=NOW)])
    assert training.state(read_run(folder), NOW) == ("done", "finished: phase1, step 9 of 9")
    write_rows(tmp_path, [])
    assert training.state(read_run(folder), NOW) == ("idle", "no step logged yet")


def test_a_diverged_run_is_not_green(tmp_path: Path) -> None:
    falling = [row(step, loss=8.0 - 5 * step / 100, time=NOW) for step in range(1, 101)]
    assert training.state(read_run(write_rows(tmp_path, falling)), NOW)[0] == "live"
    risen = [row(step, loss=7.5, time=NOW) for step in range(101, 131)]
    kind, words = training.state(read_run(write_rows(tmp_path, falling + risen)), NOW)
    assert kind == "bad"
    assert "phase1, step 130" in words
    assert "to 7.50" in words
    spike = [row(101, loss=40.0, time=NOW), row(102, loss=3.0, time=NOW)]
    assert training.state(read_run(write_rows(tmp_path, falling + spike)), NOW)[0] == "live"
    flat = [row(step, loss=1.1 + 0.2 * (step < 5) + 0.15 * (step > 90), time=NOW) for step in range(1, 131)]
    assert training.state(read_run(write_rows(tmp_path, flat)), NOW)[0] == "live", "noise of a fine-tuning"
    ended = [row(101, loss=None, time=NOW)]
    assert "not a finite number" in training.state(read_run(write_rows(tmp_path, falling + ended)), NOW)[1]


def test_the_loss_of_the_tile_is_smoothed_and_compared_within_its_phase(tmp_path: Path) -> None:
    rows = [row(step, loss=8.0) for step in range(1, 50)]
    rows += [row(step, phase="sft", loss=2.0 + (step == 60)) for step in range(1, 61)]
    name, value, note = training.loss_tile(read_run(write_rows(tmp_path, rows)))
    assert name == "loss"
    assert 2.0 < float(value) < 2.7, "not the last single batch"
    assert note == "smoothed; sft began with 2.000 at step 1"


def test_time_left_cost_and_device_hours(run_folder: Path) -> None:
    run = read_run(run_folder)
    assert "training.steps reached" in training.tiles_of(run)
    run.configs["phase2"]["training"]["steps"] = 3030  # of which 30 are done
    tiles = training.tiles_of(run)
    assert re.search(r"time left</h3><strong>1 h \d+ min</strong><small>until 20\d\d-\d\d-\d\d", tiles)
    assert re.search(r"device-hours</h3><strong>[\d.]+</strong><small>of [\d.]+( k)?, [\d,.]+ EUR", tiles)
    assert "GPU" not in tiles


# what stands on it


def test_every_figure_of_the_input_is_on_the_page(run_folder: Path, text: str) -> None:
    drawn = {value for chart in charts_of(text).values() for curve in chart["curves"] for value in curve["y"]}
    counted = {(each["phase"], each["attempt"], each["step"]) for each in read_run(run_folder).kept_rows}
    keys = [panel.key for panel in (*training.TRAINING, *training.MACHINE, training.LOSS)]
    for each in map(json.loads, (run_folder / "metrics.jsonl").read_text().splitlines()):
        is_kept = (each["phase"], each["attempt"], each["step"]) in counted
        for key in [*keys, "valid_loss"] if is_kept else ["loss"]:
            assert key not in each or float(f"{each[key]:.6g}") in drawn, (key, each)
    for each in map(json.loads, (run_folder / "evals.jsonl").read_text().splitlines()):
        for figures in each.get("sources", {}).values():
            assert float(f"{figures['bits_per_byte']:.6g}") in drawn
    for words in (
        "roll_back", "loss z 11.2", "SIGUSR1 ten minutes", "Synthetic figures: no such run took place.",
        "132", "74.4 %", "17.4 GB/s", "2.15 k tok/s", "0123456789ab", "optimizer.lr", "0.0002",
        "74 % of the memory", "held-out text, phase2 step 30",
    ):  # fmt: skip
        assert words in text, words


def test_steps_tokens_and_time_are_axes_and_a_run_without_them_has_what_is_left(
    text: str, tmp_path: Path
) -> None:
    charts = charts_of(text)
    for name in ("training-made-up", "core-made-up", "machine-made-up", "tasks-made-up", "bits-made-up"):
        assert charts[name]["axes"] == ["tokens", "steps", "time"], name
    first = charts["training-made-up"]["curves"][0]["x"]
    assert (first["tokens"][0], first["steps"][0]) == (made_up_run.TOKENS_A_STEP, 1)
    assert first["time"][0] == 1000 * made_up_run.START
    assert all(panel["unit"] or panel["title"] for chart in charts.values() for panel in chart["panels"])
    plain = body_of(write_rows(tmp_path, [{"step": 1, "loss": 2.0}]))
    assert charts_of(plain)[f"training-{tmp_path.name}"]["axes"] == ["steps"]


def test_incidents_are_listed_once_and_escaped(run_folder: Path) -> None:
    run = read_run(run_folder)
    for event in run.events:
        event["text"] = "<b>no</b>"
    incidents = training.incidents_card(run)
    assert incidents.count("2 times") == 3, "both ranks said it"
    assert '<span class="missing">roll back</span>' in incidents
    assert "<b>no" not in incidents
    assert [mark["trouble"] for mark in training.events_of(run)] == [False, True, False]
    run.events = [
        Record(run.events[0], kind="supervisor_end", x_step=None, code=code, text=str(code))
        for code in (1, 0)
    ]
    assert training.incidents_card(run).count('class="missing"') == 1, "the one that crashed"
    run.events = [Record(kind="supervisor_alert", text=f"call {i}") for i in range(50)]
    incidents = training.incidents_card(run)
    assert "The newest 40 of 50." in incidents
    assert incidents.index("call 49") < incidents.index("call 48")
    run.events = []
    assert training.incidents_card(run) == "", "no empty card"


def test_an_averaged_run_says_what_it_was_averaged_from(tmp_path: Path) -> None:
    folder = write_rows(tmp_path, [row(1)])
    (folder / "lineage.json").write_text(json.dumps({"averaged": {"step-5": 0.25, "step-9": 0.75}}))
    assert "step-5&#x27;: 0.25" in body_of(folder)


def test_several_runs_share_a_page_and_a_chart_of_their_losses(run_folder: Path, tmp_path: Path) -> None:
    others = [write_rows(tmp_path / place / "other", [row(step) for step in range(1, 9)]) for place in "ab"]
    write_page([run_folder, *others], tmp_path / "x.html", now=NOW)
    text = (tmp_path / "x.html").read_text()
    assert text.count("<article>") == 3
    curves = charts_of(text)["comparison"]["curves"]
    assert [curve["group"] for curve in curves if "validation" not in curve["name"]] == [
        "made-up", "other", "other (3)"
    ]  # fmt: skip
    validated = next(curve for curve in curves if curve["name"] == "made-up, validation")
    assert len(validated["y"]) == sum(bool(r["valid_loss"]) for r in read_run(run_folder).kept_rows)


# what is not there, and what should not be there


def outside(text: str) -> list[str]:
    """All that a browser would load beside the page, outside of its scripts."""
    text = re.sub(r"<script.*?</script>", "", text, flags=re.S)
    loading = r'(?:src|href|srcset|action|data|poster)="(?!#|data:)[^"]*"'
    return re.findall(rf"@import[^;]*|url\([^)]*\)|{loading}", text)


def test_the_page_loads_nothing_from_outside(text: str) -> None:
    assert outside(text) == []
    assert "default-src 'none'" in text
    planted = text.replace("<main>", '<main><img src="https://example.org/x.png">', 1)
    planted = planted.replace("<style>", "<style>@import 'x.css';", 1)
    assert len(outside(planted)) == 2


def test_a_run_of_one_row_has_no_empty_card_and_speaks_of_one_step(tmp_path: Path) -> None:
    body = body_of(write_rows(tmp_path / "a <i>run", [row(1, mfu=None)]))
    assert "not measured" not in body
    assert "MFU" not in body.partition("</nav>")[0]
    assert "1 logged step." in body
    assert "0 step" not in body
    assert "<i>run" not in body
    assert "&lt;i&gt;run" in body
    assert re.findall(r"<h2>(.*?)</h2>", body) == ["Training"]
    assert "Not measured: CORE, Sources" in body


ODD = """{}
{"tasks": null, "sources": null, "benchmarks": null, "missing": null, "step": null, "phase": null, "change": null}
{"tasks": {"x": null}, "sources": {"y": null}, "benchmarks": {"z": null}, "pass@1_plus": 0.5, "change": 7}
{"tasks": {"x": {"accuracy": null}}, "pass@1_plus": 0.5, "pass@1_plus_interval": [null, 1], "time": "noon"}
{"tasks": {}, "missing": {"<i>squad": "<b>why"}, "step": 3, "protocol": 7, "phase": ["a"]}"""
KINDS = ("core", "code", "lm_eval", "bits_per_byte", "gold", "decode_speed", "contamination")


def test_records_of_nobody_knows_what_cost_no_page_and_no_card(tmp_path: Path) -> None:
    records = [{"kind": kind, **json.loads(line)} for kind in KINDS for line in ODD.splitlines()]
    folder = write_rows(tmp_path, [row(1), row(2)])
    body = body_of(made_up_run.write_lines(folder / "evals.jsonl", records))
    assert "<h2>Training</h2>" in body
    assert "cannot be drawn" not in body
    assert "<i>squad" not in body


def test_a_card_that_fails_is_named_and_the_others_are_drawn(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(run: Any) -> str:
        return run.evals[0]["<i>"]["x"]

    monkeypatch.setitem(dashboard.CARDS, "CORE", broken)
    body = body_of(run_folder)
    assert "the card CORE cannot be drawn: TypeError" in body
    assert "<h2>Training</h2>" in body


# the command


def test_serve_writes_the_page_again_and_whole(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, pauses, sizes = tmp_path / "x.html", [], []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        sizes.append(out.stat().st_size)
        out.write_text("")
        if len(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        dashboard.main((run_folder,), out, serve=True, every_s=50)
    assert min(pauses) >= 50
    assert min(sizes) > 4e6
    assert list(tmp_path.glob(".x.html*")) == [], "a temporary file stayed behind"


def test_arguments_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no run folder given"):
        dashboard.main(())
    with pytest.raises(ValueError, match="--every-s 0 is not above 0"):
        dashboard.main((tmp_path,), serve=True, every_s=0)
    with pytest.raises(ValueError, match="is not a run folder"):
        dashboard.main((tmp_path,))
