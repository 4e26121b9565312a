"""Run the units of a stage that are not done: one after another here, or in parallel on datatrove's executors.

The executor lives in a child process with a process group of its own. It says nothing on the terminal (its logs are
in DIR/.logs/<stage>/), and it is watched from outside, because multiprocessing.Pool, on which it stands, loses the task
of a worker that the kernel kills and then waits for it for ever. Every worker writes down which unit it is at; when its
process is gone, the whole group is ended and the unit named. When this process is killed, the group ends itself.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import socket
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from data_mixtures import shards
from data_mixtures.stages.stage import Stage, Unit, do, is_done, read_receipt, remove_partial, unit_folder

KINDS = ("local", "slurm", "ray")
AGAIN = "start the same command again: it goes on with what is not finished"
POLL_S = 0.1
QUEUE_POLL_S = 3.0  # squeue is a load on the controller
IDLE_LOSS_S = 10.0  # a worker lost between two units may have held the lock of the pool's queue


@dataclass(frozen=True)
class Options:
    """Where units run. sbatch: options of that program by name, such as {"partition": "cpu", "time": "4:00:00"}."""

    workers: int = 1
    kind: str = "local"
    sbatch: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """What the child process is asked to run."""

    stage: Stage
    units: tuple[Unit, ...]
    logs: Path
    options: Options

    def name(self) -> str:
        """The same for every start of this stage in this folder, so that jobs of a killed start are found."""
        return f"data-{self.stage.name}-{shards.document_hash(str(self.stage.out.resolve())) % 16**8:08x}"


class Task:
    """A unit as datatrove calls it: rank -> unit.

    The job is packed once: datatrove pickles the pipeline for every unit, in Python, and prints dataclasses in full.
    """

    def __init__(self, job: Job) -> None:
        self.packed = pickle.dumps(job)

    def __call__(self, data: object, rank: int, world_size: int) -> None:
        job = _unpacked(self.packed)
        unit = job.units[rank]
        claim = job.logs / "workers" / f"{socket.gethostname()}:{os.getpid()}"
        claim.write_text(str(unit), encoding="utf-8")
        try:
            do(job.stage, unit)
        except BaseException as error:
            report = {"unit": str(unit), "user": _is_for_users(error), "message": str(error)}
            shards.write_json(job.logs / "failed" / f"{rank:05d}.json", {**report, "traceback": traceback.format_exc()})
            raise
        claim.write_text("", encoding="utf-8")


@functools.lru_cache(maxsize=1)
def _unpacked(packed: bytes) -> Job:
    return pickle.loads(packed)


def _is_for_users(error: BaseException) -> bool:
    """Whether the message alone tells what to do: wrong input, or a disk, file or network that fails."""
    return isinstance(error, ValueError | OSError)


class Executor:
    """`with Executor(options) as executor:` over all stages; its child process starts when first needed."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._child: Any = None
        self._connection: Any = None

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *exception: object) -> None:
        self._end()

    def run(self, stage: Stage, units: list[Unit], progress: Callable[[int], None]) -> None:
        """Do all the units. ValueError for what a user can mend: wrong input, a killed worker, a full disk."""
        if self.options.kind == "local" and (self.options.workers == 1 or len(units) == 1):
            _in_a_row(stage, units, progress)
            return
        logs = stage.out / ".logs" / stage.name
        shutil.rmtree(logs, ignore_errors=True)
        for name in ("workers", "failed", "completions"):
            (logs / name).mkdir(parents=True)
        job = Job(stage, tuple(units), logs, self.options)
        try:
            self._start()
            self._connection.send(job)
            self._watch(job, progress)
        except BaseException:
            self._end()
            raise

    def _start(self) -> None:
        if self._child is None:
            # spawn: forking a process whose progress bar runs in a thread can deadlock the child
            context = multiprocessing.get_context("spawn")
            self._connection, theirs = context.Pipe()
            self._child = context.Process(target=_serve, args=(theirs,), daemon=True)
            self._child.start()
            theirs.close()

    def _end(self) -> None:
        if self._child is not None:
            self._connection.close()
            with suppress(ProcessLookupError):  # the group is there from the child's first line on
                os.killpg(self._child.pid, signal.SIGKILL)
            self._child.kill()
            self._child.join()
            self._child = None

    def _watch(self, job: Job, progress: Callable[[int], None]) -> None:
        lost_since = None
        while not self._connection.poll(POLL_S):
            progress(_finished(job))
            raise_failure(job)
            if not self._child.is_alive():
                raise ValueError(f"{job.stage.name}: the executor's process was killed; {AGAIN}")
            lost = lost_workers(job) if self.options.kind == "local" else []
            raise_failure(job)  # what a failing unit takes down with it is not lost
            at = [unit for unit in lost if unit]
            lost_since = (lost_since or time.monotonic()) if lost else None
            if at or (lost_since is not None and time.monotonic() - lost_since > IDLE_LOSS_S):
                raise ValueError(
                    f"{job.stage.name}: the worker at {', '.join(at) or 'no unit'} was killed (kill -9, or by the "
                    f"kernel when memory ran out: fewer --workers need less of it); {AGAIN}"
                )
        report = self._connection.recv()
        raise_failure(job)
        if report is not None:
            line, trace = report
            if line is not None:
                raise ValueError(f"{job.stage.name}: {line}")
            raise RuntimeError(f"{job.stage.name}: the executor failed; its logs are in {job.logs}\n{trace}")
        if self.options.kind == "slurm":
            _watch_queue(job, progress)


