"""Tests of the GPU benchmark without a GPU: cut-off parts, the verdict, servers, the page."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tools.bench import cuda
from tools.bench.cuda import Part, markdown, run_part

FIGURE = 'print(\'figure ["depth 0", {"tokens_per_s": 900.0}]\', flush=True)'


def run_program(
    monkeypatch: pytest.MonkeyPatch, program: str, limit_s: float = 60
) -> tuple[dict, int]:
    """Return the figures of a part that runs this program, and how often they were saved."""
    start, figures, saved = subprocess.Popen, dict[str, Any](), list[int]()
    command = [sys.executable, "-c", program]
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", lambda _, **how: start(command, **how))
        run_part(
            Part("Decode", "decode", "tiny", limit_s), figures, lambda: saved.append(len(figures))
        )
    return figures, len(saved)


def test_figures_are_saved_as_they_come_and_outlive_a_crash(monkeypatch):
    figures, saved = run_program(monkeypatch, f"{FIGURE}; print('noise'); raise SystemExit(9)")
    assert figures == {"depth 0": {"tokens_per_s": 900.0}, "ended": "with status 9"}
    assert saved == 2
    assert run_program(monkeypatch, FIGURE)[0] == {"depth 0": {"tokens_per_s": 900.0}}


def test_a_part_that_hangs_costs_its_limit(monkeypatch):
    figures, _ = run_program(monkeypatch, "import time; time.sleep(600)", limit_s=0.01)
    assert figures == {"ended": "after 0.01 s, its limit"}


def test_all_parts_fit_into_eight_minutes_and_have_a_function():
    parts = cuda.parts_of("2b")
    assert sum(part.limit_s for part in parts) <= 8 * 60
    assert all(callable(getattr(cuda, part.function)) for part in parts)


HEAD = {"date": "2026-01-01 00:00 UTC", "command": "x", "commit": "abc", "gpu": "NVIDIA H200"}


def test_the_page_shows_every_figure_under_the_verdict():
    title = "Correctness of `tiny`"
    row = {"depth": 0, "tokens_per_s": 900.0, "percent_of_probe": 91.0}
    checks = {"passes: greedy tokens": True, "planted faults are refused": True}
    page = markdown(
        {**HEAD, "parts": {title: checks, "Decode": {"depth 0": row, "ended": "with status 9"}}}
    )
    assert f"### {title}: all checks hold" in page
    assert "|  | depth | tokens per s | percent of probe |" in page
    assert "| depth 0 | 0 | 900 | 91 |" in page
    assert "| ended | with status 9 |" in page
    for figures, verdict in (
        ({**checks, "passes: greedy tokens": False}, "FAILED (passes: greedy tokens)"),
        ({"passes: greedy tokens": True}, "not proven"),
        ({"ended": "after 60 s, its limit"}, "FAILED (after 60 s, its limit)"),
    ):
        assert f"### {title}: {verdict}" in markdown({**HEAD, "parts": {title: figures}})


@pytest.mark.rotate
def test_our_server_streams_random_weights(monkeypatch):
    monkeypatch.setattr(cuda, "speed", lambda flavor, tokens_per_s: {"tokens_per_s": tokens_per_s})
    monkeypatch.setattr(cuda, "TRIALS", 1)
    ((name, figures),) = cuda.server("tiny", "cpu")
    assert name == "at the client"
    assert figures["tokens_per_s"] > 1


def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cuda, "why_no_cuda", lambda: "there is no NVIDIA driver")
    with pytest.raises(SystemExit) as stopped:
        cuda.main(["--out", str(tmp_path / "report.md")])
    assert stopped.value.code == 2
    assert (
        "there is no NVIDIA driver. On a CPU, python -m tools.bench decode"
        in capsys.readouterr().err
    )
    assert not list(tmp_path.iterdir())
