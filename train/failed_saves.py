"""Take failed saves back: each costs its checkpoint, and the job only if save after save fails."""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path

from torchtitan.tools.logging import logger

from records import checkpoints
from records.events import record_event

from .checkpoint_checks import on_rank_zero

RETRY_S = 60.0  # between two saves on a full disk
FULL_DISK = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT))


class FailedSaves:
    """The failures since the last save that succeeded, equal on all ranks."""

    problem: str | None = None  # of the last save
    # failures on a full disk are not counted
    in_a_row: int = 0
    # on the monotonic clock; None: the disk is not known to be full
    retry_at_s: float | None = None

    def __init__(self, run: Path, folder: Path, max_in_a_row: int):
        """Initialize without failures; `max_in_a_row` in a row end the job."""
        self.run, self.folder, self.max_in_a_row = run, folder, max_in_a_row

    @property
    def retry_is_due(self) -> bool:
        return self.retry_at_s is not None and time.monotonic() >= self.retry_at_s

    def record_result(self, step: int, problem: str | None) -> None:
        """Count how a save has ended; take back one that failed, RuntimeError when too many in a row have.

        Args:
            problem: a traceback of any rank, None for success.
        """
        self.problem, self.retry_at_s = None, None
        if problem is None:
            self.in_a_row = 0
            return
        # by its words: the exception has crossed a process as a traceback
        full = any(words in problem for words in FULL_DISK)
        self.problem = reason = problem.strip().splitlines()[-1]
        self.in_a_row += not full
        what = f"tried again every {RETRY_S:.0f} s" if full else f"{self.in_a_row} in a row"
        logger.warning(f"Saving step {step} failed ({what}): {reason}")
        made_room = on_rank_zero(lambda: self._clean(step, full))
        # a full disk never ends a job before its last step, since memory holds everything
        if full:
            self.retry_at_s = time.monotonic() + (0.0 if made_room else RETRY_S)
        elif self.in_a_row >= self.max_in_a_row:
            raise RuntimeError(
                f"{self.in_a_row} saves in a row have failed, last: {reason}; see events.jsonl, or raise "
                "resilience.max_failed_saves"
            )

    def require_saved(self, step: int) -> None:
        """RuntimeError if the save of the job's last step has failed."""
        if self.problem:
            raise RuntimeError(
                f"the last checkpoint, step {step}, could not be written: {self.problem}; make room below "
                f"{self.folder} and start the job again, which continues from its newest checkpoint"
            )

    def _clean(self, step: int, full: bool) -> bool:
        """Delete what the save has written; return whether more room was made."""
        partial = self.folder / f"step-{step}"
        if partial.is_dir():
            shutil.rmtree(checkpoints.to_trash(partial), ignore_errors=True)
        record_event(
            self.run, "save_failed", step=step, in_a_row=self.in_a_row, reason=self.problem
        )
        return full and make_room(self.run, self.folder)


def make_room(run: Path, folder: Path) -> bool:
    """Delete what this run has put aside; return whether any of it is gone."""
    aside = [
        *folder.glob(f"{checkpoints.TRASH}*"),
        *folder.with_name(f"{folder.name}-aside").glob("*"),
    ]
    for path in aside:
        shutil.rmtree(path, ignore_errors=True)
        record_event(
            run, "checkpoint_removed", checkpoint=path.name, what="deleted: the disk is full"
        )
    # looked at again, since deletions that fail are ignored
    return any(not path.exists() for path in aside)
