"""Where units run: datatrove's executors, in a child process that the main process watches (`run`).

The child has a process group of its own and writes nothing to the terminal (its logs are in DIR/.logs/<stage>/). Every
worker writes down which unit it is at and its error, if any. When the main process is gone, the group ends itself.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from data_mixtures import shards
from data_mixtures.stages.stage import Stage, Unit, do

KINDS = ("local", "slurm", "ray")
ROOT = Path(__file__).resolve().parents[2]


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
            report = {"unit": str(unit), "user": is_for_users(error), "message": str(error)}
            shards.write_json(job.logs / "failed" / f"{rank:05d}.json", {**report, "traceback": traceback.format_exc()})
            raise
        claim.write_text("", encoding="utf-8")


@functools.lru_cache(maxsize=1)
def _unpacked(packed: bytes) -> Job:
    return pickle.loads(packed)


def is_for_users(error: BaseException) -> bool:
    """Whether the message alone tells what to do: wrong input, or a disk, file or network that fails."""
    return isinstance(error, ValueError | OSError)


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
    _end_with_parent()
    with suppress(EOFError):
        while True:
            job = connection.recv()
            log = os.open(job.logs / "executor.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            try:
                execute(job)
                connection.send(None)
            except Exception as error:
                connection.send((str(error) if is_for_users(error) else None, traceback.format_exc()))


def _end_with_parent() -> None:
    """End this process group when the main process is gone; after a kill -9 it would go on without it."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "only the executor's child process runs this"

    def watch() -> None:
        parent.join()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def execute(job: Job) -> None:
    """Run a job to its end; with Slurm only submit it. Raises what a unit raised."""
    from datatrove.executor import LocalPipelineExecutor  # here: importing datatrove takes a second
    from datatrove.executor.base import PipelineExecutor

    shared = {"pipeline": [Task(job)], "tasks": len(job.units), "logging_dir": str(job.logs.resolve())}
    executor: PipelineExecutor
    if job.options.kind == "slurm":
        cancel(job)  # jobs of a killed start
        from data_mixtures.stages.slurm import Slurm

        executor = Slurm(**shared, **_slurm(job))
    elif job.options.kind == "ray":
        if importlib.util.find_spec("ray") is None:
            raise ValueError("--executor ray needs the package ray: pip install ray")
        import ray
        from datatrove.executor import RayPipelineExecutor

        # RAY_ADDRESS names a cluster that is already running
        ray.init(ignore_reinit_error=True, runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}})
        executor = RayPipelineExecutor(**shared, workers=job.options.workers)
    else:
        # fork: this process has no threads that work, and its imports are not made again for every stage
        workers = min(job.options.workers, len(job.units))
        executor = LocalPipelineExecutor(**shared, workers=workers, start_method="fork")
    try:
        executor.run()
    except subprocess.CalledProcessError as error:
        said = (job.logs / "executor.log").read_text(encoding="utf-8").strip().splitlines()[-1:]
        raise ValueError(f"{error.cmd[0]} ended with status {error.returncode}: {' '.join(said)}") from error


def _slurm(job: Job) -> dict[str, object]:
    options = {"time": "24:00:00", "partition": None, **job.options.sbatch}
    paths = f'export PATH={Path(sys.executable).parent}:$PATH PYTHONPATH={ROOT}:"$PYTHONPATH"'
    return {
        "time": options.pop("time"),
        "partition": options.pop("partition"),
        "cpus_per_task": options.pop("cpus-per-task", 1),
        "sbatch_args": options,
        "workers": job.options.workers,
        # a few units a job: starting Python and datatrove takes seconds, but the last job should be short
        "tasks_per_job": max(1, len(job.units) // (4 * job.options.workers)),
        "job_name": job.name(),
        "qos": None,
        "env_command": paths,
        "max_array_launch_parallel": True,
    }
