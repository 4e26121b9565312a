"""Where a job starts, and what it keeps: checkpoints that can be trusted while disks fill and processes die.

Start: the run's own newest complete checkpoint, else the phase before, else (only if allowed) random weights.
TorchTitan 0.2.2 decides this by whether the checkpoint folder exists, trusts the newest `.metadata`, and lets
a second phase inherit the first one's optimizer settings. Saving: its writer is kept; a save that fails is
taken back and tried again at the next interval, on a full disk every minute, and old checkpoints go only when
newer ones are complete.
"""

from __future__ import annotations

import atexit
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torchtitan.components.checkpoint import (
    DATALOADER,
    MODEL,
    OPTIMIZER,
    AsyncMode,
    CheckpointManager,
)
from torchtitan.tools.logging import logger

from laneformer.config import HEAD_FIELDS, MTP, LaneformerConfig
from laneformer.tensors import check_shapes
from records import checkpoints
from records.events import record_event

from .checkpoint_checks import Contents, first_problem, on_rank_zero, require_nothing_lost
from .checkpoint_writer import HashingWriter, end_background
from .failed_saves import FailedSaves
from .optimizer import apply_optimizer_settings
from .supervise.heartbeat import enter


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
        """Time one save of TorchTitan's manager, whose `save_future` is new afterwards when it
        goes on by itself.
        """
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
    pending_step: int | None = None  # dispatched, not known to be on disk
    retrying: bool = False  # on a disk that was full, whatever the interval

    def __init__(
        self,
        job_config: Any,
        *,
        architecture: Callable[[], LaneformerConfig],
        stopping: Callable[[], bool],
        after_save: Callable[[int], None],
        **titan: Any,
    ):
        """architecture: the model's config; stopping: whether to save at this step boundary, whatever
        the interval; after_save: called on every rank with each saved step; titan: what TorchTitan
        passes to its CheckpointManager.
        """
        super().__init__(**titan)
        atexit.register(
            end_background
        )  # runs before multiprocessing's own, which was registered earlier
        section, resilience = job_config.checkpoint, job_config.resilience
        self.architecture, self.allow_changes = architecture(), section.allow_changes
        self.run = Path(job_config.job.dump_folder)
        self.keep_every_steps = resilience.keep_every_steps
        self.failed = FailedSaves(self.run, self.run / section.folder, resilience.max_failed_saves)
        self.optimizer_config = job_config.optimizer
        self.allow_fresh_start = section.allow_fresh_start
        # checkpoint of another run, to continue from with all states
        self.resume_from = (
            Path(section.initial_load_path) if section.initial_load_all_states else None
        )
        self.stopping, self.after_save = stopping, after_save
        self.times = CheckpointTimes()
        self.contents = Contents()

    def maybe_wait_for_staging(self) -> None:
        """TorchTitan's, timed."""
        with self.times.blocking():
            super().maybe_wait_for_staging()

    def load(self, step: int = -1) -> bool:
        """Restore the job's state. Returns whether anything was loaded; ValueError where that is not safe."""
        if not self.enable:
            require_fresh_start(self.allow_fresh_start, "checkpoint.enable = false")
            return False
        folder = Path(self.folder)
        own = folder / f"step-{step}" if step != -1 else self.contents.newest_undamaged(folder)
        if own is not None:
            self.contents.check(own, self.architecture)
        else:
            on_rank_zero(
                lambda: require_nothing_lost(self.run, folder, self.interval * self.failed.most)
            )
        if not self.load_only:
            on_rank_zero(lambda: clear_branch(self.run, folder, own))
        if own is None and self.resume_from is not None:
            own = (
                self.resume_from
            )  # a branch: the first start is a restart from another run's checkpoint
            self.contents.check(own, self.architecture, self.allow_changes)
        if own is not None:
            self._load(own, list(self.states))
            self.started_from = own
        elif self.initial_load_path:
            self._start_phase(Path(self.initial_load_path))
        else:
            require_fresh_start(
                self.allow_fresh_start,
                f"no complete checkpoint in {self.folder} and no checkpoint.initial_load_path",
            )
            return False
        return True

    def save(self, curr_step: int, last_step: bool = False) -> None:
        """Save where TorchTitan would, when a stop was asked for, or again on a disk that was full; a
        failure costs this checkpoint, not the job.

        Raises RuntimeError when the last checkpoint, or too many in a row, cannot be written.
        """
        self._look()
        if not self._should_save(curr_step, last_step):
            return
        self._save(curr_step, last_step)
        if last_step and self.failed.retry_is_due:
            self._save(curr_step, last_step)  # into the room that was made
        if last_step:
            self.failed.require_saved(curr_step)
        if not self.stopping():
            self.after_save(curr_step)

    def _look(self) -> None:
        """Judge a save that has ended in the background, and see whether to try again; rank 0 decides."""
        if self.pending_step is None and self.failed.retry_at_s is None:
            return
        enter("the look at the last save")
        future = self.save_future
        ended, self.retrying = on_rank_zero(
            lambda: (future is None or future.done(), self.failed.retry_is_due)
        )
        if ended:
            self.finish()

    def _save(self, curr_step: int, last_step: bool) -> None:
        enter(f"saving step {curr_step}")
        self.finish()
        self.pending_step, self.failed.retry_at_s = curr_step, None
        problem = None
        try:
            with self.times.saving(self):
                super().save(curr_step, last_step)
        except CheckpointException as failure:  # on every rank: DCP tells them all
            problem = str(failure)
        if self.save_future is None or problem:
            self._judge(problem)

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        wanted = (self.stopping() or self.retrying) and self.enable and not self.load_only
        return wanted or super()._should_save(curr_step, last_step)

    def finish(self) -> None:
        """Wait until the save under way is on disk, or is known to have failed and taken back."""
        if self.pending_step is None:
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
        """Settle the pending save: all ranks learn whether any of them failed; what is
        half written is deleted.
        """
        step, self.pending_step = self.pending_step, None
        assert step is not None, "a save is pending"
        enter(
            f"the verdict on the save of step {step}"
        )  # a rank whose save never ends has not come here
        problem = first_problem(problem)
        self.retrying = False
        if problem:
            self.save_future = None
            end_background()
        self.failed.judge(step, problem)

    def _purge_stale_checkpoints(self) -> None:
        """Called by TorchTitan after each dispatch; its thread deletes what is handed to it."""
        if self.keep_latest_k > 0 and torch.distributed.get_rank() == 0:
            for path in checkpoints.superseded(
                Path(self.folder), self.keep_latest_k, self.keep_every_steps
            ):
                self.purge_queue.put(str(checkpoints.to_trash(path)))

    def _start_phase(self, parent: Path) -> None:
        wanted = [MODEL] if self.initial_load_model_only else [MODEL, OPTIMIZER]
        adds_head: bool = on_rank_zero(lambda: lacks_head(parent, self.architecture))
        self.contents.check(parent, self.architecture, self.allow_changes + adds_head * HEAD_FIELDS)
        stored = self._load(parent, wanted, adds_head)
        self.started_from = parent
        if f"{DATALOADER}.mixture" in stored:
            state = {DATALOADER: self.states[DATALOADER].state_dict()}
            self.dcp_load(state, str(parent), from_hf=False, from_quantized=False)
            self.states[DATALOADER].begin_after(json.loads(state[DATALOADER]["mixture"]))
        read = " and ".join(wanted)
        logger.info(
            f"New phase from {parent}: {read}; schedule, settings and data order are this job's"
        )

    def _load(self, folder: Path, names: list[str], adds_head: bool = False) -> set[str]:
        """Load these states, but no head that drafts where it is added; returns the checkpoint's names."""
        stored = checkpoints.read_metadata(folder).state_dict_metadata
        states = self._flattened_model_states_sd({name: self.states[name] for name in names})
        states, model = (
            without_head(s, adds_head) for s in (states, self.states[MODEL].state_dict())
        )
        others = tuple(f"{name}." for name in self.states if name != MODEL)
        shapes = {name: entry.size for name, entry in stored.items() if not name.startswith(others)}
        expected = {name: tensor.shape for name, tensor in model.items()}
        check_shapes(
            str(folder),
            shapes,
            expected,
            "; set model.flavor and [architecture] to the checkpoint's",
        )
        logger.info(f"Loading {', '.join(names)} from {folder}")
        self.dcp_load(states, str(folder), from_hf=False, from_quantized=False)
        if OPTIMIZER in names:
            apply_optimizer_settings(
                self.states[OPTIMIZER], self.states["lr_scheduler"], self.optimizer_config
            )
        return set(stored)

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """TorchTitan's, with our writer in place of the one that DCP derives from the folder's name."""
        writer = HashingWriter(
            checkpoint_id, json.dumps(self.architecture.to_dict(), indent=2) + "\n"
        )
        if async_mode == AsyncMode.DISABLED:
            dcp.save(state_dict, storage_writer=writer)
            return None
        background: dict[str, Any] = {}
        if async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
            background["async_checkpointer_type"] = AsyncCheckpointerType.PROCESS
            background["async_stager"] = self.stager
        return dcp.async_save(
            state_dict, storage_writer=writer, process_group=self.pg, **background
        )


