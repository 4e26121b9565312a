"""Run the units of a stage that are not done: one after another here, or in parallel on datatrove's

Those run in a child process, in a process group of its own, which writes nothing to the terminal (its logs are in
DIR/.logs/<stage>/) and ends itself when the main process is gone. multiprocessing.Pool, which the local executor uses,
loses the task of a worker that the kernel kills and then waits for it forever. So every worker writes down which unit
it is at and its error, if any, and the main process watches: when a worker is gone, it ends the whole process group.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from data_mixtures import shards
from data_mixtures.stages.stage import Stage, Unit, do, is_done, receipt_of, remove_partial, unit_folder

FOR_USERS = (ValueError, OSError)  # their message alone tells what to do: wrong input, or a disk or network that fails
KINDS = ("local", "slurm", "ray")
ROOT = Path(__file__).resolve().parents[2]
AGAIN = "run the same command again: it continues with the unfinished units"
POLL_S = 0.1
QUEUE_POLL_S = 3.0  # every squeue loads the controller
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
        """The same at every start of this stage in this folder, so that jobs of a killed start are found."""
        return f"data-{self.stage.name}-{zlib.crc32(str(self.stage.out.resolve()).encode()):08x}"


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
            report = {"unit": str(unit), "user": isinstance(error, FOR_USERS), "message": str(error)}
            shards.write_json(job.logs / "failed" / f"{rank:05d}.json", {**report, "traceback": traceback.format_exc()})
            raise
        claim.write_text("", encoding="utf-8")


@functools.lru_cache(maxsize=1)
def _unpacked(packed: bytes) -> Job:
    return pickle.loads(packed)


def finished_units(job: Job) -> int:
    with os.scandir(job.logs / "completions") as found:
        return sum(1 for _ in found)


def raise_failure(job: Job) -> None:
    """Raise the first failure that a worker wrote down."""
    for path in sorted((job.logs / "failed").glob("*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        if report["user"]:
            raise ValueError(f"{job.stage.name} {report['unit']}: {report['message']}")
        raise RuntimeError(f"{job.stage.name} {report['unit']} failed:\n{report['traceback']}")


def queued(job: Job) -> bool:
    """Whether Slurm still has a task of this stage."""
    command = ["squeue", "--noheader", "--name", job.name(), "--format", "%i"]
    return bool(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())


def cancel(job: Job) -> None:
    """Cancel all Slurm jobs of this stage, of this start or of one that was killed."""
    subprocess.run(["scancel", "--name", job.name()], check=True, capture_output=True)
    while queued(job):
        time.sleep(1)


def serve(connection: multiprocessing.connection.Connection) -> None:
    """The child process: runs jobs, one after another, until the other end of the connection is closed."""
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(EOFError):
        while True:
            job = connection.recv()
            with (job.logs / "executor.log").open("a") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            try:
                execute(job)
                connection.send(None)
            except Exception as error:
                connection.send((str(error) if isinstance(error, FOR_USERS) else None, traceback.format_exc()))


def _end_with_parent() -> None:
    """End this process group when the main process is gone; after a kill -9 it would go on without it."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "only the executor's child process runs this"
    parent.join()
    os.killpg(0, signal.SIGKILL)


