"""Tests that an attempt leaves no process alive, and names who is to blame."""

from __future__ import annotations

import json
import os
import pwd
import signal
import subprocess
import tempfile

import psutil
import pytest
from torch.distributed import run

from records.events import BAD_STEP, write_outcome
from records.files import read_lines
from train.supervise import attempt as attempt_module
from train.supervise import heartbeat, workers
from train.supervise.attempt import Attempt, Ended, describe_exit
from train.supervise.signals import StopSignals

REPORT = "Root Cause (first observed failure):\n[0]:\n  host      : a.long.name\n"


@pytest.fixture
def begin(job, monkeypatch):
    # an attempt whose workers are a shell command; console: torchrun's output
    def begin(command, nodes=None, per_node=1, console="", **options):
        started = ["sh", "-c", command]
        monkeypatch.setattr(
            attempt_module,
            "start_workers",
            lambda *_: subprocess.Popen(started, start_new_session=True),
        )
        attempt = Attempt(job, 1, StopSignals(on_force=lambda: None), **options)
        attempt.logs.mkdir(parents=True)
        (attempt.logs / "console.log").write_text(console)
        attempt.start(nodes, per_node, [])
        return attempt

    return begin


def test_a_second_request_kills_what_does_not_end(begin, job, tmp_path):
    # The workers never end; their children, in sessions of their own as torchrun's are, must die
    # too.

    def look():
        if (tmp_path / "pid").exists():
            attempt.stop.request = "SIGTERM"
        # they were asked first
        if (job.run / "stop").exists():
            attempt.stop._force()

    job.resilience.hang_timeout_s = 2.0  # looks are as frequent
    attempt = begin(
        f"setsid sh -c 'echo $$ > {tmp_path}/part; mv {tmp_path}/part {tmp_path}/pid; sleep 600' & wait",
        on_look=look,
    )
    assert attempt.watch().reason.startswith("killed")
    pid = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_no_worker_is_left_when_the_supervisor_stumbles(begin):
    # A stale file handle while it looks: the error goes up, the workers do not live on.

    def stumble():
        raise OSError(116, "Stale file handle")

    attempt = begin("exec sleep 600", on_look=stumble)
    with pytest.raises(OSError, match="Stale"):
        attempt.watch()
    assert attempt.workers.poll() == -signal.SIGKILL


def test_workers_that_do_not_exit_keep_their_outcome(begin, job):
    # A bad step whose processes then hang is a bad step, not a hang.
    job.resilience.hang_timeout_s = job.resilience.start_timeout_s = 0.5
    attempt = begin("exec sleep 600")
    write_outcome(job.run, 1, BAD_STEP, 7, "the loss is nan")
    assert attempt.watch() == Ended(BAD_STEP, 7, "the loss is nan")
    # no hang is recorded
    assert not read_lines(job.run / "events.jsonl")


def test_dead_workers_are_a_crash_however_long_torchrun_lives(begin, job, monkeypatch, tmp_path):
    # All ranks have died, and torchrun takes longer than the hang timeout to exit: no rank is to
    # blame for a hang.
    noted = tmp_path / "noted"

    def look(self):
        # a hang, once the workers were noted and are gone
        return 99.0 if noted.exists() and attempt._workers_are_gone() else None

    monkeypatch.setattr(heartbeat.HangWatch, "look", look)
    job.resilience.hang_timeout_s = 2.0  # looks are as frequent
    attempt = begin(
        f"(until [ -e {noted} ]; do sleep 0.1; done) & wait; exec sleep 600",
        on_look=lambda: noted.touch() if attempt.processes else None,
    )
    assert attempt.watch().reason.startswith("no worker recorded an outcome")
    # no hang is recorded
    assert not read_lines(job.run / "events.jsonl")


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (1, "exit status 1"),
        (128 + signal.SIGSEGV, "signal 11, SIGSEGV: a fault in native code"),
        (85, "exit status 85"),
    ],
)
def test_exit_statuses_in_words(status, words):
    assert describe_exit(status) == words


