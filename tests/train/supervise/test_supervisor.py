"""Tests of the restart loop's decisions, with workers that only leave an outcome."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from records.events import BAD_STEP, CRASHED, DONE, REFUSED, STOPPED, STOPPED_UNSAVED
from records.files import read_lines
from records.job import JobSections, read_job
from tests.train.runs import ROOT
from train.supervise import __main__ as command
from train.supervise.attempt import Attempt, Ended
from train.supervise.supervisor import Options, Supervisor

# code, step, reason, step of the checkpoint that it saves; or why it cannot be started
Life = tuple[int, int, str, int | None] | OSError


@pytest.fixture
def supervise(job, monkeypatch):
    # returns (exit status, number of attempts)
    job.resilience.backoff_s = 0.0
    job.checkpoints.mkdir()

    def run(*lives, nodes=None, spares=0):
        begun: list[Life] = []

        def start_workers(*arguments):
            life = lives[len(begun)]
            begun.append(life)
            if isinstance(life, OSError):
                raise life
            code, step, reason, saved = life
            outcome = {"attempt": len(begun), "code": code, "step": step, "reason": reason}
            if reason:
                (job.run / "outcome.json").write_text(json.dumps(outcome))
            if saved is not None:
                (job.checkpoints / f"step-{saved}").mkdir()
                (job.checkpoints / f"step-{saved}/.metadata").touch()
            return subprocess.Popen(["sh", "-c", f"exit {code}"])

        monkeypatch.setattr("train.supervise.attempt.start_workers", start_workers)
        monkeypatch.setattr("train.supervise.attempt.POLL_S", 0.01)
        monkeypatch.setattr("train.supervise.signals.StopSignals.install", lambda self: None)
        return Supervisor(job, Options(2, nodes, spares), []).run(), len(begun)

    return run


CRASH: Life = (CRASHED, 7, "RuntimeError: x", None)
STOP: Life = (STOPPED, 3, "SIGUSR1", None)
END: Life = (DONE, 20, "end", 20)
BAD: Life = (BAD_STEP, 12, "the loss is nan", 10)
FULL = OSError(28, "No space left on device", "logs/console.log")
ALTERNATING: list[Life] = [
    (CRASHED, n, "RuntimeError: x" if n % 3 else "OSError: y", n) for n in range(1, 6)
]
LIMIT: list[Life] = [
    (CRASHED, n, f"RuntimeError: limit at step {n}, /tmp/x{n} 0x7f{n}a", n)
    for n in (500, 1000, 1500)
]


@pytest.mark.parametrize(
    ("lives", "code", "output"),
    [
        ([(CRASHED, 7, "", 5), (CRASHED, 12, "RuntimeError: x", 10), END], DONE, ""),
        ([STOP, STOP, STOP, STOP, END], DONE, ""),
        ([(CRASHED, 0, "a.bin is missing", None), END], DONE, ""),
        ([(CRASHED, 7, "", 5), CRASH, CRASH, CRASH], CRASHED, "without a newer checkpoint"),
        ([(REFUSED, 0, "mixture.lock is empty", None)], CRASHED, "mixture.lock is empty"),
        ([FULL, FULL, FULL], CRASHED, "No space left on device"),
        ([*ALTERNATING, END], DONE, ""),
        (
            LIMIT,
            CRASHED,
            "3 attempts in a row ended for the same reason, last at step 1500: RuntimeError: limit",
        ),
    ],
    ids=[
        "crashes",
        "stopped workers are no failure",
        "a missing file",
        "no progress",
        "refused settings",
        "a full disk below its log",
        "other reasons between",
        "as at every validation, whatever the progress",
    ],
)
def test_what_is_started_again_and_what_is_not(supervise, job, lives, code, output):
    assert supervise(*lives, *3 * [END] * (code != DONE)) == (code, len(lives))
    assert output in read_lines(job.run / "events.jsonl")[-1]["text"]


def test_a_full_disk_below_its_log_does_not_end_the_supervisor(supervise, monkeypatch):
    with open("/dev/full", "w", buffering=1) as log:
        monkeypatch.setattr("train.supervise.supervisor.console", Console(file=log))
        assert supervise((CRASHED, 7, "", 5), END) == (DONE, 2)
        with suppress(OSError):
            log.close()


def test_long_attempts_for_the_same_reason_do_not_end_it(supervise, job):
    # every attempt is a long one
    job.resilience.same_reason_hours = 0.0
    assert supervise(*LIMIT, END) == (DONE, 4)


@pytest.mark.parametrize(
    ("code", "status"),
    [(CRASHED, STOPPED_UNSAVED), (STOPPED_UNSAVED, STOPPED_UNSAVED), (STOPPED, STOPPED)],
)
def test_a_stop_that_saved_nothing_is_no_85(supervise, monkeypatch, code, status):
    def run_attempt(self, checkpoint_step):
        self.stop.request = "SIGTERM"
        return Ended(code, 7, "asked meanwhile")

    monkeypatch.setattr(Supervisor, "run_attempt", run_attempt)
    assert supervise() == (status, 0)


@pytest.mark.parametrize(
    ("policy", "starts"), [("stop", 1), ("rollback", 2), ("rollback_and_skip", 2), ("skip", 2)]
)
def test_policies_after_a_refused_step(supervise, job, policy, starts):
    job.resilience.on_bad_step = policy
    assert supervise(BAD, END) == (BAD_STEP if policy == "stop" else DONE, starts)


@pytest.fixture
def healthy(monkeypatch):
    # pre-flight's answers: bad nodes, and the exchanges' problems, in turn
    answers = SimpleNamespace(bad={}, problems=[])

    def find_exchange_problem(nodes, *_):
        problem = answers.problems.pop(0) if answers.problems else ""
        if isinstance(problem, Exception):
            raise problem
        return problem

    monkeypatch.setattr(
        "train.supervise.supervisor.check_nodes",
        lambda names, arguments: ([name for name in names if name not in answers.bad], answers.bad),
    )
    monkeypatch.setattr("train.supervise.supervisor.find_exchange_problem", find_exchange_problem)
    return answers


def test_a_bad_node_is_left_out_and_a_spare_takes_its_place(supervise, job, healthy):
    healthy.bad = {"b": "7 GPUs, not 8"}
    assert supervise(END, nodes="a,b,c", spares=1) == (DONE, 1)
    assert events(job, "bad_node", "node") == ["b"]
    assert events(job, "start", "nodes") == [["a", "c"]]
    # one node short, three times
    assert supervise(nodes="a,b", spares=0) == (CRASHED, 0)
    assert "last: 1 healthy nodes, 2 are needed" in events(job, "give_up", "text")[-1]


def events(job: JobSections, kind: str, key: str) -> list[Any]:
    return [
        e[key] for e in read_lines(job.run / "events.jsonl") if e["kind"] == f"supervisor_{kind}"
    ]


def test_nodes_that_do_not_connect_are_not_started(supervise, job, healthy):
    # A setting ends a run that never trained at once, with the sentence; one that did may see its
    # network again.
    problem = "gloo does not connect these nodes (a does not reach b); export GLOO_SOCKET_IFNAME"
    healthy.problems = [problem]
    assert supervise(nodes="a,b", spares=0) == (CRASHED, 0)
    output = f"the job cannot start: {problem}. Restarting would not change that"
    assert events(job, "give_up", "text") == [output]
    (job.checkpoints / "step-5").mkdir()
    (job.checkpoints / "step-5/.metadata").touch()
    healthy.problems = [problem, ""]
    assert supervise(END, nodes="a,b", spares=0) == (DONE, 1)
    assert healthy.problems == []
    healthy.problems = [ValueError("no result within 480 s")]
    # it may be the trial's fault
    assert supervise((DONE, 21, "end", 21), nodes="a,b", spares=0) == (DONE, 1)
    assert events(job, "network", "text")[-1] == "not tried: no result within 480 s"


def test_a_node_on_which_the_job_crashes_twice_is_chosen_last(supervise, job, healthy, monkeypatch):
    watch = Attempt.watch

    def failing_on_b(self):
        ended = watch(self)
        at_b = ended.code == CRASHED and self.nodes is not None and "b" in self.nodes
        return replace(ended, failed_node="b") if at_b else ended

    monkeypatch.setattr(Attempt, "watch", failing_on_b)
    lives: list[Life] = [(CRASHED, n, f"RuntimeError: {'x' * n}", n) for n in (1, 2, 3)]
    assert supervise(*lives, END, nodes="a,b,c", spares=1) == (DONE, 4)
    assert events(job, "start", "nodes") == [["a", "b"], ["a", "b"], ["a", "c"], ["a", "c"]]


def test_what_no_restart_could_do_is_refused():
    with pytest.raises(ValueError, match="at every restart"):
        read_job(["--job.config_file=configs/phase1.toml", "--checkpoint.load_step", "5"])


def test_the_supervisor_imports_no_torch():
    # It has to outlive a broken installation of the workers, and starts in a fraction of a second.
    program = "import sys, train.supervise.__main__; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


@pytest.mark.parametrize(
    ("flag", "gpus", "workers"), [([], 0, 1), ([], 8, 8), (["--nproc-per-node", "3"], 8, 3)]
)
def test_a_worker_for_each_gpu_unless_told_otherwise(tmp_path, monkeypatch, flag, gpus, workers):
    def supervisor(job, options, arguments):
        return SimpleNamespace(run=lambda: options.nproc_per_node)

    monkeypatch.setattr(command, "Supervisor", supervisor)
    monkeypatch.setattr(command, "refuse_impossible", lambda arguments: None)
    monkeypatch.setattr(command, "count_gpus", lambda: gpus)
    job = [
        "--job.config_file",
        str(ROOT / "configs/debug_phase1.toml"),
        "--job.dump_folder",
        str(tmp_path),
    ]
    monkeypatch.setattr(sys, "argv", ["supervise", *job, *flag])
    assert command.main() == workers
