"""The watcher on a real run: from within the job; killed, started again, no record twice;
and its choices, played.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp

from evals.watch import Watcher, only_watcher
from records.events import DONE, STOPPED, write_outcome
from records.files import hold_lock
from records.job import Checkpoint, Evals, Job, JobSections, Training
from tests.evals.not_nice import NOT_NICE
from tests.train.supervised import ROOT, arguments, environment

STEPS = 4
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def trained(prepared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps on two ranks, with complete checkpoints at 1, 2 and 4, of which
    it evaluated the first and the last.
    """
    run = tmp_path_factory.mktemp("watched") / "run"
    job = arguments(run, prepared_data / "phase1.lock.json", STEPS, 2)
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        "-m",
        "train",
    ]
    evals = ["--evals.every_steps", "4", "--evals.dtype", "float32", "--evals.in_loop"]
    evals += ["--checkpoint.enable_first_step_checkpoint", "--evals.commands"]
    commands = f"{command(prepared_data)},decode_speed --device nowhere"  # TorchTitan's way of a list
    done = subprocess.run(
        [*launch, *job, "--validation.no-enable", "--resilience.hang_timeout_s", "300", *evals, commands],
        cwd=ROOT, env=environment() | NOT_NICE, capture_output=True, text=True, timeout=1100,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return run


def command(data: Path) -> str:
    return f"bits_per_byte --data {data} --limit 2"


def watcher(run: Path, *options: str, priority: dict[str, str] = NOT_NICE) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "evals.watch", "--run", str(run), "--every-s", "0.2", *options]
    env = environment() | priority
    return subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)


def records(run: Path) -> list[dict[str, Any]]:
    path = run / "evals.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


@pytest.mark.rotate
def test_a_job_evaluates_its_own_checkpoints(trained: Path, prepared_data: Path) -> None:
    """Once, not on each rank; and a command that fails is said and ends nothing."""
    assert [(r["command"], r["step"]) for r in records(trained)] == [
        (command(prepared_data), step) for step in (1, 4)
    ]
    events = [json.loads(line) for line in (trained / "events.jsonl").read_text().splitlines()]
    failed = [(e["step"], e["reason"]) for e in events if e["kind"] == "evaluation_failed"]
    assert [step for step, _ in failed] == [1, 1, 1, 4, 4], "that of step 1 again beside that of step 4"
    assert failed[0][1].startswith("decode_speed --device nowhere: exit status")
    assert failed[1][1].startswith("exit status 1, see"), "what the job says of its watcher"


@pytest.mark.rotate
def test_a_killed_watcher_goes_on_and_repeats_nothing(trained: Path, prepared_data: Path) -> None:
    (trained / "evals.jsonl").unlink()
    wanted = ("--evals.every_steps", "2", "--evals.commands", command(prepared_data))
    first = watcher(trained, *wanted)
    while not records(trained) and first.poll() is None:
        time.sleep(0.02)
    first.kill()  # in the middle of the export of the second checkpoint
    said = first.communicate()[1]
    assert [r["step"] for r in records(trained)] == [1], said
    second = watcher(trained, "--cpus", "0", *wanted)
    assert second.wait() == 0, second.communicate()[1]  # the run is done: it ends by itself
    found = records(trained)
    assert [(r["kind"], r["step"], r["phase"]) for r in found] == [
        ("bits_per_byte", s, "phase1") for s in (1, 2, 4)
    ]
    rows = {r["step"]: r for r in map(json.loads, (trained / "metrics.jsonl").read_text().splitlines())}
    assert [r["tokens_total"] for r in found] == [rows[s]["tokens_total"] for s in (1, 2, 4)]
    assert len({record["bits_per_byte"] for record in found}) == 3, "three checkpoints, three models"
    third = watcher(trained, "--once", *wanted)
    assert third.wait() == 0
    assert records(trained) == found
    assert not list((trained / ".evals-watch").glob("*")), "finished work stayed behind"


