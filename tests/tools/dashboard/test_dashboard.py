"""The dashboard: rows merged as the run went, every figure of the input on the page, and the page in a real browser."""

from __future__ import annotations

import html.parser
import json
import re
from pathlib import Path
from typing import Any

import pytest

from records.attempts import merge_attempts
from records.run import read_run
from tests.tools.dashboard import made_up_run
from tests.tools.dashboard.browser import browse, needs_browser
from tools.dashboard.__main__ import page, write_page
from tools.dashboard.cards import state
from tools.dashboard.core import core_curves

NOW = 1.79e9 + 3600


def row(step: int, attempt: int = 1, phase: str = "phase1", **more: Any) -> dict[str, Any]:
    return {"step": step, "attempt": attempt, "phase": phase, "loss": 1.0, "tokens": 10 * step} | more


def write_rows(folder: Path, rows: list[dict[str, Any]], name: str = "metrics.jsonl") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


def kept(folder: Path) -> list[tuple[int, int]]:
    return [(r["step"], r["attempt"]) for r in read_run(folder).kept_rows]


# rows


def test_a_resumed_attempt_replaces_the_steps_it_runs_again(tmp_path: Path) -> None:
    first, second = [row(s, 1) for s in (10, 20, 30, 40)], [row(s, 2) for s in (25, 35, 45)]
    write_rows(tmp_path, first + second)
    assert kept(tmp_path) == [(10, 1), (20, 1), (25, 2), (35, 2), (45, 2)]
    stretches = [(s.attempt, s.kept, len(s.rows)) for s in read_run(tmp_path).stretches]
    assert stretches == [(1, True, 2), (1, False, 2), (2, True, 3)]


def test_a_roll_back_within_an_attempt_counts_like_a_restart(tmp_path: Path) -> None:
    write_rows(tmp_path, [row(s, loss=float(i)) for i, s in enumerate((1, 2, 3, 2, 3, 4))])
    run = read_run(tmp_path)
    assert [(r["step"], r["loss"]) for r in run.kept_rows] == [(1, 0.0), (2, 3.0), (3, 4.0), (4, 5.0)]


def test_attempts_written_out_of_order_are_put_in_order() -> None:
    rows = [{**row(s, a)} for s, a in ((5, 2), (6, 2), (4, 1), (5, 1))]
    assert [(s.attempt, s.kept) for s in merge_attempts(rows)] == [(1, True), (1, False), (2, True)]


def test_phase_2_goes_on_where_phase_1_ended(tmp_path: Path) -> None:
    write_rows(tmp_path / "phase1", [row(s) for s in (10, 20)])
    write_rows(tmp_path / "phase2", [row(s, phase="phase2", tokens_total=200 + 10 * s) for s in (10, 20)])
    places = [(r["x_step"], r["x_tokens"]) for r in read_run(tmp_path).kept_rows]
    assert places == [(10, 100), (20, 200), (30, 300), (40, 400)]


def test_rows_kept_both_together_and_by_phase_count_once(tmp_path: Path) -> None:
    rows = [row(s, time=float(s)) for s in (1, 2, 3)]
    write_rows(tmp_path, rows)
    write_rows(tmp_path / "phase1", rows)
    assert kept(tmp_path) == [(1, 1), (2, 1), (3, 1)]


def test_half_lines_nan_and_unknown_keys(tmp_path: Path) -> None:
    lines = ['{"step": 1, "loss": NaN, "colour": "red"}', "not json", '{"step": 2, "loss": null}', "[1]"]
    lines += ['{"step": 3, "loss": 2.5, "lr": "high", "grad_norm": Infinity}', '{"loss": 1.0}', '{"step": 4, "lo']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    run = read_run(tmp_path)
    assert [(r["step"], r["loss"], r["lr"], r["grad_norm"]) for r in run.kept_rows] == [
        (1, None, None, None), (2, None, None, None), (3, 2.5, None, None)
    ]  # fmt: skip
    assert any("2 unreadable line(s)" in w and "line 2" in w for w in run.warnings)
    assert any("without a step" in w for w in run.warnings)
    assert any("training step 1, training step 2" in w for w in run.warnings)
    assert "2.5000" in page([run], NOW)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a run folder"):
        read_run(tmp_path)


# the page


def test_state_tells_finished_running_and_quiet(tmp_path: Path) -> None:
    folder = write_rows(tmp_path, [row(5, time=NOW - 60)])
    (folder / "config.toml").write_text('[phase]\nname = "phase1"\n[training]\nsteps = 9\n')
    assert state(read_run(folder), NOW) == ("live", "training: phase1, step 5 of 9")
    assert state(read_run(folder), NOW + 3600)[0] == "idle"
    write_rows(tmp_path, [row(9, time=NOW)])
    assert state(read_run(folder), NOW) == ("done", "finished: phase1, step 9 of 9")


