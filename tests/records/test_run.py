"""Rows of a run folder: which of them count, where they stand, and files that are damaged."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from records.attempts import merge_attempts
from records.run import name_wandb_run, read_run, read_wandb_id
from tests.records.lines import write_lines


def row(step: int, attempt: int = 1, phase: str = "phase1", **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "attempt": attempt,
        "phase": phase,
        "loss": 1.0,
        "tokens": 10 * step,
    } | more


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> None:
    write_lines(folder / "metrics.jsonl", rows)


def list_counted(folder: Path) -> list[tuple[int, int]]:
    return [(r["step"], r["attempt"]) for r in read_run(folder).rows]


def test_a_roll_back_within_an_attempt_counts_like_a_restart(tmp_path):
    write_rows(tmp_path, [row(s, loss=float(i)) for i, s in enumerate((1, 2, 3, 2, 3, 4))])
    rows = read_run(tmp_path).rows
    assert [(r["step"], r["loss"]) for r in rows] == [(1, 0.0), (2, 3.0), (3, 4.0), (4, 5.0)]


def test_a_phase_goes_on_where_the_one_before_ended(tmp_path):
    for before, phase in ((0, "phase1"), (200, "phase2"), (400, "sft")):
        write_rows(
            tmp_path / phase, [row(s, phase=phase, tokens_total=before + 10 * s) for s in (10, 20)]
        )
        (tmp_path / phase / "config.toml").write_text(f'[phase]\nname = "{phase}"\n')
    run = read_run(tmp_path)
    places = [(r["x_step"], r["x_tokens"]) for r in run.rows]
    assert places == [(10, 100), (20, 200), (30, 300), (40, 400), (50, 500), (60, 600)]
    assert list(run.configs) == run.phases == ["phase1", "phase2", "sft"]


def test_rows_kept_both_together_and_by_phase_count_once(tmp_path):
    rows = [row(s, time=float(s)) for s in (1, 2, 3)]
    write_rows(tmp_path, rows)
    write_rows(tmp_path / "phase1", rows)
    assert list_counted(tmp_path) == [(1, 1), (2, 1), (3, 1)]


def test_half_lines_nan_and_unknown_keys(tmp_path):
    lines = [
        '{"step": 1, "loss": NaN, "colour": "red"}',
        "not json",
        '{"step": 2, "loss": null}',
        "[1]",
    ]
    lines += ['{"step": 3, "loss": 2.5, "lr": "high", "grad_norm": Infinity}', '{"loss": 1.0}']
    lines += ['{"step": 4, "lo']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    run = read_run(tmp_path)
    assert [(r["step"], r["loss"], r["lr"], r["grad_norm"]) for r in run.rows] == [
        (1, None, None, None),
        (2, None, None, None),
        (3, 2.5, None, None),
    ]
    assert any("2 unreadable line(s)" in w and "line 2" in w for w in run.warnings)
    assert any("without a step" in w for w in run.warnings)
    assert any("training step 1, training step 2" in w for w in run.warnings)


# merged attempts against a plain history of what happened: whatever the restarts, no step counts twice

TOKENS_A_STEP = 100


@st.composite
def histories(
    draw: st.DrawFn,
) -> tuple[list[dict[str, Any]], dict[tuple[str, int], int], list[tuple[int, int]]]:
    """Play a job: (rows as written, starts, (step, attempt) of the rows that count)."""
    log_freq = draw(st.sampled_from((1, 2, 5)))
    rows: list[dict[str, Any]] = []
    starts: dict[tuple[str, int], int] = {}
    history: list[tuple[int, int]] = []
    reached = 0
    for attempt in range(1, draw(st.integers(1, 6)) + 1):
        # an attempt begins behind a checkpoint that some attempt has reached
        start = draw(st.integers(0, reached))
        end = start + draw(st.integers(0, 15))
        starts["p", attempt] = start
        # what a roll-back leaves behind it does not count
        history = [(step, of) for step, of in history if step <= start]
        for step in range(start + 1, end + 1):
            if step == 1 or step % log_freq == 0:
                rows.append({"phase": "p", "attempt": attempt, "step": step})
                history.append((step, attempt))
        reached = end
    return rows, starts, history


def find_counted(
    rows: list[dict[str, Any]], starts: dict[tuple[str, int], int] | None
) -> list[tuple[int, int]]:
    merged = merge_attempts([dict(row) for row in rows], starts)
    # what does not count is only marked
    assert sum(len(s.rows) for s in merged) == len(rows)
    segments = [segment for segment in merged if segment.is_counted]
    return [(row["step"], row["attempt"]) for segment in segments for row in segment.rows]


@given(histories(), st.randoms())
def test_what_counts_is_what_led_to_the_newest_state(played, random):
    rows, starts, history = played
    assert find_counted(rows, starts) == history
    attempts = sorted({row["attempt"] for row in rows}, key=lambda _: random.random())
    shuffled = sorted(rows, key=lambda row: attempts.index(row["attempt"]))
    assert find_counted(shuffled, starts) == history
    everything = [(row["step"], row["attempt"]) for row in rows]
    # the check can fail
    assert (find_counted(rows, starts) == everything) == (history == everything)


@given(histories())
def test_without_starts_no_step_counts_twice_and_the_last_attempt_wins(played):
    rows, _, _ = played
    rows_that_count = find_counted(rows, None)
    steps = [step for step, _ in rows_that_count]
    assert steps == sorted(set(steps))
    # rows come in order of attempts, so later ones win
    last = {row["step"]: row["attempt"] for row in rows}
    assert all(attempt == last[step] for step, attempt in rows_that_count)


def write(
    folder: Path, phase: str, steps: range, tokens_before: int = 0, parent: Path | None = None
) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(f'[phase]\nname = "{phase}"\n')
    lines = [
        {
            "step": s,
            "attempt": 1,
            "phase": phase,
            "loss": 2.0,
            "tokens": s * TOKENS_A_STEP,
            "tokens_total": tokens_before + s * TOKENS_A_STEP,
            "time": 50.0 + s,
        }
        for s in steps
    ]
    write_rows(folder, lines)
    write_lines(folder / "attempts.jsonl", [{"attempt": 1, "step": 0}])
    lineage = {"parent": str(parent) if parent else None, "tokens_before": tokens_before}
    (folder / "lineage.json").write_text(json.dumps(lineage))
    return folder


def test_a_run_begins_where_its_parent_checkpoint_stands(tmp_path):
    # phase1 -> phase2 -> a decay branched from the middle of phase 2, each in a folder of its own.
    one = write(tmp_path / "one", "phase1", range(1, 11))
    two = write(tmp_path / "two", "phase2", range(1, 7), 1000, one / "checkpoint/step-10")
    decay = write(tmp_path / "decay", "decay", range(1, 4), 1400, two / "checkpoint/step-4")
    run = read_run(decay)
    assert [(row["x_step"], row["x_tokens"]) for row in run.rows] == [
        (15, 1500),
        (16, 1600),
        (17, 1700),
    ]
    (one / "lineage.json").unlink()
    (two / "lineage.json").unlink()
    first = read_run(decay).rows[0]
    # steps as far as parents are there; tokens as recorded
    assert (first["x_step"], first["x_tokens"]) == (5, 1500)


def test_events_stand_at_their_step_on_both_axes(tmp_path):
    parent = tmp_path / "one/checkpoint/step-10"
    run = write(tmp_path / "two", "phase2", range(2, 9, 2), 1000, parent)
    lines: list[dict[str, Any]] = [
        {"step": 4},
        {"step": 5},
        {"step": 99},
        {},
        {"time": 55.5},
        {"time": 1.0},
    ]
    write_lines(run / "events.jsonl", lines)
    events = read_run(run).events
    places = [(event["x_step"], event["x_tokens"]) for event in events]
    assert places == [(14, 1400), (15, 1500), (109, 10900), (None, None), (14, 1400), (None, None)]
    # of the row beside it
    assert [event["x_time"] for event in events] == [54.0, 56.0, 58.0, None, 54.0, 1.0]


def test_an_evaluation_stands_at_its_checkpoint_and_counts_once_in_two_folders(tmp_path):
    run = write(
        tmp_path / "two", "phase2", range(2, 9, 2), 1000, tmp_path / "one/checkpoint/step-10"
    )
    lines = [
        {"kind": "core", "phase": "phase2", "step": 4, "tokens_total": 1400, "time": 9e9},
        {"kind": "core", "phase": "elsewhere", "step": 3, "time": 7.0},
    ]
    write_lines(run / "evals.jsonl", lines)
    write_lines(run / "phase2/evals.jsonl", lines[:1])
    places = [
        (record["x_step"], record["x_tokens"], record["x_time"]) for record in read_run(run).evals
    ]
    assert places == [(3, None, 7.0), (14, 1400, 54.0)]
    # without a phase it is of the only one
    write_lines(run / "phase2/evals.jsonl", [{"kind": "core", "step": 6, "time": 8.0}])
    (record,) = (each for each in read_run(run).evals if each["step"] == 6)
    assert (record["phase"], record["x_step"], record["x_tokens"]) == ("phase2", 16, 1600)


def test_a_run_that_names_itself_as_its_parent_is_read_and_another_folder_refused(tmp_path):
    with pytest.raises(ValueError, match="is not a run folder"):
        read_run(tmp_path)
    write_rows(tmp_path / "run", [row(1), row(2)])
    lineage = {"parent": str(tmp_path / "run/checkpoint/step-50"), "tokens_before": 0}
    (tmp_path / "run/lineage.json").write_text(json.dumps(lineage))
    assert len(read_run(tmp_path / "run").rows) == 2


def wandb_id(run: Path, monkeypatch: pytest.MonkeyPatch, **environment: str) -> str:
    """Return the id of a process that starts in the run folder."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", environment)
        name_wandb_run(run)
        assert os.environ["WANDB_RUN_NAME"] == run.name
        return os.environ["WANDB_RUN_ID"]


def test_a_wandb_run_belongs_to_a_folder_and_not_to_its_path(tmp_path, monkeypatch):
    run = tmp_path / "run"
    other = tmp_path / "container/run"
    for folder in (run, other):
        folder.mkdir(parents=True)
    first = wandb_id(run, monkeypatch)
    # a restart continues
    assert wandb_id(run, monkeypatch) == first
    assert wandb_id(other, monkeypatch) != first
    moved = run.rename(tmp_path / "elsewhere")
    assert wandb_id(moved, monkeypatch) == first
    run.mkdir()
    # a new run at an old path
    assert wandb_id(run, monkeypatch) != first
    (tmp_path / "link").symlink_to(moved)
    assert wandb_id(tmp_path / "link", monkeypatch) == first
    assert wandb_id(run, monkeypatch, WANDB_RUN_ID="mine") == "mine"
    with ThreadPoolExecutor(8) as pool:
        # drawn once by all that start together
        assert len(set(pool.map(read_wandb_id, [tmp_path / "many"] * 8))) == 1


def test_a_full_disk_has_an_id_as_well(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("records.run.write_atomically", fail)
    assert wandb_id(tmp_path, monkeypatch) != wandb_id(tmp_path, monkeypatch)