def test_sigterm_ends_it_and_what_it_started(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text('[evals]\nevery_steps = 1\ncommands = ["decode_speed"]\n')
    process = watcher(run, priority={})
    while not (run / ".evals-watch.lock").exists() and process.poll() is None:
        time.sleep(0.02)
    assert process.poll() is None, "no checkpoint yet: it waits"
    with pytest.raises(ValueError, match="another watcher"), only_watcher(run):
        pass
    assert psutil.Process(process.pid).nice() == 19, "training comes first"
    process.send_signal(signal.SIGTERM)
    assert process.wait() == STOPPED


def test_a_command_that_a_killed_watcher_left_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It still writes its records to the same file, so the next watcher must not start the command beside it."""
    run = tmp_path / "run"
    save(run, 10)
    orphan = "import sys, time, pathlib; out = pathlib.Path(sys.argv[1]); time.sleep(1.5); out.write_text('orphan')"
    scratch = run / ".evals-watch"
    out = scratch / "step-10-0/records.jsonl"
    with hold_lock(out.with_suffix(".lock"), "held by us") as lock:
        process = subprocess.Popen([sys.executable, "-c", orphan, str(out)], pass_fds=[lock.fileno()])
    began = time.monotonic()
    job = job_of(run, commands=["decode_speed"])
    assert Played(job).watch(once=True, every_s=0) == 0
    assert time.monotonic() - began > 1.0
    assert process.wait() == 0
    assert evaluated(run) == [("decode_speed", 10)], "not what the orphan wrote"


def test_a_command_holds_the_lock_of_its_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holds = "import os, sys; fds = [f'/proc/self/fd/{n}' for n in os.listdir('/proc/self/fd')]\n"
    holds += "sys.exit(sys.argv[1] not in [os.path.realpath(fd) for fd in fds])"
    (tmp_path / "holds.py").write_text(holds)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    path = tmp_path / "x.lock"
    with hold_lock(path, "held by us") as lock:
        assert Watcher(job_of(tmp_path / "run")).call(1, ["holds", str(path)], lock) == 0


# choices, without processes

COMMANDS = ["decode_speed", "bits_per_byte --data x"]


def job_of(run: Path, **section: Any) -> JobSections:
    evals = Evals(**{"every_steps": 10, "commands": COMMANDS, **section})
    return JobSections(Job(str(run)), Training(steps=35), Checkpoint(), evals=evals)


def save(run: Path, step: int) -> Path:
    folder = run / f"checkpoint/step-{step}"
    dcp.save({"w": torch.zeros(4)}, checkpoint_id=folder, no_dist=True)
    return folder


class Played(Watcher):
    """Exports and commands are played: `broken` modules fail, the others write a record."""

    broken: tuple[str, ...] = ()

    def call(self, of: int, words: list[str], *locks: Any) -> int:
        if words[0] in self.broken:
            return 1
        if words[0] != "laneformer.hf.export":
            step, out = (words[words.index(name) + 1] for name in ("--step", "--out"))
            Path(out).write_text(json.dumps({"kind": words[0], "step": int(step)}) + "\n")
        return 0


def evaluated(run: Path) -> list[tuple[str, int]]:
    return [(r["kind"].removeprefix("evals."), r["step"]) for r in records(run)]


def test_wanted_steps_in_order_the_last_one_too(tmp_path: Path) -> None:
    for step in (1, 5, 10, 20, 35):
        save(tmp_path, step)
    damaged = save(tmp_path, 30)
    next(damaged.glob("*.distcp")).unlink()
    assert Played(job_of(tmp_path, commands=COMMANDS[:1])).watch(once=True, every_s=0) == 0
    assert evaluated(tmp_path) == [("decode_speed", step) for step in (1, 10, 20, 35)]
    late = tmp_path / "late"
    shutil.copytree(tmp_path / "checkpoint", late / "checkpoint")
    Played(job_of(late, commands=COMMANDS[:1], newest_first=True)).watch(once=True, every_s=0)
    assert evaluated(late) == [("decode_speed", step) for step in (35, 20, 10, 1)]


def test_a_failure_is_said_and_left_for_the_next_start(tmp_path: Path) -> None:
    save(tmp_path, 10)
    first = Played(job_of(tmp_path))
    first.broken = ("evals.decode_speed",)
    assert first.watch(once=True, every_s=0) == 1
    assert evaluated(tmp_path) == [("bits_per_byte", 10)]
    assert "decode_speed: exit status 1" in (tmp_path / "events.jsonl").read_text()
    assert Played(job_of(tmp_path)).watch(once=True, every_s=0) == 0
    assert evaluated(tmp_path) == [("bits_per_byte", 10), ("decode_speed", 10)]


def test_a_full_disk_does_not_end_the_watcher(tmp_path: Path) -> None:
    class Full(Played):
        def call(self, step: int, words: list[str], *locks: Any) -> int:
            if step == 10:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().call(step, words, *locks)

    for step in (10, 20):
        save(tmp_path, step)
    job = job_of(tmp_path, commands=COMMANDS[:1])
    assert Full(job).watch(once=True, every_s=0) == 1
    assert evaluated(tmp_path) == [("decode_speed", 20)]
    assert "No space left" in (tmp_path / "events.jsonl").read_text()
    assert Played(job).watch(once=True, every_s=0) == 0
    assert evaluated(tmp_path) == [("decode_speed", 20), ("decode_speed", 10)]


class Interrupted(Played):
    """Commands do half of their work, die `deaths` times, and go on from there; then the run is done."""

    deaths, runs = 2, 0

    def call(self, step: int, words: list[str], *locks: Any) -> int:
        if words[0] == "laneformer.hf.export":
            return 0
        half = Path(words[words.index("--out") + 1]).with_name("half")
        assert half.exists() == (self.runs > 0), "what was done is lost"
        half.touch()
        self.runs += 1
        if self.runs <= self.deaths:
            return -signal.SIGKILL
        write_outcome(self.run, 1, DONE, 35, "done")
        return super().call(step, words, *locks)


def test_a_command_that_dies_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evals.watch.RETRY_AFTER_S", (0.0, 0.01))
    save(tmp_path, 10)
    watching = Interrupted(job_of(tmp_path, commands=COMMANDS[:1]))
    assert watching.watch(once=False, every_s=0.01) == 0
    assert (watching.runs, evaluated(tmp_path)) == (3, [("decode_speed", 10)])
    assert not (tmp_path / ".evals-watch").exists()


def test_a_command_is_given_up_after_its_retries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evals.watch.RETRY_AFTER_S", (0.0, 0.0))
    folder = save(tmp_path, 10)
    watching = Interrupted(job_of(tmp_path, commands=COMMANDS[:1]))
    watching.deaths = 99
    while work := watching.next_work():
        watching.evaluate(work)
    assert watching.runs == 3
    assert (tmp_path / ".evals-watch/step-10-0/half").exists(), "for the next start"
    shutil.rmtree(folder)
    watching.next_work()
    assert not (tmp_path / ".evals-watch/step-10-0").exists(), "its checkpoint is gone"


@pytest.mark.parametrize("raises", [True, False], ids=["a write", "a command"])
def test_an_evaluation_waits_for_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raises: bool) -> None:
    class Full(Interrupted):
        def call(self, step: int, words: list[str], *locks: Any) -> int:
            if self.runs or waited:
                return super().call(step, words, *locks)
            if raises:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return int(words[0] != "laneformer.hf.export")

    usage, waited = shutil.disk_usage(tmp_path), list[float]()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
    monkeypatch.setattr(time, "sleep", waited.append)
    save(tmp_path, 10)
    watching = Full(job_of(tmp_path, commands=COMMANDS[:1]))
    watching.deaths = 0
    assert watching.watch(once=False, every_s=0.01) == 0
    assert (waited, evaluated(tmp_path)) == ([60.0], [("decode_speed", 10)])
    assert not (tmp_path / "events.jsonl").exists(), "nothing has failed"


def test_a_step_that_was_trained_again_is_evaluated_again(tmp_path: Path) -> None:
    folder = save(tmp_path, 10)
    job = job_of(tmp_path, commands=COMMANDS[:1])
    Played(job).watch(once=True, every_s=0)
    os.utime(folder / ".metadata", (2e9, 2e9))
    for _ in range(2):
        Played(job).watch(once=True, every_s=0)
    assert evaluated(tmp_path) == [("decode_speed", 10)] * 2


def test_a_checkpoint_deleted_meanwhile_is_skipped_and_said(tmp_path: Path) -> None:
    class Deleting(Played):
        def call(self, step: int, words: list[str], *locks: TextIO) -> int:
            for path in (tmp_path / "checkpoint").glob("step-*"):
                if path.name != "step-35":
                    shutil.rmtree(path)
            return int(step != 35) or super().call(step, words, *locks)

    for step in (10, 20, 35):
        save(tmp_path, step)
    assert Deleting(job_of(tmp_path, commands=COMMANDS[:1])).watch(once=True, every_s=0) == 0
    assert evaluated(tmp_path) == [("decode_speed", 35)]
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(e["kind"], e["step"]) for e in events] == [
        ("evaluation_skipped", 10),
        ("evaluation_skipped", 20),
    ]


def test_half_a_record_left_by_a_crash_counts_as_none(tmp_path: Path) -> None:
    save(tmp_path, 10)
    (tmp_path / "evals.jsonl").write_text('{"kind": "decode_speed", "step": 10, "comm')
    Played(job_of(tmp_path, commands=COMMANDS[:1])).watch(once=True, every_s=0)
    assert (tmp_path / "evals.jsonl").read_text().splitlines()[1:] == [json.dumps(records_tail(tmp_path))]


def records_tail(run: Path) -> dict[str, Any]:
    return json.loads((run / "evals.jsonl").read_text().splitlines()[-1])
