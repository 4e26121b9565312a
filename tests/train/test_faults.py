"""Tests that a job survives real faults by itself and ends bitwise as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from records.events import read_outcome
from records.files import read_lines
from tests.train.runs import GLOBAL_BATCH
from tests.train.supervised import INTERVAL, STEPS, assert_same, curve, supervise

pytestmark = pytest.mark.job
# One run meets all in turn, because a start costs its imports. The full disk is the kernel's own refusal to
# write more (RLIMIT_FSIZE, EFBIG); only the moment is simulated
FAULTS: list[dict[str, Any]] = [
    # before the first checkpoint: from the beginning
    {"kind": "kill", "step": 3, "rank": 1},
    {"kind": "stop", "step": 7, "rank": 0},
    {"kind": "kill_all_before_metadata", "step": 10},
    {"kind": "nan", "step": 13},
    {"kind": "kill_all_after_metadata", "step": 15},
    {"kind": "full_disk", "step": 20},
    {"kind": "usr1", "step": 24, "rank": 1},
    # of the checkpoint of step 25
    {"kind": "truncate", "step": 27},
    {"kind": "sigterm_supervisor", "step": 31, "rank": 0},
]


@pytest.fixture(scope="module")
def faulty_run(phase1, tmp_path_factory):
    folder = tmp_path_factory.mktemp("disturbed")
    run, status, output = supervise(folder, phase1, STEPS, INTERVAL, FAULTS)
    assert status == 85, f"the supervisor was to save and end with 85\n{output}"
    # saved at the step boundary
    assert max(curve(run)) == 31
    run, status, output = supervise(folder, phase1, STEPS, INTERVAL, FAULTS)
    assert status == 0, output
    # a fault was never committed
    assert len(list(folder.glob("faults.*.done"))) >= len(FAULTS)
    return run, output


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_lines(run / "events.jsonl") if event["kind"] == kind]


def test_nothing_is_different_in_the_end(faulty_run, reference):
    assert_same(faulty_run[0], reference, STEPS)


def test_every_fault_is_on_record(faulty_run):
    run, output = faulty_run
    ends = [(e["code"], e["step"]) for e in events(run, "supervisor_end")]
    assert [code for code, _ in ends] == [1, 1, 1, 86, 1, 85, 1, 85, 0], output
    assert [step for code, step in ends if code in (85, 86, 0)] == [13, 24, 31, STEPS]
    assert [a["step"] for a in read_lines(run / "attempts.jsonl")] == [
        0,
        0,
        5,
        5,
        10,
        15,
        24,
        24,
        31,
    ]
    assert read_outcome(run)["code"] == 0


def test_the_hang_names_the_rank_and_keeps_the_stacks(faulty_run):
    (hang,) = events(faulty_run[0], "hang")
    assert [fact["rank"] for fact in hang["laggards"]] == [0]
    assert "train_step" in (Path(hang["stacks"]) / "rank-1.stacks").read_text()


def test_a_refused_batch_is_named(faulty_run):
    (event,) = events(faulty_run[0], "bad_step")
    assert (event["step"], event["grad_norm"]) == (13, "nan")
    batch = read_lines(Path(event["batch"]))
    assert [place["sequence"] for place in batch] == list(
        range(12 * GLOBAL_BATCH, 13 * GLOBAL_BATCH)
    )
    assert {place["source"] for place in batch} <= {"web", "code"}


def test_checkpoints_that_remain(faulty_run):
    run, _ = faulty_run
    steps = {int(path.name.removeprefix("step-")) for path in (run / "checkpoint").glob("step-*")}
    # multiples of keep_every_steps stay
    assert {10, 30, 35, STEPS} <= steps
    # superseded, or failed on the full disk
    assert not steps & {5, 15, 20, 24}
    (failed,) = events(run, "save_failed")
    assert failed["step"] == 20
    removed = {(e["checkpoint"], e["what"].split()[0]) for e in events(run, "checkpoint_removed")}
    # cut before .metadata; truncated after it
    assert removed == {("step-10", "deleted:"), ("step-25", "set")}
    assert len(list((run / "checkpoint-aside").glob("step-25.*"))) == 1
