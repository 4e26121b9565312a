"""The dashboard: every figure of the input on the page, and the page in a real browser."""

from __future__ import annotations

import html.parser
import json
import re
from pathlib import Path
from typing import Any

import pytest

from records.run import read_run
from tests.tools.dashboard import made_up_run
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
        self.loads += [
            v or "" for k, v in attrs if k in ("src", "href", "srcset", "action", "data", "poster")
        ]


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
        "checkpoint_s", "memory_gib", "valid_loss", "z_loss", "max_logit")  # fmt: skip


def test_every_figure_of_the_input_is_on_the_page(tmp_path: Path) -> None:
    folder = made_up_run.write_run(tmp_path / "small", steps=60, every=1)
    write_page([folder], folder / "dashboard.html", now=NOW)
    text = (folder / "dashboard.html").read_text()
    drawn_values = {v for trace in figures_of(text) for v in trace.get("y", ()) if v is not None}
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


def test_a_loss_that_is_nan_or_null_is_a_gap(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "loss": NaN}\n{"step": 2, "loss": null}\n{"step": 3, "loss": 2.5}\n'
    )
    assert "2.5000" in page([read_run(tmp_path)], NOW)


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


def test_an_averaged_run_says_what_it_was_averaged_from(tmp_path: Path) -> None:
    folder = write_rows(tmp_path / "average", [row(1)])
    (folder / "lineage.json").write_text(json.dumps({"averaged": {"step-5": 0.25, "step-9": 0.75}}))
    assert "step-5&#x27;: 0.25" in page([read_run(folder)], NOW)


@pytest.mark.job
def test_several_runs_share_a_page(run_folder: Path, tmp_path: Path) -> None:
    other = write_rows(tmp_path / "other", [row(s) for s in range(1, 9)])
    write_page([run_folder, other], tmp_path / "x.html", now=NOW)
    text = (tmp_path / "x.html").read_text()
    assert "Loss of all runs" in text
    assert text.count("<article>") == 2


@pytest.mark.job
def test_the_page_of_ten_thousand_rows_stays_small(tmp_path: Path) -> None:
    run = read_run(made_up_run.write_run(tmp_path / "long", steps=20_000, every=3, checkpoints=200))
    assert len(run.kept_rows) == 10_000 - 1
    assert len(core_curves([run])[0].points) == 200
    text = page([run], NOW)
    assert len(text) < 12e6, "plotly.js is 4.8 MB of it"
    assert "groups of 32 neighbouring logged steps" in text
