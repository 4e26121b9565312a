"""Lock a run folder: one supervisor (or unsupervised job) may work in it, and one process for every rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TextIO

from records.events import SUPERVISED
from records.files import hold_lock

# until killed workers are gone, and the file server has noticed that a node is
OLD_WORKERS_S = 120.0


def hold_run(run: Path) -> TextIO:
    """Lock a run for this process; raise Held if another has it."""
    stop = "end it (SIGTERM saves a checkpoint first) or choose another job.dump_folder"
    return hold_lock(run / ".supervisor.lock", f"another supervisor or job runs {run}; {stop}")


def require_no_ranks(run: Path) -> None:
    """Raise Held if a worker of a supervisor that died is still alive."""
    # a supervisor may die while its workers live on, on other nodes too: each holds a lock of its own
    for path in sorted((run / ".ranks").glob("*.lock")):
        hold_lock(
            path, f"a worker of an earlier supervisor is alive in {run}; `touch {run}/stop` ends it"
        ).close()


def hold_rank(run: Path, rank: int) -> tuple[TextIO, ...]:
    """Lock a rank and, for rank 0 of a job without a supervisor, the run; raise Held if another process has one."""
    supervised = SUPERVISED in os.environ
    locks = [] if supervised or rank else [hold_run(run)]
    problem = f"rank {rank} of another job is alive in {run}"
    return *locks, hold_lock(
        run / ".ranks" / f"{rank}.lock", problem, OLD_WORKERS_S if supervised else 0.0
    )
