"""Where a job starts, and what it keeps: checkpoints that can be trusted while disks fill and processes die.

Start: the run's own newest complete checkpoint, else the phase before, else (only if allowed) random weights.
TorchTitan 0.2.2 decides this by whether the checkpoint folder exists, trusts the newest `.metadata`, and lets a second
phase inherit the first one's optimizer settings. Saving: its writer is kept; a save that fails is taken back and tried
again at the next interval, and old checkpoints go only when newer ones are complete.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.components.checkpoint import DATALOADER, MODEL, OPTIMIZER, CheckpointManager
from torchtitan.tools.logging import logger

from records import checkpoints
from records.events import record_event

from .optimizer import apply_optimizer_settings


class CheckpointTimes:
    """Seconds since the last `take`; asynchronous saves end in a thread of their own."""

    def __init__(self) -> None:
        self.blocking_s = 0.0
        self.total_s: float | None = None  # of the save that finished last

    @contextmanager
    def blocking(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.blocking_s += time.perf_counter() - started

    @contextmanager
    def saving(self, manager: Any) -> Iterator[None]:
        """Time one save of TorchTitan's manager, whose `save_future` is new afterwards when it goes on by itself."""
        started, before = time.perf_counter(), manager.save_future
        with self.blocking():
            yield

        def finished(_: Any) -> None:
            self.total_s = time.perf_counter() - started

        if manager.save_future is None or manager.save_future is before:
            finished(None)
        else:
            manager.save_future.add_done_callback(finished)

    def take(self) -> tuple[float, float | None]:
        """(blocking seconds, total seconds of a save that has finished or None) since the last call."""
        taken = self.blocking_s, self.total_s
        self.blocking_s, self.total_s = 0.0, None
        return taken


