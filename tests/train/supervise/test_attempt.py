"""An attempt ends with nothing of it left alive."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Timer

import psutil
import pytest
from torch.distributed import run

from records.events import BAD_STEP, write_outcome
from records.files import read_lines
from records.job import JobSections
from train.supervise import attempt as attempt_module
from train.supervise import heartbeat
from train.supervise.attempt import Attempt, Ended, exit_words, full_disks
from train.supervise.signals import StopSignals


def test_a_second_request_kills_what_does_not_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The workers never end; their children, in sessions of their own as torchrun's are, must die too."""
    job = JobSections()
    job.job.dump_folder = str(tmp_path / "run")
    job.run.mkdir()
    child = "import time, os; open(r'{}', 'w').write(str(os.getpid())); time.sleep(600)".format(
        tmp_path / "pid"
    )
    parent = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], start_new_session=True)"
    )
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


def test_dead_workers_are_a_crash_however_long_torchrun_lives(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All ranks were killed and torchrun takes longer than the hang timeout to exit: no rank is to
    blame for a hang.
    """
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


def test_heartbeats_are_read_every_few_seconds_and_an_end_is_seen_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """192 files, each on a shared file system: at most one look in five seconds, whatever the
    poll for the end.
    """
    job = JobSections()
    job.job.dump_folder = str(tmp_path / "run")
    job.run.mkdir()
    looks: list[float] = []

    def read(folder: Path) -> dict:
        looks.append(time.monotonic())
        return {}

    monkeypatch.setattr(heartbeat, "read_heartbeats", read)
    monkeypatch.setattr(
        "train.supervise.attempt.start_workers",
        lambda *_: subprocess.Popen(["sleep", "2"], start_new_session=True),
    )
    attempt = Attempt(job, 1, StopSignals(on_force=lambda: None))
    attempt.start(None, 192, [])
    began = time.monotonic()
    attempt.watch()
    assert time.monotonic() - began < 3.0
    assert len(looks) == 2, "one when it began and one for the record when it ended"
    assert heartbeat.interval_s(400.0) == 5.0


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (1, "exit status 1"),
        (-signal.SIGKILL, "signal 9, SIGKILL: out of memory, or killed from outside"),
        (128 + signal.SIGSEGV, "signal 11, SIGSEGV: a fault in native code"),
        (85, "exit status 85"),
    ],
)
def test_exit_statuses_in_words(status: int, words: str) -> None:
    assert exit_words(status) == words


def test_a_crash_names_its_node_its_signal_and_the_full_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The disk of the run folder is full, so no worker could say why: 8 ranks on two nodes,
    rank 5 was killed.
    """
    job = JobSections()
    job.job.dump_folder = str(tmp_path / "run")
    job.run.mkdir()
    report = "Root Cause (first observed failure):\n[0]:\n  host      : a.long.name\n  rank      : 5 (local_rank: 1)\n"
    monkeypatch.setattr("train.supervise.attempt.start_workers", lambda *_: subprocess.Popen(["false"]))
    usage = type("Usage", (), {"free": 4096, "total": 60 << 20})
    monkeypatch.setattr("train.supervise.attempt.shutil.disk_usage", lambda path: usage)
    attempt = Attempt(job, 1, StopSignals(on_force=lambda: None))
    attempt.logs.mkdir(parents=True)
    monkeypatch.setattr("train.supervise.attempt.REPORT_BYTES", 200)  # all else may be gigabytes
    (attempt.logs / "console.log").write_text(
        report.replace("5", "1") + 300 * "." + report + "  exitcode  : -9 (pid: 77)\n"
    )
    attempt.start(["n1", "n2"], 4, [])
    ended = attempt.watch()
    assert ended.failed_node == "n2"
    assert (
        "no worker recorded an outcome, exit status 1 (first to fail: rank 5 on n2, signal 9, SIGKILL"
        in ended.reason
    )
    assert f"the disk of {job.run} is full: 4 KiB of 60 MiB free" in ended.reason


def test_a_disk_with_room_is_not_full(tmp_path: Path) -> None:
    assert full_disks([tmp_path, tmp_path / "missing"]) == []


def test_ranks_stay_beside_their_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """torchrun binds them where there are GPUs and numactl and a trial works; else its flag would end the job."""
    commands: list[list[str]] = []
    trials: list[list[str]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: commands.append(command))
    monkeypatch.setattr(attempt_module, "NVIDIA_GPUS", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    off = {attempt_module.NO_NUMA_BINDING: "1"}
    for numactl, status, env in (("numactl", 0, {}), (None, 0, {}), ("numactl", 1, {}), ("numactl", 0, off)):
        monkeypatch.setattr("shutil.which", lambda name, found=numactl: found)
        ended = subprocess.CompletedProcess([], status)
        monkeypatch.setattr(
            subprocess, "run", lambda command, done=ended, **_: trials.append(command) or done
        )
        attempt_module.start_workers(None, 8, ["train"], tmp_path / "logs", env)
    assert ["--numa-binding=node" in command for command in commands] == [True, False, False, False]
    assert len(trials) == 2
    assert "--nproc-per-node=8" in trials[0]
    assert "set resilience.numa_binding = false" in capsys.readouterr().err
    for command in (commands[0], trials[0]):  # torchrun knows the flag
        known = run.parse_args([*command[command.index("torch.distributed.run") + 1 :]])
        assert known.numa_binding == "node"


def test_no_worker_is_left_when_the_supervisor_stumbles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A stale file handle while it looks: the error goes up, the workers do not live on."""
    job = JobSections()
    job.job.dump_folder = str(tmp_path / "run")
    job.run.mkdir()
    monkeypatch.setattr(
        "train.supervise.attempt.start_workers",
        lambda *_: subprocess.Popen(["sleep", "600"], start_new_session=True),
    )

    def stumble() -> None:
        raise OSError(116, "Stale file handle")

    attempt = Attempt(job, 1, StopSignals(on_force=lambda: None), stumble)
    attempt.start(None, 1, [])
    with pytest.raises(OSError, match="Stale"):
        attempt.watch()
    assert attempt.workers.poll() is not None


def test_an_abort_of_those_that_wait_blames_whom_they_wait_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """NCCL's watchdog speaks before the hang timeout: rank 0 aborts, since rank 5 does not come
    out of its save.
    """
    job = JobSections()
    job.job.dump_folder = str(tmp_path / "run")
    job.run.mkdir()
    report = "Root Cause (first observed failure):\n[0]:\n  host      : a.long.name\n  rank      : 0 (local_rank: 0)\n"
    monkeypatch.setattr("train.supervise.attempt.start_workers", lambda *_: subprocess.Popen(["false"]))
    attempt = Attempt(job, 1, StopSignals(on_force=lambda: None))
    attempt.logs.mkdir(parents=True)
    (attempt.logs / "console.log").write_text(report + "  exitcode  : -6 (pid: 77)\n")
    attempt.start(["n1", "n2"], 4, [])
    attempt.heartbeats.mkdir()
    for rank in range(8):
        mark = (41, "saving step 1000") if rank == 5 else (42, "the verdict on the save of step 500")
        beat = {"rank": rank, "host": f"n{1 + rank // 4}", "pid": 1, "step": 1000, "mark": mark, "time": 0.0}
        (attempt.heartbeats / f"rank-{rank}.json").write_text(json.dumps(beat))
    ended = attempt.watch()
    assert (ended.suspects, ended.failed_node) == (("n2",), None)
    assert (
        "rank 5 on n2 in saving step 1000; the other ranks: 7 in the verdict on the save of step 500"
        in ended.reason
    )
    assert "first to fail: rank 0 on n1, signal 6, SIGABRT" in ended.reason
