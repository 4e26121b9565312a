"""Evaluates the checkpoints of a run while it trains, in a process that the job does not depend on.

    python -m evals.watch --job.config_file configs/phase1.toml [--cpus 28-31] [--gpu 7] [--section.key value ...]
    python -m evals.watch --run runs/phase1 --once        (evaluate what is there, then exit)

Every complete checkpoint that `[evals]` selects is exported as a Hugging Face folder, on which each of its
commands runs. The records in RUN/evals.jsonl are the only state: a restarted watcher continues where they end, and
wandb and TensorBoard get the same figures if `[metrics]` enables them. A command that fails keeps its finished work
and is tried again after growing pauses while the run trains, but not once it is done.

Exit status: 0 once the run is done and everything is evaluated; 1 if an evaluation failed (its log is in
RUN/logs/evals, the next start retries it) or `[evals]` cannot run; 85 when asked to stop.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import tyro
from rich.console import Console

from evals.commands import check, read_command
from evals.trackers import Trackers
from records.checkpoints import check_complete, step_folders
from records.command import Positive, check_ranges
from records.evals import About, is_selected
from records.events import DONE, STOPPED, read_outcome, record_event
from records.files import append_line, hold_lock, read_lines
from records.items import FOLDER as ITEMS
from records.job import JobSections, read_job
from records.workers import usable_cpus

SCRATCH = ".evals-watch"
# of a command's failures; after one more it is left to the next start
RETRY_AFTER_S = (60.0, 600.0, 3600.0)
console = Console(stderr=True, highlight=False, soft_wrap=True)


@dataclass
class Options:
    run: Path | None = None
    """run folder whose config.toml is read instead of --job.config_file"""
    once: tyro.conf.FlagCreatePairsOff[bool] = False
    """evaluate the existing checkpoints, then exit"""
    every_s: Positive = 30.0
    """seconds between two looks for checkpoints"""
    cpus: str | None = None
    """cores to run on, such as 28-31; default: the inherited ones"""
    gpu: str | None = None
    """GPU to run on, as in CUDA_VISIBLE_DEVICES"""


@dataclass(frozen=True)
class Work:
    """A complete checkpoint, and the commands that have no record of it."""

    step: int
    checkpoint: Path
    saved: float  # seconds since the epoch
    commands: tuple[str, ...]


class Watcher:
    """The evaluations of one run."""

    def __init__(self, job: JobSections):
        self.job = job
        self.run = job.run
        self.records = self.run / "evals.jsonl"
        self.trackers = Trackers(job, self.say)
        # times of time.monotonic() by (step, saved, command)
        self.failed: dict[tuple[int, float, str], list[float]] = {}
        self.once = False
        # steps that had missing records at the last look
        self.waiting: set[int] = set()

    def watch(self, once: bool, every_s: float) -> int:
        """Evaluate until the run is done, or with `once` what is there; return the exit status."""
        self.once = once
        while True:
            # before looking for work, so that the last checkpoint is not missed
            outcome = read_outcome(self.run)
            over = once or (outcome is not None and outcome["code"] == DONE)
            self.trackers.give(read_lines(self.records))
            work = self.next_work()
            if work:
                try:
                    self.evaluate(work)
                except OSError as problem:
                    # a full disk; later checkpoints are evaluated all the same
                    self.fail(work, work.commands, str(problem))
            elif over:
                return 1 if self.failed else 0
            else:
                time.sleep(every_s)

    def next_work(self) -> Work | None:
        """Return the next complete checkpoint with missing records.

        Delete the work folders that no missing record needs, and record the checkpoints that were
        deleted before their turn.
        """
        evaluated = self.read_times()
        waiting = []
        unfinished = set[str]()
        for step, folder in step_folders(self.job.checkpoints).items():
            # the folder may not be complete yet, or is being deleted
            with contextlib.suppress(OSError):
                saved = (folder / ".metadata").stat().st_mtime
                commands = [
                    c for c in self.job.evals.commands if evaluated.get((step, c), 0.0) < saved
                ]
                unfinished |= {self.work_folder(step, command).name for command in commands}
                missing = tuple(
                    command for command in commands if self.may_retry((step, saved, command))
                )
                if missing and is_selected(
                    step, self.job.evals.every_steps, self.job.training.steps
                ):
                    waiting.append(Work(step, folder, saved, missing))
        for folder in (self.run / SCRATCH).glob("step-*-*"):
            if folder.name not in unfinished:
                # its records, or its checkpoint's end, came in between
                shutil.rmtree(folder, ignore_errors=True)
        self.record_deleted({work.step for work in waiting})
        for work in waiting if self.job.evals.newest_first else reversed(waiting):
            with contextlib.suppress(ValueError):
                check_complete(work.checkpoint)
                return work
        return None

    def record_deleted(self, waiting: set[int]) -> None:
        """Record the steps that waited at the last look and whose checkpoints are gone."""
        for step in sorted(self.waiting - waiting):
            if not (self.job.checkpoints / f"step-{step}").is_dir():
                self.say(
                    f"step {step} was deleted before it was evaluated; see resilience.keep_every_steps"
                )
                reason = "the checkpoint was deleted meanwhile"
                record_event(self.run, "evaluation_skipped", step=step, reason=reason)
        self.waiting = waiting

    def may_retry(self, task: tuple[int, float, str]) -> bool:
        """Tell whether to run a command without a record now: it has not failed, or its pause is over."""
        failures = self.failed.get(task)
        if not failures:
            return True
        if self.once or len(failures) > len(RETRY_AFTER_S):
            return False
        return time.monotonic() >= failures[-1] + RETRY_AFTER_S[len(failures) - 1]

    def work_folder(self, step: int, command: str) -> Path:
        """Return where a command writes its records, and what it has finished until then."""
        return self.run / SCRATCH / f"step-{step}-{self.job.evals.commands.index(command)}"

    def read_times(self) -> dict[tuple[int, str], float]:
        """Return when the newest evaluated checkpoint of (step, command) was saved, in seconds since the epoch."""
        times: dict[tuple[int, str], float] = {}
        for record in read_lines(self.records):
            if "command" in record and record.get("step") is not None:
                key = (record["step"], record["command"])
                times[key] = max(times.get(key, 0.0), record["checkpoint_time"])
        return times

    def evaluate(self, work: Work) -> None:
        begun = time.monotonic()
        with open_scratch(self.run) as scratch:
            # by process: the export of a watcher that was killed may still be running
            hf = scratch / f"{os.getpid()}/hf"
            export = [
                "laneformer.hf.export",
                "--checkpoint",
                str(work.checkpoint),
                "--out",
                str(hf),
            ]
            if self.call(work.step, [*export, "--dtype", self.job.evals.dtype]):
                if work.checkpoint.is_dir():
                    self.fail(work, work.commands, "the export failed")
                # deleted meanwhile: the next look reports it
                return
            for command in work.commands:
                folder = self.work_folder(work.step, command)
                out = folder / "records.jsonl"
                module, kind, options = read_command(command)
                about = About(out, work.step, *self.progress(work.step))
                words = [module, *kind.arguments(hf, options, about, self.job.evals.device)]
                folder.mkdir(exist_ok=True)
                # the command holds the lock, too: what a killed watcher has started is waited for
                with hold_lock(out.with_suffix(".lock"), "", wait_s=math.inf) as lock:
                    # left by a watcher that was killed before it appended the records
                    out.unlink(missing_ok=True)
                    status = self.call(work.step, words, lock)
                records = read_lines(out)
                if status or not records:
                    self.fail(work, (command,), f"exit status {status}, {len(records)} records")
                    continue
                move_items(folder / ITEMS, self.run / ITEMS)
                marks = {"command": command, "checkpoint_time": work.saved}
                append_line(
                    self.records, "\n".join(json.dumps(record | marks) for record in records)
                )
                self.say(f"step {work.step}: {command}")
                self.failed.pop((work.step, work.saved, command), None)
                shutil.rmtree(folder, ignore_errors=True)
        self.say(f"step {work.step} took {time.monotonic() - begun:.1f} s")

    def progress(self, step: int) -> tuple[int | None, str | None]:
        """Return (tokens_total, phase) at a step, from the nearest logged step; None before the first one."""
        rows = [
            row
            for row in read_lines(self.run / "metrics.jsonl")
            if row.get("step") and "tokens" in row
        ]
        if not rows:
            return None, None
        row = min(reversed(rows), key=lambda row: abs(row["step"] - step))
        # tokens of earlier phases
        before = row.get("tokens_total", row["tokens"]) - row["tokens"]
        return before + row["tokens"] // row["step"] * step, row["phase"]

    def call(self, step: int, words: list[str], *locks: TextIO) -> int:
        """Run `python -m WORDS`, output to the step's log; return its exit status."""
        log = self.run / f"logs/evals/step-{step}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "a", encoding="utf-8") as file:
            file.write(f"$ python -m {shlex.join(words)}\n")
            file.flush()
            process = subprocess.Popen(
                [sys.executable, "-m", *words],
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[lock.fileno() for lock in locks],
            )
            # it is killed with the watcher
            try:
                return process.wait()
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()

    def fail(self, work: Work, commands: tuple[str, ...], reason: str) -> None:
        log = self.run / f"logs/evals/step-{work.step}.log"
        for command in commands:
            self.failed.setdefault((work.step, work.saved, command), []).append(time.monotonic())
            self.say(f"step {work.step}: {command} FAILED: {reason}, see {log}")
            record_event(
                self.run, "evaluation_failed", step=work.step, reason=f"{command}: {reason}"
            )

    def say(self, text: str) -> None:
        console.print(f"{time.strftime('%H:%M:%S')}  {text}", markup=False)


