"""Run the units of a stage that are not done: one after another here, or in parallel on datatrove's executors.

multiprocessing.Pool, which the local executor uses, loses the task of a worker that the kernel kills and then waits for
it without end. So the executor's child process is watched from outside: when a worker's process is gone, the whole
process group is ended and the error names the unit.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from data_mixtures.stages.executors import (
    Job,
    Options,
    cancel,
    finished_units,
    is_for_users,
    queued,
    raise_failure,
    serve,
)
from data_mixtures.stages.stage import Stage, Unit, do, is_done, read_receipt, remove_partial, unit_folder

AGAIN = "start the same command again: it goes on with what is not finished"
POLL_S = 0.1
QUEUE_POLL_S = 3.0  # every squeue loads the controller
IDLE_LOSS_S = 10.0  # a worker lost between two units may have held the lock of the pool's queue


class Executor:
    """`with Executor(options) as executor:` around all stages; its child process starts when first needed."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._child: Any = None
        self._connection: Any = None

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *exception: object) -> None:
        self._end()

    def run(self, stage: Stage, units: list[Unit], progress: Callable[[int], None]) -> None:
        """Do all the units. ValueError for what a user can fix: wrong input, a killed worker, a full disk."""
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
            self._child = context.Process(target=serve, args=(theirs,), daemon=True)
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
            progress(finished_units(job))
            raise_failure(job)
            if not self._child.is_alive():
                raise ValueError(f"{job.stage.name}: the executor's process was killed; {AGAIN}")
            lost = lost_workers(job) if self.options.kind == "local" else []
            raise_failure(job)  # workers that end because a unit failed are not lost
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
            if is_for_users(error):
                raise ValueError(f"{stage.name} {unit}: {error}") from error
            raise


def lost_workers(job: Job) -> list[str]:
    """The unit of each worker of this machine that is no longer there, "" for one that was between two units."""
    lost = []
    for claim in (job.logs / "workers").iterdir():
        try:
            os.kill(int(claim.name.rpartition(":")[2]), 0)
        except ProcessLookupError:  # read only now that it cannot change any more
            lost.append(claim.read_text(encoding="utf-8"))
    return lost


def _watch_queue(job: Job, progress: Callable[[int], None]) -> None:
    """Wait until all units are finished, or the queue has no jobs left that would finish them."""
    try:
        while (finished := finished_units(job)) < len(job.units):
            progress(finished)
            raise_failure(job)
            if not queued(job):
                time.sleep(QUEUE_POLL_S)  # a shared file system may show results late
                raise_failure(job)
                if finished_units(job) < len(job.units):
                    raise ValueError(
                        f"{job.stage.name}: Slurm has no job left, but {len(job.units) - finished_units(job)} of "
                        f"{len(job.units)} units are not finished{_claimed(job)}: killed, out of memory or of time? "
                        f"The logs are in {job.logs}; {AGAIN}"
                    )
            time.sleep(QUEUE_POLL_S)
    finally:
        cancel(job)


def _claimed(job: Job) -> str:
    at = sorted(text for claim in (job.logs / "workers").iterdir() if (text := claim.read_text(encoding="utf-8")))
    return f" (begun: {', '.join(at[:5])}{', ...' if len(at) > 5 else ''})" if at else ""


def run_units(stage: Stage, executor: Executor, console: Console) -> dict[Unit, dict[str, Any]]:
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
    """Delete units with numbers that these sources no longer have, of an older plan or of more text."""
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
