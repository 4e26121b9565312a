"""Whether a checkpoint can be started from: complete, undamaged, and of this job's architecture.

All functions that look at the shared disk are collectives: every rank calls them and gets the same answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torchtitan.tools.logging import logger

from laneformer.config import LaneformerConfig
from records import checkpoints
from records.files import read_lines


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

    def check(
        self, checkpoint: Path, config: LaneformerConfig, allow_changes: Sequence[str] = ()
    ) -> None:
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
            logger.info(
                f"The contents of {checkpoint} are as saved ({time.perf_counter() - started:.1f} s)"
            )
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
        listing = ", ".join(
            f"{name} = {there[name]} (this job: {here[name]})" for name in different
        )
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
