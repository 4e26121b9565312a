"""Save checkpoints while disks fill and processes die.

A save that fails is taken back and tried again at the next interval, on a full disk every minute.
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
from torchtitan.components.checkpoint import AsyncMode, CheckpointManager

from laneformer.config import LaneformerConfig
from records import checkpoints

from .checkpoint_checks import first_problem, on_rank_zero
from .checkpoint_writer import HashingWriter, end_background
from .failed_saves import FailedSaves
from .supervise.heartbeat import enter


class CheckpointTimes:
    """Seconds of saving since the last `take`."""

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
        """Time one save of TorchTitan's manager."""
        started, before = time.perf_counter(), manager.save_future
        with self.blocking():
            yield

        def note_end(_: Any) -> None:
            self.total_s = time.perf_counter() - started

        # a save that was skipped or synchronous leaves no new future
        if manager.save_future is None or manager.save_future is before:
            note_end(None)
        else:
            manager.save_future.add_done_callback(note_end)

    def take(self) -> tuple[float, float | None]:
        """Return the blocking seconds, and the total of a save that has finished or None."""
        times = self.blocking_s, self.total_s
        self.blocking_s, self.total_s = 0.0, None
        return times


class CheckpointSaver(CheckpointManager):
    """TorchTitan's checkpoint manager, whose job survives a checkpoint that cannot be written.

    A save is pending from its dispatch (`_save`) until it is settled (`_settle`): at once if it is
    synchronous or fails, else when `_poll_pending` or `wait_for_save` sees its end. Settled, it is on
    disk or taken back, the same on all ranks. After a full disk a retry is due at `failed.retry_at_s`,
    which `_poll_pending` turns into `retrying` and `_should_save` into the next save.
    """

    pending_step: int | None = None  # dispatched, not known to be on disk
    retrying: bool = False  # on a disk that was full, whatever the interval

    def __init__(
        self,
        job_config: Any,
        architecture: LaneformerConfig,
        stopping: Callable[[], bool],
        after_save: Callable[[int], None],
        titan: dict[str, Any],
    ):
        """Initialize the saving side.

        Args:
            architecture: written beside each checkpoint.
            stopping: whether to save at this step boundary, whatever the interval.
            after_save: called on every rank with each saved step.
            titan: TorchTitan's arguments of its CheckpointManager.
        """
        super().__init__(**titan)
        # runs before multiprocessing's own handler, which was registered earlier
        atexit.register(end_background)
        resilience = job_config.resilience
        self.architecture, self.stopping, self.after_save = architecture, stopping, after_save
        self.run = Path(job_config.job.dump_folder)
        self.keep_every_steps = resilience.keep_every_steps
        folder = self.run / job_config.checkpoint.folder
        self.failed = FailedSaves(self.run, folder, resilience.max_failed_saves)
        self.times = CheckpointTimes()

    def maybe_wait_for_staging(self) -> None:
        with self.times.blocking():
            super().maybe_wait_for_staging()

    def save(self, curr_step: int, last_step: bool = False) -> None:
        """Save where TorchTitan would, when a stop was asked for, or again on a disk that was full.

        Raises:
            RuntimeError: the last checkpoint, or too many in a row, cannot be written.
        """
        self._poll_pending()
        if not self._should_save(curr_step, last_step):
            return
        self._save(curr_step, last_step)
        if last_step and self.failed.retry_is_due:
            # into the room that the failed save has made
            self._save(curr_step, last_step)
        if last_step:
            self.failed.require_saved(curr_step)
        # an evaluation would use up the time that a stop request leaves
        if not self.stopping():
            self.after_save(curr_step)

    def _poll_pending(self) -> None:
        """Settle a save that has ended in the background; rank 0 decides whether to try again."""
        if self.pending_step is None and self.failed.retry_at_s is None:
            return
        enter("the look at the last save")
        future = self.save_future
        ended, self.retrying = on_rank_zero(
            lambda: (future is None or future.done(), self.failed.retry_is_due)
        )
        if ended:
            self.wait_for_save()

    def _save(self, curr_step: int, last_step: bool) -> None:
        enter(f"saving step {curr_step}")
        # TorchTitan can have one save under way
        self.wait_for_save()
        self.pending_step, self.failed.retry_at_s = curr_step, None
        problem = None
        try:
            with self.times.saving(self):
                super().save(curr_step, last_step)
        except CheckpointException as failure:
            # on every rank: DCP tells them all
            problem = str(failure)
        if self.save_future is None or problem:
            self._settle(problem)

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        due = (self.stopping() or self.retrying) and self.enable and not self.load_only
        return due or super()._should_save(curr_step, last_step)

    def wait_for_save(self) -> None:
        """Wait until the save under way is on disk, or taken back."""
        if self.pending_step is None:
            return
        problem = None
        try:
            with self.times.blocking():
                self._async_wait()
        except (CheckpointException, OSError, RuntimeError) as failure:
            problem = str(failure)
        self.save_future = None
        self._settle(problem)

    def _settle(self, problem: str | None) -> None:
        """Settle the pending save: all ranks learn whether any failed; what is half written is deleted."""
        step, self.pending_step = self.pending_step, None
        assert step is not None, "a save is pending"
        # a rank whose save never ends has not come here
        enter(f"the verdict on the save of step {step}")
        problem = first_problem(problem)
        self.retrying = False
        if problem:
            self.save_future = None
            # the process may have died, or hang in the file system that failed
            end_background()
        self.failed.record_result(step, problem)

    def _purge_stale_checkpoints(self) -> None:
        """Hand what may go to TorchTitan's thread, which deletes it."""
        if self.keep_latest_k > 0 and torch.distributed.get_rank() == 0:
            # old checkpoints go only when newer ones are complete
            for path in checkpoints.list_superseded(
                Path(self.folder), self.keep_latest_k, self.keep_every_steps
            ):
                self.purge_queue.put(str(checkpoints.to_trash(path)))

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
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