def _in_a_row(stage: Stage, units: list[Unit], progress: Callable[[int], None]) -> None:
    for number, unit in enumerate(units):
        progress(number)
        try:
            do(stage, unit)
        except Exception as error:
            if _is_for_users(error):
                raise ValueError(f"{stage.name} {unit}: {error}") from error
            raise


def _finished(job: Job) -> int:
    with os.scandir(job.logs / "completions") as found:
        return sum(1 for _ in found)


def raise_failure(job: Job) -> None:
    """The first failure that a worker wrote down, as an error of this process."""
    for path in sorted((job.logs / "failed").glob("*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        if report["user"]:
            raise ValueError(f"{job.stage.name} {report['unit']}: {report['message']}")
        raise RuntimeError(f"{job.stage.name} {report['unit']} failed:\n{report['traceback']}")


def lost_workers(job: Job) -> list[str]:
    """What workers of this machine that are no longer there were at: a unit, or "" between two."""
    lost = []
    for claim in (job.logs / "workers").iterdir():
        try:
            os.kill(int(claim.name.rpartition(":")[2]), 0)
        except ProcessLookupError:  # only now read: it no longer changes
            lost.append(claim.read_text(encoding="utf-8"))
    return lost


def _watch_queue(job: Job, progress: Callable[[int], None]) -> None:
    """Until all units are finished, or the queue no longer has the jobs that would finish them."""
    try:
        while (finished := _finished(job)) < len(job.units):
            progress(finished)
            raise_failure(job)
            if not queued(job):
                time.sleep(QUEUE_POLL_S)  # a shared file system may be behind the queue
                raise_failure(job)
                if _finished(job) < len(job.units):
                    raise ValueError(
                        f"{job.stage.name}: Slurm has no job left, but {len(job.units) - _finished(job)} of "
                        f"{len(job.units)} units are not finished{_claimed(job)}: killed, out of memory or of time? "
                        f"The logs are in {job.logs}; {AGAIN}"
                    )
            time.sleep(QUEUE_POLL_S)
    finally:
        cancel(job)


def _claimed(job: Job) -> str:
    at = sorted(text for claim in (job.logs / "workers").iterdir() if (text := claim.read_text(encoding="utf-8")))
    return f" (begun: {', '.join(at[:5])}{', ...' if len(at) > 5 else ''})" if at else ""


def queued(job: Job) -> bool:
    """Whether Slurm still has a task of this stage."""
    command = ["squeue", "--noheader", "--name", job.name(), "--format", "%i"]
    return bool(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())


def cancel(job: Job) -> None:
    """End what Slurm has of this stage, from this start or from one that was killed."""
    subprocess.run(["scancel", "--name", job.name()], check=True, capture_output=True)
    while queued(job):
        time.sleep(1)


def _serve(connection: multiprocessing.connection.Connection) -> None:
    """The child process: runs jobs, one after another, until the other end of the connection is closed."""
    os.setsid()
    _end_with_parent()
    with suppress(EOFError):
        while True:
            job = connection.recv()
            log = os.open(job.logs / "executor.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            try:
                from data_mixtures.stages import (
                    executors,  # datatrove takes a second to import: only when there is work
                )

                executors.execute(job)
                connection.send(None)
            except Exception as error:
                connection.send((str(error) if _is_for_users(error) else None, traceback.format_exc()))


def _end_with_parent() -> None:
    """Leave, with all workers, when the main process is gone; after a kill -9 they would go on without it."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "only the executor's child process runs this"

    def watch() -> None:
        parent.join()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def run(stage: Stage, executor: Executor, console: Console) -> dict[Unit, dict[str, Any]]:
    """Do what is not done; returns the receipts of all units, in their order. Only in `stage.exclusive`."""
    started = time.monotonic()
    remove_partial(stage.out, stage.name)
    units = stage.units()
    todo = [unit for unit in units if not is_done(stage, unit)]
    if todo:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        hidden = not console.is_terminal
        with Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=hidden) as bar:
            task = bar.add_task(stage.name, total=len(units), completed=len(units) - len(todo))
            try:
                executor.run(
                    stage, todo, lambda finished: bar.update(task, completed=len(units) - len(todo) + finished)
                )
            finally:
                remove_partial(stage.out, stage.name)
    receipts = {unit: read_receipt(stage.out, stage.name, unit) for unit in units}
    for unit in todo:
        assert is_done(stage, unit), f"{stage.name} {unit} was run and is not done: its key changed meanwhile?"
    _remove_others(stage, units)
    took = f"{time.monotonic() - started:.1f} s"
    console.print(
        f"{stage.name:9}{len(todo):6} units done, {len(units) - len(todo)} as before, {took}", highlight=False
    )
    return {unit: receipt for unit, receipt in receipts.items() if receipt is not None}


def _remove_others(stage: Stage, units: list[Unit]) -> None:
    """Units with numbers that these sources no longer have: of an older plan, or of text that was more."""
    for source in {unit.source for unit in units}:
        known = {unit_folder(stage.out, stage.name, unit) for unit in units if unit.source == source}
        for folder in set((stage.out / stage.name / source).glob("unit-*")) - known:
            shutil.rmtree(folder)


def summary(stage: str, receipts: Mapping[Unit, Mapping[str, Any]]) -> Table:
    """The counts of a stage, summed by source; counts by reason are one sum each."""
    sums: dict[str, dict[str, int]] = {}
    for unit, receipt in receipts.items():
        row = sums.setdefault(unit.source, {"units": 0})
        row["units"] += 1
        for name, value in receipt["counts"].items():
            if isinstance(value, Mapping):
                value = sum(each for each in value.values() if isinstance(each, int))
            if isinstance(value, int):
                row[name] = row.get(name, 0) + value
    columns = list(dict.fromkeys(name for row in sums.values() for name in row))
    table = Table(box=box.SIMPLE, title=stage, title_justify="left", pad_edge=False, collapse_padding=True)
    table.add_column("source", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for source, row in sums.items():
        table.add_row(source, *(f"{row.get(name, 0):,}" for name in columns))
    return table
