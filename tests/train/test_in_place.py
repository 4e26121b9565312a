"""Tests of what does not end an attempt: skipped batches, a full disk, another batch size."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from data_mixtures.mixture import Mixture
from records.events import read_outcome
from records.files import read_json, read_lines
from tests.train.runs import GLOBAL_BATCH, SEQ_LEN, copy_stopped_at, run_job
from tests.train.supervised import RANKS, arguments, assert_same, run_faulty, run_undisturbed
from tests.train.test_show import show_batches
from train.checkpoint_writer import HashingWriter
from train.failed_saves import FailedSaves, make_room

SKIP = ("--resilience.on_bad_step", "skip", "--resilience.max_skips", "2")
ROLL_BACK = ("--resilience.on_bad_step", "rollback_and_skip", "--resilience.skip_steps", "2")
NAN = {"kind": "nan"}


def windows(run: Path) -> list[list[int]]:
    return [entry["window"] for entry in read_json(run / "skip_sequences.json")]


@pytest.mark.job
def test_skipped_in_place_equals_skipped_from_the_start(phase1, tmp_path, capsys):
    # and `data_mixtures show` shows the refused batch
    steps = 8
    faults = [{**NAN, "step": 4}, {**NAN, "step": 4}, {**NAN, "step": 6}]
    more = (*SKIP, "--resilience.spike_window", "4", "--resilience.max_skips", "3")
    run_faulty(tmp_path / "a", phase1, steps, 5, faults, *more)
    run = tmp_path / "a/run"
    size = GLOBAL_BATCH
    assert windows(run) == [[3 * size, 4 * size], [4 * size, 5 * size], [7 * size, 8 * size]]
    refused = [event for event in read_lines(run / "events.jsonl") if event["kind"] == "bad_step"]
    assert [event["step"] for event in refused] == [4, 4, 6]
    command, mixture = refused[2]["show"].split(), Mixture.open(phase1)
    assert command[:4] == ["python", "-m", "data_mixtures", "show"]
    tokens = [window["tokens"] for window in show_batches(capsys, *command[4:])]
    assert tokens == mixture.sequences(7 * size, size)[0].tolist()
    planned = run_undisturbed(
        tmp_path / "b",
        phase1,
        steps,
        5,
        "--resilience.skip_sequences",
        *(str(n) for n in (12, 20, 28, 32)),
    )
    assert_same(run, planned, steps)
    # killed after the checkpoint of step 5: the restart reads what this run has read
    shutil.rmtree(run / "checkpoint/step-8")
    run_job(run, [*arguments(run, phase1, steps, 5), *more], RANKS)
    assert_same(run, planned, steps)


@pytest.mark.job
@pytest.mark.parametrize(
    ("policy", "steps", "first", "last"),
    [
        (SKIP, (4, 4, 5), 6, 7),
        (ROLL_BACK, (5,), 3, 5),
        ((*ROLL_BACK, "--checkpoint.no-enable"), (5,), 3, 5),
    ],
    ids=["the third of two that may be skipped", "a window of two steps", "without checkpoints"],
)
def test_a_roll_back_leaves_out_what_it_goes_back_over(
    phase1, tmp_path, policy, steps, first, last
):
    # The refused batch, and with skip_steps those before it that no checkpoint has seen.
    faults = [{**NAN, "step": step} for step in steps]
    job = run_faulty(
        tmp_path,
        phase1,
        8,
        2 if policy is SKIP else 3,
        faults,
        *policy,
        fails=True,
    )
    assert job.returncode == 86
    run, size = tmp_path / "run", GLOBAL_BATCH
    assert read_outcome(run)["code"] == 86
    assert windows(run)[-1] == [first * size, last * size]
    assert len(windows(run)) == len(steps)


@pytest.fixture
def small_disk(tmp_path):
    # for the run a/run: room for seven steps, full in a moment
    disk = tmp_path / "disk"
    disk.mkdir()
    (tmp_path / "a").mkdir()
    (tmp_path / "a/run").symlink_to(disk)
    outcome = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", disk], capture_output=True, text=True
    )
    if outcome.returncode:
        pytest.skip(f"mounting a tmpfs is not permitted here: {outcome.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.job
def test_a_full_disk_ends_nothing_and_is_named(phase1, tmp_path, small_disk):
    # Rows wait in memory; the save fails and is taken back; the numbers are those of an undisturbed
    # run.
    steps = 9
    faults = [{"kind": "fill_disk", "step": 3}, {"kind": "empty_disk", "step": 7, "rank": 0}]
    more = ("--metrics.enable_tensorboard", "--resilience.max_failed_saves", "1")
    job = run_faulty(tmp_path / "a", phase1, steps, 3, faults, *more)
    assert f"(disk {small_disk}, 0 of 0.0168 GB free)" in job.stdout
    # of all ranks, one says so
    assert len(re.findall(r"step:  9 .*loss:", job.stdout)) == 1
    run = tmp_path / "a/run"
    assert [row["step"] for row in read_lines(run / "metrics.jsonl")] == list(range(1, steps + 1))
    kinds = {e["kind"]: e for e in read_lines(run / "events.jsonl")}
    # the first row for which the file's last page had no room
    assert 3 <= kinds["disk_full"]["step"] < 7
    assert 3 <= kinds["save_failed"]["step"] <= 7
    assert_same(run, run_undisturbed(tmp_path / "b", phase1, steps, 3), steps)


def write_old_checkpoint(folder: Path) -> None:
    # as large as one of this job
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(bytes(2 << 20))


def test_room_is_made_of_what_the_run_has_put_aside_alone(tmp_path):
    for name in (
        "checkpoint/step-3",
        "checkpoint/.trash-step-1.1",
        "checkpoint-aside/step-5.2",
        "other/step-1",
    ):
        write_old_checkpoint(tmp_path / name)
    assert make_room(tmp_path, tmp_path / "checkpoint")
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*")} == {
        "checkpoint/step-3",
        "other/step-1",
    }
    # nothing is left to delete
    assert not make_room(tmp_path, tmp_path / "checkpoint")


@pytest.mark.job
def test_a_full_disk_loses_what_was_put_aside_and_is_tried_again(phase1, tmp_path, small_disk):
    # Saves of steps 3, 6 and 7 are refused, though one failed save would end the job; 4 finds the
    # room of what was put aside, 8 that of a disk which somebody has cleared.
    run = tmp_path / "a/run"
    faults = [{"kind": "fill_disk", "step": step} for step in (3, 5)]
    faults += [{"kind": "empty_disk", "step": 8, "rank": 0}]
    write_old_checkpoint(run / "checkpoint-aside/step-5.20260101T000000-1")
    more = ("--resilience.max_failed_saves", "1", "--checkpoint.async_mode", "disabled")
    run_faulty(tmp_path / "a", phase1, 8, 3, faults, *more)
    events = read_lines(run / "events.jsonl")
    failed = [
        (event["step"], event["in_a_row"]) for event in events if event["kind"] == "save_failed"
    ]
    assert failed == [(3, 0), (6, 0), (7, 0)]
    assert all(
        "No space left on device" in e["reason"] for e in events if e["kind"] == "save_failed"
    )
    removed = {event["checkpoint"] for event in events if event["kind"] == "checkpoint_removed"}
    assert removed == {"step-5.20260101T000000-1"}
    assert {path.name for path in (run / "checkpoint").iterdir()} == {"step-4", "step-8"}


def test_a_disk_that_fills_within_a_tensor_is_named(small_disk):
    # torch's writer fails with "unexpected pos 704 vs 598" there
    # 24 MB
    state = {"tensor": torch.zeros(6 << 20)}
    writer = HashingWriter(str(small_disk / "step-1"), "{}")
    with pytest.raises(CheckpointException, match=r"OSError: \[Errno 28\] No space left on device"):
        dcp.save(state, storage_writer=writer, no_dist=True)


def test_failed_saves_end_the_job_where_the_disk_is_not_full_or_its_step_is_the_last(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("train.failed_saves.on_rank_zero", lambda decide: decide())
    failed = FailedSaves(tmp_path, tmp_path / "checkpoint", max_in_a_row=2)
    failed.record_result(2, "RuntimeError: x")
    failed.record_result(3, "Traceback\nOSError: [Errno 28] No space left on device")
    # a full disk does not count
    assert (failed.in_a_row, failed.retry_is_due) == (1, False)
    with pytest.raises(
        RuntimeError, match=r"step 4, could not be written: OSError: \[Errno 28\].*make room below"
    ):
        failed.require_saved(4)
    failed.record_result(5, None)
    failed.require_saved(5)
    failed.record_result(6, "RuntimeError: x")
    with pytest.raises(
        RuntimeError, match="2 saves in a row have failed, last: RuntimeError: y; see events"
    ):
        failed.record_result(7, "RuntimeError: y")


@pytest.mark.job
def test_another_batch_size_from_a_checkpoint_on(reference, phase1, tmp_path):
    # Ten steps of 4 sequences, then two of 8: no sequence twice, none left out, tokens as they were
    # read.
    run = tmp_path / "run"
    copy_stopped_at(10, reference, run)
    run_job(run, [*arguments(run, phase1, 12, 4), "--training.global_batch_size", "8"], RANKS)
    mixture = Mixture.open(phase1)
    for row, count in zip(read_lines(run / "metrics.jsonl")[-2:], (48, 56), strict=True):
        assert row["tokens_total"] == row["tokens"] == count * SEQ_LEN
        used = mixture.windows_per_source(count)
        assert row["tokens_by_source"] == {name: n * SEQ_LEN for name, n in used.items()}