def test_a_crash_names_its_node_its_signal_and_the_full_disk(begin, job, monkeypatch):
    # The disk of the run folder is full, so no worker could say why: 8 ranks on two nodes, rank 5
    # was killed.
    usage = type("Usage", (), {"free": 4096, "total": 60 << 20})
    monkeypatch.setattr("train.supervise.attempt.shutil.disk_usage", lambda path: usage)
    # all else may be gigabytes
    monkeypatch.setattr(attempt_module, "REPORT_BYTES", 200)
    earlier = REPORT + "  rank      : 1 (local_rank: 1)\n"
    last = REPORT + "  rank      : 5 (local_rank: 1)\n  exitcode  : -9 (pid: 77)\n"
    ended = begin("false", ["n1", "n2"], 4, console=earlier + 300 * "." + last).watch()
    assert ended.failed_node == "n2"
    output = "no worker recorded an outcome, exit status 1 (first to fail: rank 5 on n2, signal 9, SIGKILL"
    assert output in ended.reason
    assert f"the disk of {job.run} is full: 4 KiB of 60 MiB free" in ended.reason


def test_an_abort_of_the_watchdog_blames_the_rank_that_is_waited_for(begin):
    # NCCL's watchdog speaks before the hang timeout: rank 0 aborts, since rank 5 does not come out
    # of its save.
    report = REPORT + "  rank      : 0 (local_rank: 0)\n  exitcode  : -6 (pid: 77)\n"
    attempt = begin("false", ["n1", "n2"], 4, console=report)
    attempt.heartbeats.mkdir()
    for rank in range(8):
        mark = (
            (41, "saving step 1000") if rank == 5 else (42, "the verdict on the save of step 500")
        )
        beat = {
            "rank": rank,
            "host": f"n{1 + rank // 4}",
            "pid": 1,
            "step": 1000,
            "mark": mark,
            "time": 0.0,
        }
        (attempt.heartbeats / f"rank-{rank}.json").write_text(json.dumps(beat))
    ended = attempt.watch()
    assert (ended.suspects, ended.failed_node) == (("n2",), None)
    assert "is full" not in ended.reason
    others = "the other ranks: 7 in the verdict on the save of step 500"
    assert f"rank 5 on n2 in saving step 1000; {others}" in ended.reason
    assert "first to fail: rank 0 on n1, signal 6, SIGABRT" in ended.reason


@pytest.mark.parametrize(
    ("numactl", "trial", "off", "binds"),
    [
        ("numactl", 0, False, True),
        (None, 0, False, False),
        ("numactl", 1, False, False),
        ("numactl", 0, True, False),
    ],
)
def test_ranks_stay_beside_their_gpus(monkeypatch, tmp_path, numactl, trial, off, binds):
    # torchrun binds them where there are GPUs and numactl and a trial works; else its flag would
    # end the job.
    commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: commands.append(command))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], trial))
    monkeypatch.setattr(workers, "NVIDIA_GPUS", tmp_path)
    monkeypatch.setattr("shutil.which", lambda name: numactl)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    env = {workers.NO_NUMA_BINDING: "1"} if off else {}
    workers.start_workers(None, 8, ["train"], tmp_path / "logs", env)
    options = run.parse_args(commands[0][commands[0].index("torch.distributed.run") + 1 :])
    # as torchrun reads it
    assert options.numa_binding == ("node" if binds else None)


def test_a_uid_without_a_name_starts_workers(monkeypatch, tmp_path):
    # as in a container with --user
    def unknown(*_):
        raise KeyError("uid not found: 4242")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    started: list[dict[str, str]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, env, **_: started.append(env))
    for nodes in (None, ["n1", "n2"]):
        monkeypatch.setattr(workers, "find_node_address", lambda node: node)
        workers.start_workers(nodes, 1, ["train"], tmp_path / "logs", {})
    assert {env["TRITON_CACHE_DIR"] for env in started} == {f"{tempfile.gettempdir()}/triton_4242"}