def execute(job: Job) -> None:
    """Run a job to its end; with Slurm only submit it. Raises what a unit raised."""
    from datatrove.executor import LocalPipelineExecutor  # here: importing datatrove takes a second
    from datatrove.executor.base import PipelineExecutor

    shared = {"pipeline": [Task(job)], "tasks": len(job.units), "logging_dir": str(job.logs.resolve())}
    executor: PipelineExecutor
    if job.options.kind == "slurm":
        cancel(job)  # jobs of a killed start
        executor = _slurm(job, shared)
    elif job.options.kind == "ray":
        if importlib.util.find_spec("ray") is None:
            raise ValueError("--executor ray needs the package ray: pip install ray")
        import ray
        from datatrove.executor import RayPipelineExecutor

        # RAY_ADDRESS names a cluster that is already running
        ray.init(ignore_reinit_error=True, runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}})
        executor = RayPipelineExecutor(**shared, workers=job.options.workers)
    else:
        # fork: this process has no other busy threads, and workers need not import everything again
        workers = min(job.options.workers, len(job.units))
        executor = LocalPipelineExecutor(**shared, workers=workers, start_method="fork")
    try:
        executor.run()
    except subprocess.CalledProcessError as error:
        said = (job.logs / "executor.log").read_text(encoding="utf-8").strip().splitlines()[-1:]
        raise ValueError(f"{error.cmd[0]} ended with status {error.returncode}: {' '.join(said)}") from error


def _slurm(job: Job, shared: Mapping[str, Any]) -> Any:
    from datatrove.executor import SlurmPipelineExecutor

    class Slurm(SlurmPipelineExecutor):
        """Without options that are not given, and without a job for statistics, which a failure leaves in the queue."""

        def get_sbatch_args(self, max_array: int = 1) -> dict:
            given = SlurmPipelineExecutor.get_sbatch_args(self, max_array)
            return {name: value for name, value in given.items() if value is not None}

        def launch_merge_stats(self) -> None:
            pass

    options = {"time": "24:00:00", "partition": None, **job.options.sbatch}
    return Slurm(
        **shared,
        time=options.pop("time"),
        partition=options.pop("partition"),
        cpus_per_task=options.pop("cpus-per-task", 1),
        sbatch_args=options,
        workers=job.options.workers,
        # a few units a job: starting Python and datatrove takes seconds, but the last job should be short
        tasks_per_job=max(1, len(job.units) // (4 * job.options.workers)),
        job_name=job.name(),
        qos=None,
        env_command=f'export PATH={Path(sys.executable).parent}:$PATH PYTHONPATH={ROOT}:"$PYTHONPATH"',
        max_array_launch_parallel=True,
    )


class Executor(AbstractContextManager["Executor"]):
    """`with Executor(options) as executor:` around all stages; its child process starts when first needed."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._child: Any = None
        self._connection: Any = None

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
        except FOR_USERS as error:
            raise ValueError(f"{stage.name} {unit}: {error}") from error


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
                if missing := len(job.units) - finished_units(job):
                    begun = sorted(filter(None, map(Path.read_text, (job.logs / "workers").iterdir())))
                    at = f" (begun: {', '.join(begun[:5])}{', ...' * (len(begun) > 5)})" if begun else ""
                    raise ValueError(
                        f"{job.stage.name}: Slurm has no job left, but {missing} of {len(job.units)} units are not "
                        f"finished{at}: killed, out of memory or time? The logs are in {job.logs}; {AGAIN}"
                    )
            time.sleep(QUEUE_POLL_S)
    finally:
        cancel(job)


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
            done = len(units) - len(todo)
            try:
                executor.run(stage, todo, lambda finished: bar.update(task, completed=done + finished))
            finally:
                remove_partial(stage.out, stage.name)
    for unit in todo:
        assert is_done(stage, unit), f"{stage.name} {unit} was run and is not done: its key changed meanwhile?"
    _remove_others(stage, units)
    took = f"{time.monotonic() - started:.1f} s"
    console.print(
        f"{stage.name:9}{len(todo):6} units done, {len(units) - len(todo)} as before, {took}", highlight=False
    )
    return {unit: receipt_of(stage.out, stage.name, unit) for unit in units}


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
    rows = [[source, *(f"{row.get(name, 0):,}" for name in columns)] for source, row in sums.items()]
    return source_table(stage, columns, rows)


def source_table(title: str | None, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    """A row for each source: its name, then figures."""
    table = Table(box=box.SIMPLE, title=title, title_justify="left", pad_edge=False, collapse_padding=True)
    table.add_column("source", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
