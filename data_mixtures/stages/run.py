"""Run the unfinished units of a stage: one after another, on local processes, or on Ray.

Workers' output is in DIR/.logs/<stage>/workers.log, their current units in DIR/.logs/<stage>/workers/.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box, progress
from rich.console import Console
from rich.table import Table

from data_mixtures import store
from data_mixtures.shards import Json
from data_mixtures.stages import on_ray
from data_mixtures.stages.stage import (
    AGAIN,
    Stage,
    Unit,
    attempt_unit,
    is_done,
    receipt_of,
    remove_partial,
    unit_folder,
)
from records.workers import end_with_parent


@dataclass(frozen=True)
class Options:
    """Where units run. workers: processes here; tasks of Ray at a time, 0 for as many as its CPUs."""

    workers: int = 1
    kind: str = "local"


def _run(work: Stage, units: list[Unit], options: Options, tell: Callable[[int], None]) -> None:
    remove_partial(work.out, work.name)
    place = store.place(work.out)
    if options.kind == "ray" and units:
        outcomes = on_ray.outcomes(work, units, options.workers)
    elif options.workers == 1 or len(units) <= 1:
        outcomes = (attempt_unit(work, unit, place) for unit in units)
    else:
        outcomes = _in_parallel(work, units, place, min(options.workers, len(units)))
    try:
        for finished, failure in enumerate(outcomes, 1):
            if failure is not None:
                raise (ValueError if failure["user"] else RuntimeError)(failure["message"])
            tell(finished)
    finally:
        # units that still run end before their partial folders are deleted
        outcomes.close()
        remove_partial(work.out, work.name)


def _in_parallel(
    work: Stage, units: list[Unit], place: store.Place | None, workers: int
) -> Generator[Json | None]:
    logs = work.out / ".logs" / work.name
    shutil.rmtree(logs, ignore_errors=True)
    (logs / "workers").mkdir(parents=True)
    # forking a process whose progress bar runs in a thread can deadlock the child
    context = multiprocessing.get_context("forkserver")
    others = set(multiprocessing.active_children())
    family = set[Any]()
    with ProcessPoolExecutor(workers, context, _begin, (logs,)) as pool:
        try:
            futures = [pool.submit(_work, work, unit, place, logs) for unit in units]
            family = set(multiprocessing.active_children()) - others
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool as broken:
            # ends the other workers with SIGTERM: who has another status died before
            pool.shutdown()
            killed = [worker for worker in family if worker.exitcode not in (0, -signal.SIGTERM)]
            claims = [(logs / "workers" / str(worker.pid)).read_text() for worker in killed]
            at = sorted(filter(None, claims))
            status = ", ".join(str(worker.exitcode) for worker in killed)
            raise ValueError(
                f"{work.name}: the worker at {', '.join(at) or 'no unit'} was killed (exit status {status}; -9 is "
                "kill -9, or the kernel when memory ran out: fewer --workers need less of it; what it said is in "
                f"{logs}/workers.log); {AGAIN}"
            ) from broken
        except BaseException:  # GeneratorExit too: a unit failed, and the others are not waited for
            for worker in set(multiprocessing.active_children()) - others:
                worker.kill()
            raise


def _begin(logs: Path) -> None:
    # it prints to a log, leaves Ctrl-C to the main process, and ends with that
    log = os.open(logs / "workers.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    (logs / "workers" / str(os.getpid())).touch()
    end_with_parent()


def _work(work: Stage, unit: Unit, place: store.Place | None, logs: Path) -> Json | None:
    # says which unit this worker is at, for the message if it is killed
    claim = logs / "workers" / str(os.getpid())
    claim.write_text(str(unit), encoding="utf-8")
    failure = attempt_unit(work, unit, place)
    claim.write_text("", encoding="utf-8")
    return failure


def run_units(work: Stage, options: Options, console: Console) -> dict[Unit, Json]:
    """Do the unfinished units and return all receipts, in order; only in `stage.exclusive`."""
    started = time.monotonic()
    units = work.units()
    _read_receipts(work, units)
    todo = [unit for unit in units if not is_done(work, unit)]
    finished_before = len(units) - len(todo)
    text_columns = (
        progress.SpinnerColumn(),
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
    )
    columns = *text_columns, progress.MofNCompleteColumn(), progress.TimeElapsedColumn()
    with progress.Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(work.name, total=len(units), completed=finished_before)

        def tell(finished: int) -> None:
            bar.update(task, completed=finished_before + finished)

        _run(work, todo, options, tell)
    _read_receipts(work, units)
    for unit in todo:
        assert is_done(work, unit), (
            f"{work.name} {unit} was run and is not done: did its key change?"
        )
    _remove_others(work, units)
    took = f"{time.monotonic() - started:.1f} s"
    console.print(f"{work.name:9}{len(todo):6} units done, {finished_before} as before, {took}")
    return {unit: receipt_of(work.out, work.name, unit) for unit in units}


def _read_receipts(work: Stage, units: list[Unit]) -> None:
    if remote := store.of(work.out):
        # the plan and what else workers need
        remote.save()
        for source in {unit.source for unit in units}:
            remote.read_receipts(work.out / work.name / source, again=True)


def _remove_others(work: Stage, units: list[Unit]) -> None:
    expected = {unit_folder(work.out, work.name, unit) for unit in units}
    present = {
        path for folder in {unit.parent for unit in expected} for path in folder.glob("unit-*")
    }
    # units of an older plan, or of a time with more text
    for folder in present - expected:
        shutil.rmtree(folder)
        if remote := store.of(work.out):
            remote.remove([folder], recursive=True)


def summary(title: str, receipts: Mapping[Unit, Json]) -> Table:
    sums: dict[str, Counter[str]] = {}
    for unit, receipt in receipts.items():
        row = sums.setdefault(unit.source, Counter())
        row["units"] += 1
        for name, value in receipt["counts"].items():
            if isinstance(value, Mapping):
                value = sum(count for count in value.values() if isinstance(count, int))
            if isinstance(value, int):
                row[name] += value
    columns = dict.fromkeys(name for row in sums.values() for name in row)
    rows = [[source, *(row[name] for name in columns)] for source, row in sums.items()]
    return figures(title, ("source", *columns), rows)


def figures(title: str | None, head: Iterable[str], rows: Iterable[Iterable[Any]]) -> Table:
    """Return a table of names and figures; integers get separators."""
    table = Table(
        box=box.SIMPLE, title=title, title_justify="left", pad_edge=False, collapse_padding=True
    )
    for number, name in enumerate(head):
        table.add_column(name, justify="right" if number else "left", no_wrap=not number)
    for row in rows:
        table.add_row(*(f"{value:,}" if isinstance(value, int) else value for value in row))
    return table
