"""What stands beside a job has to know of it: the few settings that the supervisor and evals.watch read themselves.

TorchTitan's own parser takes eight seconds to import and would bring torch into a process that must outlive everything;
so only `[resilience]`, `[evals]` and a few fields are read here. The workers read, and check, the whole.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import tyro

from train.job_config import Evals, Resilience


@dataclass
class Job:
    dump_folder: str = "./outputs"


@dataclass
class Training:
    global_batch_size: int = -1
    steps: int = 10_000  # TorchTitan's default


@dataclass
class Checkpoint:
    folder: str = "checkpoint"
    load_step: int = -1


@dataclass
class Model:
    flavor: str = ""


@dataclass
class Mixture:
    lock: str = ""


@dataclass
class Metrics:
    enable_tensorboard: bool = False
    save_tb_folder: str = "tb"
    enable_wandb: bool = False
    enable_trackio: bool = False


@dataclass
class SupervisedJob:
    """The supervisor's view of a job file with its command-line overrides."""

    job: Job = field(default_factory=Job)
    training: Training = field(default_factory=Training)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    model: Model = field(default_factory=Model)
    mixture: Mixture = field(default_factory=Mixture)
    resilience: Resilience = field(default_factory=Resilience)
    evals: Evals = field(default_factory=Evals)
    metrics: Metrics = field(default_factory=Metrics)

    @property
    def run(self) -> Path:
        return Path(self.job.dump_folder)

    @property
    def checkpoints(self) -> Path:
        return self.run / self.checkpoint.folder


def read_job(arguments: list[str]) -> SupervisedJob:
    """Read `--job.config_file X.toml [--section.key value ...]`. Raises ValueError for what cannot be supervised."""
    values = tomllib.loads(job_file(arguments).read_text(encoding="utf-8"))

    def section(kind: Any, name: str) -> Any:
        known = {f.name for f in fields(kind)}
        return kind(**{key: value for key, value in values.get(name, {}).items() if key in known})

    default = SupervisedJob(
        job=section(Job, "job"),
        training=section(Training, "training"),
        checkpoint=section(Checkpoint, "checkpoint"),
        model=section(Model, "model"),
        mixture=section(Mixture, "mixture"),
        resilience=section(Resilience, "resilience"),
        evals=section(Evals, "evals"),
        metrics=section(Metrics, "metrics"),
    )
    job, _ = tyro.cli(SupervisedJob, args=arguments, default=default, return_unknown_args=True)
    if job.checkpoint.load_step != -1:
        raise ValueError(
            f"checkpoint.load_step = {job.checkpoint.load_step} would go back at every restart; run `torchrun -m train`"
            " with it once, or move the newer checkpoints away"
        )
    return job


def job_file(arguments: list[str]) -> Path:
    """The value of --job.config_file. Raises ValueError without one."""
    for at, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name.replace("-", "_") == "__job.config_file":
            path = Path(value or "".join(arguments[at + 1 : at + 2]))
            if not path.is_file():
                raise ValueError(f"--job.config_file {path} does not exist")
            return path
    raise ValueError("--job.config_file is missing: python -m train.supervise --job.config_file configs/phase1.toml")
