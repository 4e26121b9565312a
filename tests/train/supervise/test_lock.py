"""Tests that two jobs never train in one folder, whichever process of the first is alive."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from records.events import CRASHED, REFUSED, SUPERVISED, read_outcome, record_crash
from records.files import hold_lock, read_json
from tests.train.runs import ROOT, run_job
from tests.train.supervised import arguments, supervise
from train.supervise.lock import hold_rank, hold_run, require_no_ranks


def test_one_job_a_run(tmp_path, monkeypatch):
    lock = hold_run(tmp_path)
    require_no_ranks(tmp_path)
    with pytest.raises(ValueError, match=f"another supervisor .*held by process {os.getpid()} on "):
        hold_run(tmp_path)
    with pytest.raises(ValueError, match="another supervisor"):
        # of a job that no supervisor started
        hold_rank(tmp_path, 0)
    monkeypatch.setenv(SUPERVISED, str(tmp_path))
    mine = hold_rank(tmp_path, 0)
    lock.close()
    with pytest.raises(ValueError, match="earlier supervisor"):
        require_no_ranks(tmp_path)
    mine[0].close()
    require_no_ranks(tmp_path)
    hold_run(tmp_path).close()


def test_a_lock_is_waited_for(tmp_path):
    first = hold_lock(tmp_path / "lock", "taken")
    threading.Timer(0.1, first.close).start()
    hold_lock(tmp_path / "lock", "taken", wait_s=100).close()


@pytest.mark.parametrize(
    ("problem", "starting", "code", "output"),
    [
        # a library's, without a word: its place is named
        (AssertionError(""), True, REFUSED, f"AssertionError: .*{__file__}:"),
        (KeyError("2B"), True, REFUSED, f"KeyError: '2B' .*{__file__}:"),
        # a slow mount
        (FileNotFoundError(2, "No such file", "x.bin"), True, CRASHED, "FileNotFoundError: "),
        (RuntimeError("NCCL"), True, CRASHED, "RuntimeError: NCCL"),
        (ValueError("in a step"), False, CRASHED, "ValueError: in a step"),
        (
            torch.OutOfMemoryError("1.5 GiB"),
            False,
            CRASHED,
            r"OutOfMemoryError: lower training.local_batch_size \(.* 1.5 GiB",
        ),
    ],
)
def test_what_is_refused(problem, starting, code, output, tmp_path, capsys):
    refused = starting and not isinstance(problem, RuntimeError)
    with (
        pytest.raises(SystemExit if refused else type(problem)) as ended,
        record_crash(tmp_path, 1, lambda: 3, lambda: starting),
    ):
        raise problem
    outcome = read_outcome(tmp_path)
    assert outcome["code"] == code
    assert re.match(output, outcome["reason"])
    if refused:
        assert ended.value.code == code
        (line,) = capsys.readouterr().err.splitlines()
        assert outcome["reason"] in line


def test_a_rank_that_finds_what_rank_0_does_not_speaks_for_itself(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr("records.events.OTHER_RANKS_S", 0.0)
    with pytest.raises(SystemExit), record_crash(tmp_path, 1, lambda: 0, lambda: True):
        raise ValueError("my shard\nis damaged")
    assert capsys.readouterr().err == "The job is refused: rank 3: my shard is damaged\n"
    with pytest.raises(SystemExit), record_crash(tmp_path, 1, lambda: 0, lambda: True):
        raise ValueError("my shard is damaged")
    # it is on record
    assert capsys.readouterr().err == ""


@pytest.mark.job
def test_workers_outlive_their_supervisor_and_keep_others_out(phase1, tmp_path):
    # the supervisor is SIGKILLed while its workers wait for a stopped rank
    run = tmp_path / "run"
    faults = [{"kind": "stop", "step": 3, "rank": 1}]
    job = [*arguments(run, phase1, steps=6, interval=2), "--resilience.hang_timeout_s", "600"]

    def kill():
        while not list(tmp_path.glob("faults.*.done")):
            time.sleep(0.1)
        os.kill(int((tmp_path / "supervisor.pid").read_text()), signal.SIGKILL)

    _, status, output = supervise(tmp_path, phase1, 6, 2, faults, *job[-2:], meanwhile=kill)
    assert status == -signal.SIGKILL, output
    pids = [read_json(path)["pid"] for path in (run / "heartbeats").glob("rank-*.json")]
    try:
        second = subprocess.run(
            [sys.executable, "-m", "train.supervise", *job],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert second.returncode == 2
        assert any(f"held by process {pid} on " in second.stderr for pid in pids), second.stderr
        plain = run_job(run, job, 2, fails=True)
        assert "of another job is alive" in plain.stdout
        # what is there is the first job's
        assert not (run / "outcome.json").exists()
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    assert len((run / "attempts.jsonl").read_text().splitlines()) == 1
    _, status, output = supervise(tmp_path, phase1, 6, 2, faults)
    assert status == 0, output
