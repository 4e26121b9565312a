"""Tests of the evaluation watcher: its choices without processes, and real jobs."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from evals import watch
from evals.watch import Watcher, lock_evaluations
from records.events import DONE, STOPPED, write_outcome
from records.files import hold_lock, read_lines
from records.job import Checkpoint, Evals, Job, JobSections, Training
from tests.train.runs import ROOT
from tests.train.supervised import arguments, environment

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
COMMANDS = ["decode_speed", "bits_per_byte --data x"]
EXPORT = "laneformer.hf.export"


def job_of(run: Path, **section) -> JobSections:
    evals = Evals(**{"every_steps": 10, "commands": COMMANDS, **section})
    return JobSections(Job(str(run)), Training(steps=35), Checkpoint(), evals=evals)


def save(run: Path, step: int) -> Path:
    folder = run / f"checkpoint/step-{step}"
    dcp.save({"w": torch.zeros(4)}, checkpoint_id=folder, no_dist=True)
    return folder


class FakeWatcher(Watcher):
    """Watcher whose exports do nothing and whose commands write a record.

    first: called before each command, as (watcher, step, words); a returned status ends it there.
    """

    def __init__(self, run, first=lambda *_: None, **section):
        super().__init__(job_of(run, **{"commands": COMMANDS[:1], **section}))
        self.first = first

    def call(self, step, words, *locks):
        if (status := self.first(self, step, words)) is not None:
            return status
        if words[0] != EXPORT:
            of, out = (words[words.index(name) + 1] for name in ("--step", "--out"))
            Path(out).write_text(json.dumps({"kind": words[0], "step": int(of)}) + "\n")
        return 0

    def look_once(self):
        return self.watch(once=True, every_s=0)


def read_evaluated(run: Path) -> list[tuple[str, int]]:
    records = read_lines(run / "evals.jsonl")
    return [(record["kind"].removeprefix("evals."), record["step"]) for record in records]


def speed_at(*steps: int) -> list[tuple[str, int]]:
    return [("decode_speed", step) for step in steps]


def test_wanted_steps_in_order_the_last_one_too(tmp_path, monkeypatch):
    for step in (1, 5, 10, 20, 35):
        save(tmp_path, step)
    damaged = save(tmp_path, 30)
    # .metadata is there, a data file is not: incomplete
    next(damaged.glob("*.distcp")).unlink()
    watcher = FakeWatcher(tmp_path)
    record_counts = []
    monkeypatch.setattr(
        watcher.trackers, "give", lambda records: record_counts.append(len(records))
    )
    assert watcher.look_once() == 0
    assert read_evaluated(tmp_path) == speed_at(1, 10, 20, 35)
    # trackers get each record when it is there
    assert record_counts == [0, 1, 2, 3, 4]
    late = tmp_path / "late"
    shutil.copytree(tmp_path / "checkpoint", late / "checkpoint")
    FakeWatcher(late, newest_first=True).look_once()
    assert read_evaluated(late) == speed_at(35, 20, 10, 1)


def raise_full_disk():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("reason", ["decode_speed: exit status 1", "No space left"])
def test_a_failure_is_reported_and_left_for_the_next_start(tmp_path, reason):
    def break_step_10(watcher, step, words):
        if step != 10:
            return None
        return int(words[0] != EXPORT) if "exit" in reason else raise_full_disk()

    for step in (10, 20):
        save(tmp_path, step)
    assert FakeWatcher(tmp_path, break_step_10).look_once() == 1
    # later checkpoints are evaluated all the same
    assert read_evaluated(tmp_path) == speed_at(20)
    assert reason in (tmp_path / "events.jsonl").read_text()
    assert FakeWatcher(tmp_path).look_once() == 0
    assert read_evaluated(tmp_path) == speed_at(20, 10)


class DyingCommand:
    """Commands that do half of their work, die `deaths` times and resume; then the run is done."""

    def __init__(self, deaths):
        self.deaths = deaths
        self.runs = 0

    def __call__(self, watcher, step, words):
        if words[0] == EXPORT:
            return 0
        half = Path(words[words.index("--out") + 1]).with_name("half")
        # what was done is lost
        assert half.exists() == (self.runs > 0)
        half.touch()
        self.runs += 1
        if self.runs <= self.deaths:
            return -signal.SIGKILL
        write_outcome(watcher.run, 1, DONE, 35, "done")
        return None


def test_a_command_that_dies_goes_on_where_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "RETRY_AFTER_S", (0.0, 0.01))
    save(tmp_path, 10)
    dying = DyingCommand(2)
    assert FakeWatcher(tmp_path, dying).watch(once=False, every_s=0.01) == 0
    assert (dying.runs, read_evaluated(tmp_path)) == (3, speed_at(10))
    assert not (tmp_path / ".evals-watch").exists()


def test_a_command_is_given_up_after_its_retries(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "RETRY_AFTER_S", (0.0, 0.0))
    folder = save(tmp_path, 10)
    dying = DyingCommand(99)
    watcher = FakeWatcher(tmp_path, dying)
    while work := watcher.next_work():
        watcher.evaluate(work)
    assert dying.runs == 3
    # for the next start
    assert (tmp_path / ".evals-watch/step-10-0/half").exists()
    shutil.rmtree(folder)
    watcher.next_work()
    # its checkpoint is gone
    assert not (tmp_path / ".evals-watch/step-10-0").exists()


def test_a_step_that_was_trained_again_is_evaluated_again(tmp_path):
    folder = save(tmp_path, 10)
    FakeWatcher(tmp_path).look_once()
    # saved again later: the record of the first save does not count
    os.utime(folder / ".metadata", (2e9, 2e9))
    for _ in range(2):
        FakeWatcher(tmp_path).look_once()
    assert read_evaluated(tmp_path) == speed_at(10, 10)


def test_a_checkpoint_deleted_meanwhile_is_skipped_and_reported(tmp_path):
    def delete_all_but_the_last(watcher, step, words):
        for path in (tmp_path / "checkpoint").glob("step-*"):
            if path.name != "step-35":
                shutil.rmtree(path)
        return None if step == 35 else 1

    for step in (10, 20, 35):
        save(tmp_path, step)
    assert FakeWatcher(tmp_path, delete_all_but_the_last).look_once() == 0
    assert read_evaluated(tmp_path) == speed_at(35)
    events = [(event["kind"], event["step"]) for event in read_lines(tmp_path / "events.jsonl")]
    assert events == [("evaluation_skipped", 10), ("evaluation_skipped", 20)]


def test_a_command_that_a_killed_watcher_left_is_waited_for(tmp_path):
    # it still writes to the same file, so the next watcher must not start the command beside it
    save(tmp_path, 10)
    out = tmp_path / ".evals-watch/step-10-0/records.jsonl"
    orphan = "import sys, pathlib; sys.stdin.read(); pathlib.Path(sys.argv[1]).write_text('orphan')"
    command = [sys.executable, "-c", orphan, str(out)]
    ended = []
    with hold_lock(out.with_suffix(".lock"), "held by us") as lock:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[lock.fileno()])

    def end_orphan(watcher, step, words):
        if words[0] == EXPORT:
            assert process.stdin is not None
            process.stdin.close()
        else:
            ended.append(process.wait() == 0)
            # not what the orphan wrote
            assert not out.exists()

    assert FakeWatcher(tmp_path, end_orphan).look_once() == 0
    assert (ended, read_evaluated(tmp_path)) == ([True], speed_at(10))


def test_a_command_holds_the_lock_of_its_records(tmp_path, monkeypatch):
    holds = "import os, sys; fds = [f'/proc/self/fd/{n}' for n in os.listdir('/proc/self/fd')]\n"
    holds += "sys.exit(sys.argv[1] not in [os.path.realpath(fd) for fd in fds])"
    (tmp_path / "holds.py").write_text(holds)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    path = tmp_path / "x.lock"
    with hold_lock(path, "held by us") as lock:
        assert Watcher(job_of(tmp_path / "run")).call(1, ["holds", str(path)], lock) == 0


def test_sigterm_ends_it_and_what_it_started(tmp_path, monkeypatch):
    # at the lowest priority: training comes first
    handlers = {}
    nice = []
    processes = []
    start = subprocess.Popen

    def get_terminated(process):
        monkeypatch.undo()
        processes.append(process)
        with pytest.raises(ValueError, match="another watcher"), lock_evaluations(tmp_path):
            pass
        return handlers[signal.SIGTERM]()

    monkeypatch.setattr(os, "nice", nice.append)
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(subprocess.Popen, "wait", get_terminated)
    monkeypatch.setattr(
        subprocess, "Popen", lambda _, **options: start(["sleep", "600"], **options)
    )
    monkeypatch.setattr(sys, "argv", ["x", "--run", str(tmp_path)])
    (tmp_path / "config.toml").write_text('[evals]\nevery_steps = 1\ncommands = ["decode_speed"]\n')
    save(tmp_path, 1)
    with pytest.raises(SystemExit) as ended:
        watch.main()
    assert (ended.value.code, nice, processes[0].returncode) == (STOPPED, [19], -signal.SIGKILL)


def test_cores_and_a_gpu_of_its_own(monkeypatch):
    chosen = []
    monkeypatch.setattr(os, "nice", lambda by: by)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {*range(32)})
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cores: chosen.append(cores))
    for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")
    watch.yield_to_training(cpus="2,28-30", gpu="7")
    assert (chosen, os.environ["CUDA_VISIBLE_DEVICES"]) == ([{2, 28, 29, 30}], "7")
    for cpus, reason in (
        ("2-x", "'2-x' is not a list of cores"),
        ("", "'' is not a list of cores"),
        ("2,30-999999999999", "2,30-999999999999: 30-9.* which are 0 to 31"),
        ("3-1", "3-1: 3-1 must be ascending"),
    ):
        with pytest.raises(ValueError, match=f"--cpus {reason}"):
            watch.yield_to_training(cpus, None)
    monkeypatch.setattr(sys, "argv", ["x", "--every-s", "0"])
    with pytest.raises(ValueError, match=r"--every-s 0\.0: it should be greater"):
        watch.main()


@pytest.mark.rotate
def test_a_job_evaluates_its_own_checkpoints_and_a_killed_watcher_goes_on(data_folder, tmp_path):
    # watchers at the tests' own priority: at the lowest they would wait for all other tests
    (tmp_path / "sitecustomize.py").write_text("import os\nos.nice = lambda by: 0\n")
    env = environment() | {"PYTHONPATH": str(tmp_path)}
    command = f"bits_per_byte --data {data_folder} --limit 2"
    run = tmp_path / "run"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    job = ["-m", "train", *arguments(run, data_folder / "phase1.lock.json", 4, 2)]
    job += ["--validation.no-enable", "--resilience.hang_timeout_s", "300"]
    job += [
        "--checkpoint.enable_first_step_checkpoint",
        "--evals.in_loop",
        "--evals.every_steps",
        "4",
    ]
    job += [
        "--evals.dtype",
        "float32",
        "--evals.commands",
        f"{command},decode_speed --device nowhere",
    ]
    process = subprocess.run(
        [*launch, *job], cwd=ROOT, env=env, capture_output=True, text=True, timeout=1100
    )
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    # once, not on each rank; and a command that fails is reported and ends nothing
    out = run / "evals.jsonl"
    assert [(record["command"], record["step"]) for record in read_lines(out)] == [
        (command, 1),
        (command, 4),
    ]
    events = read_lines(run / "events.jsonl")
    failed = [event for event in events if event["kind"] == "evaluation_failed"]
    # step 1 again beside step 4
    assert [event["step"] for event in failed] == [1, 1, 1, 4, 4]
    # what the job says of its watcher
    assert failed[1]["reason"].startswith("exit status 1, see")

    watching = [
        sys.executable,
        "-m",
        "evals.watch",
        "--run",
        str(run),
        "--every-s",
        "0.2",
        "--cpus",
        "0",
    ]
    watching += ["--evals.every_steps", "2", "--evals.commands", command]
    out.unlink()
    first = subprocess.Popen(watching, cwd=ROOT, env=env)
    while not read_lines(out) and first.poll() is None:
        time.sleep(0.02)
    # the kill falls into the export of the second checkpoint
    first.kill()
    first.wait()
    assert [record["step"] for record in read_lines(out)] == [1]
    # the run is done, so the watcher ends by itself
    subprocess.run(watching, cwd=ROOT, env=env, check=True)
    records = read_lines(out)
    rows = {row["step"]: row["tokens_total"] for row in read_lines(run / "metrics.jsonl")}
    expected = [(step, "phase1", rows[step]) for step in (1, 2, 4)]
    assert [(r["step"], r["phase"], r["tokens_total"]) for r in records] == expected
    # three checkpoints, three models
    assert len({record["bits_per_byte"] for record in records}) == 3
    # finished work stayed behind
    assert not list((run / ".evals-watch").glob("*"))
