"""An attempt ends with nothing of it left alive."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from threading import Timer

import psutil
import pytest

from records.events import BAD_STEP, read_events, write_outcome
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
    assert not read_events(job.run), "no hang is recorded"
