"""Rows of a run folder: which of them count, where they stand, and files that are damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from records.attempts import merge_attempts
from records.run import numbers_in, read_run


def row(step: int, attempt: int = 1, phase: str = "phase1", **more: Any) -> dict[str, Any]:
    return {"step": step, "attempt": attempt, "phase": phase, "loss": 1.0, "tokens": 10 * step} | more


def write_rows(folder: Path, rows: list[dict[str, Any]], name: str = "metrics.jsonl") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


def kept(folder: Path) -> list[tuple[int, int]]:
    return [(r["step"], r["attempt"]) for r in read_run(folder).kept_rows]


def test_a_resumed_attempt_replaces_the_steps_it_runs_again(tmp_path: Path) -> None:
    first, second = [row(s, 1) for s in (10, 20, 30, 40)], [row(s, 2) for s in (25, 35, 45)]
    write_rows(tmp_path, first + second)
    assert kept(tmp_path) == [(10, 1), (20, 1), (25, 2), (35, 2), (45, 2)]
    segments = [(s.attempt, s.kept, len(s.rows)) for s in read_run(tmp_path).segments]
    assert segments == [(1, True, 2), (1, False, 2), (2, True, 3)]


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


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a run folder"):
        read_run(tmp_path)


def test_numbers_in_a_record_have_paths() -> None:
    assert dict(numbers_in("a", {"b": 1, "c": {"d": 2.5, "e": None}, "f": "x", "g": True})) == {"a/b": 1, "a/c/d": 2.5}
