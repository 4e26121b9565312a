"""An attempt ends with nothing of it left alive."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from threading import Timer

import psutil
import pytest

from records.events import BAD_STEP, write_outcome
from records.files import read_lines
from records.job import JobSections
from train.supervise.attempt import Attempt, Ended
from train.supervise.signals import StopSignals


def test_a_second_request_kills_what_does_not_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The workers never end; their children, in sessions of their own as torchrun's are, must die too."""
    job = JobSections()
    job.job.dump_folder = str(tmp_path / "run")
    job.run.mkdir()
    child = "import time, os; open(r'{}', 'w').write(str(os.getpid())); time.sleep(600)".format(tmp_path / "pid")
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], start_new_session=True)"
    monkeypatch.setattr(
        "train.supervise.attempt.start_workers", lambda *_: subprocess.Popen([sys.executable, "-c", parent])
    )
    stop = StopSignals(on_force=lambda: None)
    attempt = Attempt(job, 1, stop)
    attempt.start(None, 1, [])
    while not (tmp_path / "pid").exists():
        time.sleep(0.05)
    stop.asked = "SIGTERM"
    Timer(1.0, stop._force).start()
    assert attempt.watch().reason.startswith("killed")
    assert (job.run / "stop").exists(), "they were asked first"
    pid = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_workers_that_do_not_exit_keep_their_outcome(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A bad step whose processes then hang is a bad step, not a hang."""
    job = JobSections()
    job.job.dump_folder = str(tmp_path / "run")
    job.resilience.hang_timeout_s = job.resilience.start_timeout_s = 0.5
    job.run.mkdir()
    monkeypatch.setattr(
        "train.supervise.attempt.start_workers",
        lambda *_: subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]),
    )
    attempt = Attempt(job, 1, StopSignals(on_force=lambda: None))
    attempt.start(None, 1, [])
    write_outcome(job.run, 1, BAD_STEP, 7, "the loss is nan")
    assert attempt.watch() == Ended(BAD_STEP, 7, "the loss is nan")
    assert not read_lines(job.run / "events.jsonl"), "no hang is recorded"


def test_dead_workers_are_a_crash_however_long_torchrun_lives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All ranks were killed and torchrun takes longer than the hang timeout to exit: no rank is to blame for a hang."""
    job = JobSections()
    job.job.dump_folder = str(tmp_path / "run")
    job.resilience.hang_timeout_s = job.resilience.start_timeout_s = 2.0
    job.run.mkdir()
    parent = "import subprocess, time; subprocess.run(['sleep', '1']); time.sleep(600)"
    monkeypatch.setattr(
        "train.supervise.attempt.start_workers", lambda *_: subprocess.Popen([sys.executable, "-c", parent])
    )
    attempt = Attempt(job, 1, StopSignals(on_force=lambda: None))
    attempt.start(None, 1, [])
    assert attempt.watch().reason.startswith("no worker recorded an outcome")
    assert not read_lines(job.run / "events.jsonl"), "no hang is recorded"