class PhaseCheckpointManager(CheckpointManager):
    """TorchTitan's checkpoint manager with a start that never falls back to random weights by accident."""

    started_from: Path | None = None  # what `load` used, None for random weights
    failed_saves: int = 0  # in a row
    pending_step: int | None = None  # dispatched, not known to be on disk

    def __init__(
        self, job_config: Any, *, stopping: Callable[[], bool], after_save: Callable[[int], None], **titan: Any
    ):
        """stopping: whether to save at this step boundary, whatever the interval; after_save: called on every rank
        with each saved step; titan: what TorchTitan passes to its CheckpointManager. Raises ValueError.
        """
        super().__init__(**titan)
        section = job_config.checkpoint
        check_settings(section)
        self.run = Path(job_config.job.dump_folder)
        self.keep_every_steps = job_config.resilience.keep_every_steps
        self.max_failed_saves = job_config.resilience.max_failed_saves
        self.optimizer_config = job_config.optimizer
        self.allow_fresh_start = section.allow_fresh_start
        # checkpoint of another run, to continue from with all states
        self.resume_from = Path(section.initial_load_path) if section.initial_load_all_states else None
        self.stopping, self.after_save = stopping, after_save
        self.times = CheckpointTimes()

    def maybe_wait_for_staging(self) -> None:
        """TorchTitan's, timed."""
        with self.times.blocking():
            super().maybe_wait_for_staging()

    def load(self, step: int = -1) -> bool:
        """Restore the job's state. Returns whether anything was loaded. Raises ValueError where that is not safe."""
        if not self.enable:
            self._require_fresh_start("checkpoint.enable = false")
            return False
        folder = Path(self.folder)
        newest = checkpoints.newest_complete_checkpoint
        own = folder / f"step-{step}" if step != -1 else on_rank_zero(lambda: newest(folder))
        if not self.load_only:
            on_rank_zero(lambda: self._clear_branch(folder, own))
        if own is None and self.resume_from is not None:
            own = self.resume_from  # a branch: the first start is a restart from another run's checkpoint
        if own is not None:
            self._load(own, list(self.states))
            self.started_from = own
        elif self.initial_load_path:
            self._start_phase(Path(self.initial_load_path))
        else:
            self._require_fresh_start(f"no complete checkpoint in {self.folder} and no checkpoint.initial_load_path")
            return False
        return True

    def _clear_branch(self, folder: Path, start: Path | None) -> None:
        if start is not None:
            checkpoints.check_complete(start)  # before anything newer is moved
        for name, what in checkpoints.clear_branch(folder, start).items():
            logger.warning(f"{name} is newer than where this job starts: {what}")
            record_event(self.run, "checkpoint_removed", checkpoint=name, what=what)

    def save(self, curr_step: int, last_step: bool = False) -> None:
        """Save where TorchTitan would, or when a stop was asked for; a failure costs this checkpoint, not the job.

        Raises RuntimeError when the last checkpoint, or too many in a row, cannot be written.
        """
        if not self._should_save(curr_step, last_step):
            return
        self.finish()
        self.pending_step = curr_step
        problem = None
        try:
            with self.times.saving(self):
                super().save(curr_step, last_step)
        except CheckpointException as failure:  # on every rank: DCP tells them all
            problem = str(failure)
        if self.save_future is None or problem:
            self._judge(problem)
        if last_step and self.failed_saves:
            raise RuntimeError(f"the last checkpoint, step {curr_step}, could not be written; see events.jsonl")
        if not self.stopping():
            self.after_save(curr_step)

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        wanted = self.stopping() and self.enable and not self.load_only
        return wanted or super()._should_save(curr_step, last_step)

    def finish(self) -> None:
        """Wait until the save under way is on disk, or is known to have failed and taken back."""
        if not self.enable or self.pending_step is None:
            return
        problem = None
        try:
            with self.times.blocking():
                self._async_wait()
        except (CheckpointException, OSError, RuntimeError) as failure:
            problem = str(failure)
        self.save_future = None
        self._judge(problem)

    def _judge(self, problem: str | None) -> None:
        """Settle the pending save: all ranks learn whether any of them failed; what is half written is deleted."""
        step, self.pending_step = self.pending_step, None
        problems: list[str | None] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(problems, problem)
        problem = next((p for p in problems if p), None)
        if problem is None:
            self.failed_saves = 0
            return
        self.failed_saves, self.save_future = self.failed_saves + 1, None
        reason = problem.strip().splitlines()[-1]
        logger.warning(f"Saving step {step} failed ({self.failed_saves} in a row): {reason}")
        on_rank_zero(lambda: self._take_back(Path(self._create_checkpoint_id(step)), reason))
        if self.failed_saves >= self.max_failed_saves:
            raise RuntimeError(
                f"{self.failed_saves} saves in a row have failed, last: {reason}; make room below {self.folder} (old "
                "runs, checkpoint-aside), lower checkpoint.keep_latest_k, or raise resilience.max_failed_saves"
            )

    def _take_back(self, partial: Path, reason: str) -> None:
        if partial.is_dir():
            shutil.rmtree(checkpoints.to_trash(partial), ignore_errors=True)
        step = int(partial.name.removeprefix("step-"))
        record_event(self.run, "save_failed", step=step, in_a_row=self.failed_saves, reason=reason)

    def _purge_stale_checkpoints(self) -> None:
        """Called by TorchTitan after each dispatch; its thread deletes what is handed to it."""
        if self.keep_latest_k > 0 and torch.distributed.get_rank() == 0:
            for path in checkpoints.superseded(Path(self.folder), self.keep_latest_k, self.keep_every_steps):
                self.purge_queue.put(str(checkpoints.to_trash(path)))

    def _require_fresh_start(self, why: str) -> None:
        if not self.allow_fresh_start:
            raise ValueError(
                f"{why}: the job would start from random weights; set checkpoint.allow_fresh_start = true if that is "
                "meant, or checkpoint.initial_load_path to the checkpoint to continue from"
            )
        logger.info("Starting from random weights (checkpoint.allow_fresh_start)")

    def _start_phase(self, parent: Path) -> None:
        wanted = [MODEL] if self.initial_load_model_only else [MODEL, OPTIMIZER]
        stored = self._load(parent, wanted)
        self.started_from = parent
        if f"{DATALOADER}.mixture" in stored:
            state = {DATALOADER: self.states[DATALOADER].state_dict()}
            self.dcp_load(state, str(parent), from_hf=False, from_quantized=False)
            used = json.loads(state[DATALOADER]["mixture"])
            self.states[DATALOADER].begin_at(used["windows"], used["windows_left_out"])
        logger.info(
            f"New phase from {parent}: {' and '.join(wanted)}; schedule, settings and data order are this job's"
        )

    def _load(self, folder: Path, names: list[str]) -> set[str]:
        """Load these states; returns the names of everything that the checkpoint holds."""
        on_rank_zero(lambda: checkpoints.check_complete(folder))
        stored = set(checkpoints.read_metadata(folder).state_dict_metadata)
        states = self._flattened_model_states_sd({name: self.states[name] for name in names})
        missing = sorted(set(self.states[MODEL].state_dict()) - stored)
        if missing:
            raise ValueError(
                f"{folder} lacks {len(missing)} of the model's tensors, first {missing[0]!r}; wrong flavor?"
            )
        logger.info(f"Loading {', '.join(names)} from {folder}")
        self.dcp_load(states, str(folder), from_hf=False, from_quantized=False)
        if OPTIMIZER in names:
            apply_optimizer_settings(self.states[OPTIMIZER], self.states["lr_scheduler"], self.optimizer_config)
        return stored


def check_settings(section: Any) -> None:
    """ValueError for settings of [checkpoint] that contradict each other or how this manager starts a job."""
    if section.initial_load_all_states and not section.initial_load_path:
        raise ValueError("checkpoint.initial_load_all_states needs checkpoint.initial_load_path")
    if section.exclude_from_loading:
        raise ValueError(
            f"checkpoint.exclude_from_loading = {section.exclude_from_loading} would drop these states at every "
            "restart too; remove it: a new phase takes weights and moments only, a restart takes everything"
        )
    if section.initial_load_in_hf:
        raise ValueError(
            "checkpoint.initial_load_in_hf is not supported; turn the folder into a checkpoint with "
            "`python -m tools.import_hf --hf DIR --out RUN_DIR` and give that as checkpoint.initial_load_path"
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
