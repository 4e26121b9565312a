"""Worker processes: how many, and that none outlives whoever started it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading


def usable_cpus() -> int:
    # a job of Slurm or a container often has fewer than `os.cpu_count()`
    return len(os.sched_getaffinity(0))


def end_with_parent() -> None:
    """End this `multiprocessing` worker when its parent is gone, however that ended."""
    # workers of a process that was killed would wait for work forever, and keep their memory and GPUs
    threading.Thread(target=_wait_for_the_end, daemon=True).start()


def _wait_for_the_end() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "only workers run this"
    parent.join()
    # not sys.exit: exit handlers of a pool wait for the process that is gone
    os.kill(os.getpid(), signal.SIGKILL)