class Links(html.parser.HTMLParser):
    """Collects every attribute that makes a browser load something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [v or "" for k, v in attrs if k in ("src", "href", "srcset", "action", "data", "poster")]


def outside(text: str) -> list[str]:
    styles = "".join(re.findall(r"<style>(.*?)</style>", text, flags=re.S))
    loads = [url for url in Links(text).loads if not url.startswith(("data:", "#"))]
    return loads + re.findall(r"@import[^;]*|url\([^)]*\)", styles)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_up_run.write_run(tmp_path_factory.mktemp("runs") / "made-up")


@pytest.fixture(scope="module")
def drawn(run_folder: Path) -> Path:
    out = run_folder / "dashboard.html"
    write_page([run_folder], out, now=NOW)
    return out


def test_the_page_loads_nothing_from_outside(drawn: Path) -> None:
    text = drawn.read_text()
    assert outside(text) == []
    assert "default-src 'none'" in text
    planted = text.replace("<main>", '<main><img src="https://example.org/x.png">', 1)
    planted = planted.replace("<style>", "<style>@import 'x.css';", 1)
    assert len(outside(planted)) == 2


def figures_of(text: str) -> list[dict[str, Any]]:
    """Traces of the plots, as they stand in the page."""
    texts = re.findall(r'<script type="application/json">(.*?)</script>', text, flags=re.S)
    return [trace for one in texts for trace in json.loads(one)["data"]]


KEYS = ("loss", "lr", "grad_norm", "tokens_per_s", "loss_z", "grad_norm_z", "tokens_per_s_per_device", "mfu",
        "checkpoint_s", "memory_gib", "valid_loss")  # fmt: skip


def test_every_figure_of_the_input_is_on_the_page(tmp_path: Path) -> None:
    folder = made_up_run.write_run(tmp_path / "small", steps=60, every=1)
    write_page([folder], folder / "dashboard.html", now=NOW)
    text = (folder / "dashboard.html").read_text()
    drawn_values = {v for trace in figures_of(text) for v in trace["y"] if v is not None}
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    run = read_run(folder)
    counted = {(r["phase"], r["attempt"], r["step"]) for r in run.kept_rows}
    for r in rows:
        is_kept = (r["phase"], r["attempt"], r["step"]) in counted
        for key in KEYS if is_kept else ("loss",):
            assert key not in r or float(f"{r[key]:.6g}") in drawn_values, (key, r)
    assert any("valid_loss" in r for r in rows)
    assert counted
    for last in rows[-1]["loss_by_source"].values():
        assert f"{last:.4f}" in text
    for told in ("roll_back", "loss z 11.2", "SIGUSR1 ten minutes"):
        assert told in text, told
    for r in (json.loads(line) for line in (folder / "evals.jsonl").read_text().splitlines()):
        for source, figures in r.get("sources", {}).items():
            assert source in text
            assert figures["bits_per_byte"] in drawn_values
    for figure in ("132", "74 %", "17.4 GB/s", "98.3 MB", "7.59 ms", "2.15 k tok/s", "0.783", "0123456789ab"):
        assert figure in text, figure
    assert "2.0 tokens" not in text


def test_missing_figures_are_not_measured(tmp_path: Path) -> None:
    folder = write_rows(tmp_path / "a <i>run", [row(1, mfu=None)])
    write_page([folder], tmp_path / "x.html", now=NOW)
    text = (tmp_path / "x.html").read_text()
    body = text[text.index("<main>") :]
    assert body.count("not measured") >= 5
    assert "<i>run" not in body
    assert "&lt;i&gt;run" in body
    write_rows(folder, [])
    write_page([folder], tmp_path / "x.html", now=NOW)
    assert "no step logged yet" in (tmp_path / "x.html").read_text()
    assert not list(tmp_path.glob(".x.html*")), "a temporary file stayed behind"


def test_several_runs_share_a_page(run_folder: Path, tmp_path: Path) -> None:
    other = write_rows(tmp_path / "other", [row(s) for s in range(1, 9)])
    write_page([run_folder, other], tmp_path / "x.html", now=NOW)
    text = (tmp_path / "x.html").read_text()
    assert "Loss of all runs" in text
    assert text.count("<article>") == 2


def test_the_page_of_ten_thousand_rows_stays_small(tmp_path: Path) -> None:
    run = read_run(made_up_run.write_run(tmp_path / "long", steps=20_000, every=3, checkpoints=200))
    assert len(run.kept_rows) == 10_000 - 1
    assert len(core_curves([run])[0].points) == 200
    text = page([run], NOW)
    assert len(text) < 12e6, "plotly.js is 4.8 MB of it"
    assert "groups of neighbouring steps" in text


# in a browser


@needs_browser
def test_a_browser_draws_the_page_without_errors(drawn: Path, tmp_path: Path) -> None:
    dom, console = browse(drawn.as_uri(), tmp_path / "profile")
    assert len(re.findall(r'<svg[^>]*class="main-svg"', dom)) >= 2 * 3, "two charts of three layers each"
    assert len(re.findall(r'class="js-line"', dom)) >= 5 * 5, "five attempts with five curves"
    assert console == []


@needs_browser
def test_the_page_fits_a_phone(drawn: Path, tmp_path: Path) -> None:
    """Beside a page that does not. A window cannot be narrower than about 500 pixels, a frame can."""
    text, frames = drawn.read_text(), ""
    planted = text.replace("<main>", '<main><div style="width:500px">wide</div>', 1)
    for name, content in (("page", text), ("planted", planted)):
        probe = f"setTimeout(() => console.log('{name} ' + document.documentElement.scrollWidth), 1500)"
        (tmp_path / f"{name}.html").write_text(content.replace("</body>", f"<script>{probe}</script></body>"))
        frames += f'<iframe src="{name}.html" width="390" height="800" style="border:0"></iframe>'
    (tmp_path / "phones.html").write_text(frames)
    _, console = browse((tmp_path / "phones.html").as_uri(), tmp_path / "profile", 1000)
    widths = {name: int(width) for name, width in (line.split() for line in console)}
    assert widths["page"] <= 390 < widths["planted"]
