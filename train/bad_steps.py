"""Record the batches of refused steps, then skip them or end the attempt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torchtitan.tools.logging import logger

from records.checkpoints import newest_saved_step
from records.events import record_event
from records.files import survive_full_disk, write_atomically
from records.skips import append_skips, ranges_of

from .checkpoint_checks import on_rank_zero
from .guard import BadStep


class BadSteps:
    """Records and skips refused batches; every rank calls its methods at the same steps."""

    def __init__(self, run: Path, attempt: int, job_config: Any, loader: Any):
        self.run, self.attempt, self.loader = run, attempt, loader
        # not the manager's own: without checkpoint.enable TorchTitan's has none
        self.checkpoints = run / job_config.checkpoint.folder
        self.section, self.batch_size = job_config.resilience, job_config.training.global_batch_size
        # refused among the last spike_window steps
        self.steps: list[int] = []

    def skip_or_raise(self, problem: BadStep, step: int, loss: float, grad_norm: float) -> None:
        """Record the batch just read; where `on_bad_step` is "skip", skip it for good.

        Raises:
            BadStep: `problem`, where the policy is not to skip, or too many were skipped.
        """
        # global sequences [first, last), all ranks' together
        ranges, section = self._last_read(self.batch_size), self.section
        if torch.distributed.get_rank() == 0:
            self._record(
                problem, step, ranges[0][0], {"loss": repr(loss), "grad_norm": repr(grad_norm)}
            )
        self.steps = [
            *(earlier for earlier in self.steps if earlier > step - section.spike_window),
            step,
        ]
        if section.on_bad_step != "skip" or len(self.steps) > section.max_skips:
            raise problem
        # the ranges are on disk before the step continues: a restart reads the same data
        reason = f"step {step}: {problem}"
        if not on_rank_zero(lambda: append_skips(self.run, ranges, reason)):
            raise BadStep(f"{problem}; {self.run} has no room to record that its batch is skipped")
        self.loader.rewind_past(ranges)
        logger.warning(
            f"{reason}; sequences {ranges} are skipped, {len(self.steps)} of {section.max_skips}"
        )

    def record_rollback_skips(self, problem: BadStep, step: int, started_at: int) -> None:
        """Record the data that the next attempt skips after a rollback, but none that a checkpoint has seen."""
        if torch.distributed.get_rank() == 0 and self.section.on_bad_step in (
            "skip",
            "rollback_and_skip",
        ):
            saved = max(started_at, newest_saved_step(self.checkpoints))
            ranges = self._last_read(min(self.section.skip_steps, step - saved) * self.batch_size)
            append_skips(self.run, ranges, f"step {step}: {problem}")

    def _last_read(self, count: int) -> list[list[int]]:
        return ranges_of(self.loader.skips.numbers(self.loader.state.sequences - count, count))

    def _record(self, problem: BadStep, step: int, first: int, figures: dict[str, str]) -> None:
        """Record the event, and a file with every sequence of the batch."""
        path = self.run / "bad-steps" / f"step-{step}.attempt-{self.attempt}.{first}.json"
        with survive_full_disk(path):
            batch = self.loader.locate(
                self.loader.state.sequences - self.batch_size, self.batch_size
            )
            write_atomically(path, "".join(json.dumps(place) + "\n" for place in batch))
        show = f"python -m data_mixtures show {self.run} --bad-step {step}"
        facts = {**figures, "reason": str(problem), "batch": str(path), "show": show}
        record_event(self.run, "bad_step", attempt=self.attempt, step=step, **facts)