def without_head(states: dict[str, Any], adds_head: bool) -> dict[str, Any]:
    """Of a flat dictionary the states that a checkpoint without a head for multi-token prediction has."""
    return {name: each for name, each in states.items() if not (adds_head and name.startswith(MTP))}


def lacks_head(checkpoint: Path, config: LaneformerConfig) -> bool:
    """Whether a checkpoint has no head for multi-token prediction where the job's architecture has one."""
    checkpoints.check_complete(checkpoint)
    stored = checkpoints.read_metadata(checkpoint).state_dict_metadata
    return config.num_nextn_predict_layers > 0 and not any(name.startswith(MTP) for name in stored)


def clear_branch(run: Path, folder: Path, start: Path | None) -> None:
    """Put aside the checkpoints that are newer than the one that the job starts from."""
    for name, what in checkpoints.clear_branch(folder, start).items():
        logger.warning(f"{name} is newer than where this job starts: {what}")
        record_event(run, "checkpoint_removed", checkpoint=name, what=what)


def require_fresh_start(allowed: bool, why: str) -> None:
    """ValueError for a job that would start from random weights, unless that is allowed."""
    if not allowed:
        raise ValueError(
            f"{why}: the job would start from random weights; set checkpoint.allow_fresh_start = true if that is "
            "meant, or checkpoint.initial_load_path to the checkpoint to continue from"
        )
    logger.info("Starting from random weights (checkpoint.allow_fresh_start)")
