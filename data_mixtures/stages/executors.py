"""datatrove's executors, made for a job. Only the executor's child process imports this: datatrove takes a second."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from datatrove.executor import LocalPipelineExecutor, SlurmPipelineExecutor
from datatrove.executor.base import PipelineExecutor

from data_mixtures.stages.execute import Job, Task, cancel

ROOT = Path(__file__).resolve().parents[2]


class _Slurm(SlurmPipelineExecutor):
    def get_sbatch_args(self, max_array: int = 1) -> dict:
        return {name: value for name, value in super().get_sbatch_args(max_array).items() if value is not None}

    def launch_merge_stats(self) -> None:
        """No second job: the receipts hold the counts, and after a failure it would stay in the queue for ever."""


def execute(job: Job) -> None:
    """Run a job to its end; with Slurm only submit it. Raises what a unit raised."""
    shared = {"pipeline": [Task(job)], "tasks": len(job.units), "logging_dir": str(job.logs.resolve())}
    executor: PipelineExecutor
    if job.options.kind == "slurm":
        cancel(job)  # what a killed start left in the queue
        executor = _Slurm(**shared, **_slurm(job))
    elif job.options.kind == "ray":
        if importlib.util.find_spec("ray") is None:
            raise ValueError("--executor ray needs the package ray: pip install ray")
        import ray
        from datatrove.executor import RayPipelineExecutor

        # a cluster that runs already is named by RAY_ADDRESS
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
        # a few units a job: starting Python and datatrove takes seconds, and the last job should not be waited for long
        "tasks_per_job": max(1, len(job.units) // (4 * job.options.workers)),
        "job_name": job.name(),
        "qos": None,
        "env_command": paths,
        "max_array_launch_parallel": True,
    }
