"""Runs that start from another run: the next phase, or a decay from a checkpoint of the stable part of the schedule.

Both are ordinary launches; this file only determines the job file, the overrides and the Slurm dependency.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from records.files import read_lines
from records.job import JobSections, LRScheduler, read_job
from tools.launch.script import ENDED, job_state


@dataclass(frozen=True)
class Start:
    """How a new run begins."""

    config: Path
    overrides: list[str] = field(default_factory=list)
    parent: Path | None = None  # run folder
    checkpoint: str | None = None  # step folder, which a running parent may not have written yet
    dependency: str | None = None
    run: Path | None = None  # folder of the new run, if its name derives from the parent's
    skip_list: Path | None = None  # data that the parent skips, and so must the branch


def last_launch(run: Path) -> dict[str, Any] | None:
    """The last row of launches.jsonl; None for a run that was not started by tools.launch."""
    return next(reversed(read_lines(run / "launches.jsonl")), None)


def resolved_file(run: Path) -> Path:
    """The resolved job file of a run: that of its newest launch, else what its workers wrote. Raises ValueError."""
    launch = last_launch(run)
    path = Path(launch["snapshot"]) / "job.toml" if launch else run / "config.toml"
    if not path.is_file():
        raise ValueError(f"{run} is not a run folder: {path} does not exist")
    return path


def resolved_job(run: Path) -> JobSections:
    """What the resolved job file of a run says. Raises ValueError."""
    return read_job(["--job.config_file", str(resolved_file(run))])


def final_checkpoint(run: Path) -> Path:
    """The path of a run's final checkpoint, whether it exists or not."""
    return run / f"checkpoint/step-{resolved_job(run).training.steps}"


def next_phase(run: Path, config: Path) -> Start:
    """A phase that starts from the final checkpoint of `run`, queued after its job if that has not finished.

    Raises ValueError if the checkpoint does not exist and no job will write it.
    """
    checkpoint = final_checkpoint(run)
    launch = last_launch(run)
    job_id = launch["job_id"] if launch else None
    written = (checkpoint / ".metadata").is_file()
    state = job_state(job_id) if job_id is not None and not written else None
    if not written and state in ENDED:
        raise ValueError(
            f"{checkpoint} does not exist, and " + (f"job {job_id} is {state or 'forgotten'}" if job_id else "no job")
            + " that would write it; finish that run first"
        )  # fmt: skip
    overrides = ["--checkpoint.initial_load_path", str(checkpoint)]
    dependency = None if written else f"afterok:{job_id}"
    return Start(config, overrides, run, str(checkpoint), dependency)


def decay_branch(checkpoint: Path, steps: int) -> Start:
    """A copy of a run that continues from one of its checkpoints and decays the learning rate over `steps` steps.

    The schedule is rebuilt from the job file at every start, so the branch only overrides numbers. TorchTitan reaches
    the minimum one step after total_steps; one less reaches it at the last step of the run.
    """
    run = checkpoint.parent.parent
    job = resolved_job(run)
    name, separator, number = checkpoint.name.partition("-")
    if name != "step" or not separator or not number.isdecimal():
        raise ValueError(f"{checkpoint} is not a checkpoint; pass RUN/checkpoint/step-N")
    at = int(number)
    first, last = stable_steps(job.lr_scheduler, job.training.steps)
    if steps < 1:
        raise ValueError(f"--steps {steps}: a decay has at least 1 step")
    if not first <= at <= last:
        raise ValueError(
            f"step {at} of {run} is not in the stable part of its schedule, steps {first} to {last}; a decay starts at "
            "the full learning rate"
        )
    total = at + steps - 1
    overrides = [
        "--training.steps", str(at + steps), "--lr_scheduler.total_steps", str(total),
        "--lr_scheduler.decay_ratio", repr(steps / total), "--checkpoint.initial_load_path", str(checkpoint),
        "--checkpoint.initial_load_all_states", "--checkpoint.no-allow_fresh_start",
    ]  # fmt: skip
    branch = run.with_name(f"{run.name}-decay-{at}+{steps}")
    skip_list = run / "skip_sequences.json"
    return Start(
        resolved_file(run), overrides, run, str(checkpoint), None, branch, skip_list if skip_list.is_file() else None
    )


def stable_steps(schedule: LRScheduler, training_steps: int) -> tuple[int, int]:
    """First and last step whose checkpoint is after the warmup and before the decay."""
    total = schedule.total_steps or training_steps
    ratio, warmup = schedule.decay_ratio, schedule.warmup_steps
    decay = total - warmup if ratio is None else round(total * ratio)
    return warmup + 1, min(total, total + 1 - decay)
