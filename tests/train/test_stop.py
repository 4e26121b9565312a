"""Tests of stop requests: exit status 85 only with the step's checkpoint; marks of ranks."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from records.checkpoints import check_complete
from records.events import STOPPED, STOPPED_UNSAVED, read_outcome
from records.files import read_json, read_lines
from tests.train.supervised import run_faulty


@pytest.mark.job
def test_a_stop_whose_save_fails_is_no_85(phase1, tmp_path):
    # Signalled in step 3; the disk is full from step 2 on. (A stop that saves: test_faults.py.)
    faults: list[dict[str, Any]] = [
        {"kind": "usr1", "step": 3, "rank": 1},
        {"kind": "full_disk", "step": 2},
    ]
    job = run_faulty(tmp_path, phase1, 6, 5, faults, fails=True)
    outcome = read_outcome(tmp_path / "run")
    assert (job.returncode, outcome["code"], outcome["step"]) == (84, STOPPED_UNSAVED, 3), (
        job.stdout[-3000:]
    )
    assert not (tmp_path / "run/checkpoint/step-3").exists()
    assert "could not be saved" in outcome["reason"]


@pytest.mark.job
def test_a_signal_to_all_processes_saves_as_well(data_folder, tmp_path):
    # In step 3, when those are there that have written the checkpoint of step 2 in the background.
    job = run_with_writers(
        data_folder, tmp_path, {"kind": "sigterm_step", "step": 3, "rank": None}, fails=True
    )
    outcome = read_outcome(tmp_path / "run")
    assert (outcome["code"], outcome["step"]) == (STOPPED, 3), (
        outcome["reason"] + job.stdout[-3000:]
    )
    check_complete(tmp_path / "run/checkpoint/step-3")


@pytest.mark.rotate
def test_a_writer_that_is_killed_costs_one_checkpoint(data_folder, tmp_path):
    # One rank's, in step 3: the save of step 4 fails, that of step 6 has new writers on all ranks.
    run_with_writers(
        data_folder, tmp_path, {"kind": "kill_writer", "step": 3, "rank": 1}, fails=False
    )
    failed = [
        e["step"] for e in read_lines(tmp_path / "run/events.jsonl") if e["kind"] == "save_failed"
    ]
    assert failed == [4]
    assert sorted(path.name for path in (tmp_path / "run/checkpoint").glob("step-*")) == [
        "step-2",
        "step-6",
        "step-8",
    ]
    check_complete(tmp_path / "run/checkpoint/step-6")


def run_with_writers(
    data: Path, folder: Path, fault: dict[str, Any], fails: bool
) -> subprocess.CompletedProcess[str]:
    # 8 steps on two ranks: a process of each rank saves every 2 steps, the ranks themselves the last
    more, module = (
        ("--checkpoint.async_mode", "async_with_pinned_mem"),
        "tests.train.production_facts",
    )
    return run_faulty(
        folder, data / "phase1.lock.json", 8, 2, [fault], *more, module=module, fails=fails
    )


@pytest.mark.job
def test_all_ranks_pass_the_same_marks(phase1, tmp_path):
    # A hang blames the rank that has passed fewest, so every place where ranks wait for each other
    # has one.
    run_faulty(tmp_path, phase1, 2, 2, [], "--validation.freq", "2")
    first, second = (read_json(tmp_path / f"marks.{rank}.json") for rank in range(2))
    assert first == second
    parts = (
        "reading the data",
        "counting the tokens",
        "forward and backward",
        "the gradient norm",
        "the exchange",
    )
    places = [f"{part} of step 2" for part in (*parts, "the end")]
    places += ["saving step 2", "the verdict on the save of step 2", "the validation after step 2"]
    assert first[first.index(places[0]) :] == places
