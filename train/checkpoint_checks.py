"""Check that a checkpoint can be started from: complete, undamaged, of this job's architecture and schedule.

Functions that look at the shared disk are collectives: every rank calls them and gets the same answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torchtitan.tools.logging import logger

from laneformer.config import LaneformerConfig
from records import checkpoints
from records.files import read_lines
from records.job import LRScheduler, read_sections, stable_range


class ChecksumVerifier:
    """Compares the files of each checkpoint with their checksums, once."""

    def __init__(self) -> None:
        self.undamaged: set[Path] = set()

    def newest_undamaged(self, folder: Path) -> Path | None:
        """Return the newest complete checkpoint whose contents are as they were saved."""
        damaged: list[Path] = []
        while True:
            newest = on_rank_zero(lambda: checkpoints.newest_complete_checkpoint(folder, damaged))
            if newest is None or (problem := self.problem(newest)) is None:
                return newest
            logger.warning(f"Skipping a checkpoint: {problem}")
            damaged.append(newest)

    def check(
        self, checkpoint: Path, config: LaneformerConfig, allow_changes: Sequence[str] = ()
    ) -> None:
        """Raise ValueError for a checkpoint that is incomplete, damaged, or of another architecture."""
        on_rank_zero(lambda: checkpoints.check_complete(checkpoint))
        if problem := self.problem(checkpoint):
            raise ValueError(f"{problem}; start from another checkpoint")
        # after the contents: a damaged model.json would be reported as another architecture
        on_rank_zero(lambda: check_architecture(checkpoint, config, allow_changes))

    def problem(self, checkpoint: Path) -> str | None:
        """Say what is wrong with a checkpoint's files; each rank reads its share."""
        if checkpoint in self.undamaged:
            return None
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        problem, started = None, time.perf_counter()
        # every byte is read: once a process, and each rank its share
        try:
            checkpoints.check_contents(checkpoint, rank, ranks)
        except ValueError as error:
            problem = str(error)
        problem = first_problem(problem)
        if problem is None:
            self.undamaged.add(checkpoint)
            logger.info(
                f"The contents of {checkpoint} are as saved ({time.perf_counter() - started:.1f} s)"
            )
        return problem


def first_problem(local_problem: str | None) -> str | None:
    problems: list[str | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(problems, local_problem)
    return next(filter(None, problems), None)


def require_nothing_lost(run: Path, folder: Path, steps: int) -> None:
    """Raise ValueError where the run's metrics go beyond `steps` and it has no checkpoint."""
    logged = (row.get("step") for row in read_lines(run / "metrics.jsonl"))
    reached = max((step for step in logged if isinstance(step, int)), default=0)
    # no run without a checkpoint goes so far: a file system is away, or was purged
    if reached > steps:
        raise ValueError(
            f"{run / 'metrics.jsonl'} ends at step {reached}, but {folder} holds no complete checkpoint: "
            "the job would begin again; bring the checkpoints back, or move the run folder away"
        )


def check_architecture(checkpoint: Path, config: LaneformerConfig, allowed: Sequence[str]) -> None:
    """Raise ValueError, with the fields that differ, for another architecture than the job's."""
    stored = checkpoints.read_architecture(checkpoint)
    if stored is None:
        logger.warning(
            f"{checkpoint} does not say its architecture (model.json): only tensor shapes are compared"
        )
        return
    # both with defaults filled in: a checkpoint may be older than a field
    saved, ours = asdict(LaneformerConfig.from_dict(stored)), asdict(config)
    different = [name for name in ours if saved[name] != ours[name] and name not in allowed]
    if different:
        listing = ", ".join(
            f"{name} = {saved[name]} (this job: {ours[name]})" for name in different
        )
        raise ValueError(
            f"{checkpoint} was trained with another architecture: {listing}; set [model] and [architecture] to the "
            "checkpoint's values, or, for a new phase that means the change, name the fields in "
            "checkpoint.allow_changes"
        )


def check_schedule(checkpoint: Path, job: Any) -> None:
    """Raise ValueError where the learning rate would jump, or the job ends before its start."""
    steps, located = job.training.steps, checkpoints.locate_checkpoint(checkpoint)
    config = located.parent.parent / "config.toml"
    try:
        step, trained = checkpoints.step_of(located), read_sections(config)
        section = SimpleNamespace(**{**vars(LRScheduler()), **trained["lr_scheduler"]})
        before = describe_decay(section, trained["training"]["steps"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as problem:
        logger.warning(f"{checkpoint}: its schedule is not known ({config}: {problem!r})")
        return
    if step > steps:
        raise ValueError(
            f"{checkpoint} is beyond the end of this job, training.steps = {steps}; give the number of steps that it "
            f"was trained for, or start from an earlier checkpoint: {describe_earlier(located, steps)}"
        )
    # the rate is a function of schedule and step: another schedule changes nothing before the earlier decay begins
    now = describe_decay(job.lr_scheduler, steps)
    last_stable = min(before["last_stable_step"], now["last_stable_step"])
    if before != now and step > last_stable:
        listing = ", ".join(
            f"{name} = {before[name]} (this job: {now[name]})"
            for name in before
            if before[name] != now[name]
        )
        raise ValueError(
            f"{checkpoint} was trained with another schedule: {listing}; the decay had begun at step "
            f"{last_stable + 1}; keep the schedule, or, to extend, start from a checkpoint of the stable phase: "
            f"{describe_earlier(located, last_stable)}"
        )


def describe_decay(schedule: Any, training_steps: int) -> dict[str, Any]:
    """Return what the learning rate depends on after the warmup."""
    return {
        "total_steps": schedule.total_steps or training_steps,
        "last_stable_step": stable_range(schedule, training_steps)[1],
        "decay_type": schedule.decay_type,
        "min_lr_factor": schedule.min_lr_factor,
    }


def describe_earlier(checkpoint: Path, last: int) -> str:
    """Say how to start from the newest checkpoint up to a step."""
    folder = checkpoint.parent
    for step, path in checkpoints.step_folders(folder).items():
        if step <= last and (path / ".metadata").is_file():
            return f"`torchrun ... -m train ... --checkpoint.load_step {step}`, once"
    return f"{folder} has none up to step {last}"


def on_rank_zero(decide: Callable[[], Any]) -> Any:
    """Let rank 0 decide and tell the others; its ValueError is raised on every rank."""
    # nobody waits for a rank that has given up
    answer: list[Any] = [None, None]
    if torch.distributed.get_rank() == 0:
        try:
            answer[0] = decide()
        except ValueError as problem:
            answer[1] = str(problem)
    torch.distributed.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise ValueError(answer[1])
    return answer[0]