@contextlib.contextmanager
def open_scratch(run: Path) -> Iterator[Path]:
    """Make RUN/.evals-watch; delete the exported model at the end of the block."""
    folder = run / SCRATCH
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    finally:
        # what a command has finished stays: it continues there after a failure
        for models in folder.glob("[0-9]*"):
            shutil.rmtree(models, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.rmdir()


def move_items(written: Path, items: Path) -> None:
    """Move the files and folders that records name, before the records are appended."""
    for path in written.glob("*"):
        items.mkdir(exist_ok=True)
        # a checkpoint that is evaluated again replaces its results
        if (items / path.name).is_dir():
            shutil.rmtree(items / path.name)
        shutil.move(path, items / path.name)


def lock_evaluations(run: Path) -> TextIO:
    """Lock a run's evaluations; ValueError if another watcher holds it."""
    return hold_lock(run / f"{SCRATCH}.lock", f"another watcher evaluates {run}; stop it first")


def yield_to_training(cpus: str | None, gpu: str | None) -> None:
    """Take the lowest priority, and only the given cores and GPU, for this process and what it starts."""
    os.nice(19)
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    if cpus is not None:
        os.sched_setaffinity(0, parse_cores(cpus))
        os.environ["OMP_NUM_THREADS"] = str(usable_cpus())


def parse_cores(cpus: str) -> set[int]:
    """Return the cores of a list such as 28-31 or 2,3; ValueError unless this process may use them all."""
    allowed = os.sched_getaffinity(0)
    chosen = set[int]()
    for part in cpus.split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            raise ValueError(f"--cpus {cpus!r} is not a list of cores, such as 28-31 or 2,3")
        low = int(first)
        high = int(last or first)
        if low > high or not {low, high} <= allowed:
            raise ValueError(
                f"--cpus {cpus}: {part} must be ascending cores that this process may use, which are "
                f"{min(allowed)} to {max(allowed)}"
            )
        chosen |= {core for core in allowed if low <= core <= high}
    return chosen


def main() -> int:
    """Watch one run; returns the exit status. All flags but the watcher's own are the job's."""
    options, rest = tyro.cli(
        Options, prog="python -m evals.watch", description=__doc__, return_unknown_args=True
    )
    check_ranges(Options, vars(options))
    if options.run is not None:
        config = str(options.run / "config.toml")
        rest = ["--job.config_file", config, "--job.dump_folder", str(options.run), *rest]
    job = read_job(rest)
    yield_to_training(options.cpus, options.gpu)
    check(job, here=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(STOPPED))
    with lock_evaluations(job.run):
        return Watcher(job).watch(options.once, options.every_s)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, ValueError) as problem:
        raise SystemExit(f"evals.watch: {problem}") from None
