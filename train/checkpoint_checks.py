"""Whether a checkpoint can be started from: complete, undamaged, and of this job's architecture.

All functions that look at the shared disk are collectives: every rank calls them and gets the same answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torchtitan.tools.logging import logger

from laneformer.config import LaneformerConfig
from records import checkpoints
from records.files import read_lines
from records.job import LRScheduler, read_sections, stable_steps


class Contents:
    """Compares the files of checkpoints with their checksums, those of each checkpoint once."""

    def __init__(self) -> None:
        self.undamaged: set[Path] = set()

    def newest_undamaged(self, folder: Path) -> Path | None:
        """The newest complete checkpoint whose contents are as they were saved."""
        damaged: list[Path] = []
        while True:
            newest = on_rank_zero(lambda: checkpoints.newest_complete_checkpoint(folder, damaged))
            if newest is None or (problem := self.problem(newest)) is None:
                return newest
            logger.warning(f"Skipping a checkpoint: {problem}")
            damaged.append(newest)

    def check(self, checkpoint: Path, config: LaneformerConfig, allow_changes: Sequence[str] = ()) -> None:
        """ValueError for a checkpoint that is incomplete, damaged, or of another architecture.

        allow_changes: fields of the architecture that may differ.
        """
        on_rank_zero(lambda: checkpoints.check_complete(checkpoint))
        if problem := self.problem(checkpoint):
            raise ValueError(f"{problem}; start from another checkpoint")
        on_rank_zero(lambda: check_architecture(checkpoint, config, allow_changes))

    def problem(self, checkpoint: Path) -> str | None:
        """What is wrong with a checkpoint's files, None if nothing; each rank reads its share."""
        if checkpoint in self.undamaged:
            return None
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        problem, started = None, time.perf_counter()
        try:
            checkpoints.check_contents(checkpoint, rank, ranks)
        except ValueError as error:
            problem = str(error)
        problem = first_problem(problem)
        if problem is None:
            self.undamaged.add(checkpoint)
            logger.info(f"The contents of {checkpoint} are as saved ({time.perf_counter() - started:.1f} s)")
        return problem


def first_problem(mine: str | None) -> str | None:
    """The problem of the first rank that has one; None if no rank has."""
    problems: list[str | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(problems, mine)
    return next(filter(None, problems), None)


def require_nothing_lost(run: Path, folder: Path, steps: int) -> None:
    """ValueError where the run's metrics go beyond `steps`, which no run without a checkpoint does: a file
    system is away, or was purged.
    """
    logged = (row.get("step") for row in read_lines(run / "metrics.jsonl"))
    reached = max((step for step in logged if isinstance(step, int)), default=0)
    if reached > steps:
        raise ValueError(
            f"{run / 'metrics.jsonl'} ends at step {reached}, but {folder} holds no complete checkpoint: "
            "the job would begin again; bring the checkpoints back, or move the run folder away"
        )


def check_steps(run: Path, step: int, job: Any) -> None:
    """ValueError where a run's checkpoint is beyond the job's last step, or where the learning rate would jump there:
    the schedule is not the one that the run had so far, and one of the two has begun to decay.
    """
    if step > job.training.steps:
        raise ValueError(
            f"training.steps = {job.training.steps}, but {run} is at step {step} already; raise training.steps, or "
            "move the newer checkpoints away"
        )
    before = read_sections(run / "config.toml") if (run / "config.toml").is_file() else job.to_dict()
    old, new = (schedule_of(each) for each in (before, job.to_dict()))
    names = ("warmup_steps", "total_steps", "decay_ratio")
    stable = [stable_steps(LRScheduler(**{name: each[name] for name in names}), 0) for each in (old, new)]
    if old != new and step > min(last for _, last in stable):
        first, last = stable[0]
        listing = ", ".join(f"lr_scheduler.{name} = {new[name]} (before: {old[name]})" for name in new
                            if new[name] != old[name])  # fmt: skip
        raise ValueError(
            f"the learning rate of {run} would jump at step {step}: {listing}, and the decay had begun behind step "
            f"{min(last for _, last in stable)}. To train longer, start from a checkpoint of the stable part, steps "
            f"{first} to {last} (`python -m tools.launch --decay-from`, or a new run with "
            f"checkpoint.initial_load_all_states); to go on as before, set lr_scheduler.total_steps = "
            f"{old['total_steps']}"
        )


def schedule_of(job: Mapping[str, Any]) -> dict[str, Any]:
    """What decides the learning rate's factor at each step."""
    section = job["lr_scheduler"]
    names = ("warmup_steps", "decay_ratio", "decay_type", "min_lr_factor")
    total = section.get("total_steps") or job["training"]["steps"]
    return {"total_steps": total, **{name: section.get(name) for name in names}}


def check_architecture(checkpoint: Path, config: LaneformerConfig, allowed: Sequence[str]) -> None:
    """Raise ValueError, with the fields that differ, for a checkpoint of another architecture than the job's."""
    stored = checkpoints.read_architecture(checkpoint)
    if stored is None:
        logger.warning(
            f"{checkpoint} does not say its architecture (model.json): only tensor shapes are compared"
        )
        return
    there, here = asdict(LaneformerConfig.from_dict(stored)), asdict(config)
    different = [name for name in here if there[name] != here[name] and name not in allowed]
    if different:
        listing = ", ".join(f"{name} = {there[name]} (this job: {here[name]})" for name in different)
        raise ValueError(
            f"{checkpoint} was trained with another architecture: {listing}; set [model] and [architecture] to the "
            "checkpoint's values, or, for a new phase that means the change, name the fields in "
            "checkpoint.allow_changes"
        )


def on_rank_zero(decide: Callable[[], Any]) -> Any:
    """Let rank 0 look at the shared disk and tell the others, so that all ranks start from the same place.

    Its ValueError is raised on every rank: nobody waits for a rank that has given up.
    """
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
