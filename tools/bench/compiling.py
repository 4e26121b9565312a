"""Kernels compiled by as many processes as there are cores, the first ones first."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from typing import Any

from tools.bench.harness import Result


def in_order(jobs: Mapping[str, Callable[[], object]], seconds: float, cores: int | None = None) -> Result:
    """{"units", "late", "failed", "compile_s"}; what has not ended in time is late.

    Each job has a process of its own: one that crashes takes no other with it, and one core's worth of time
    goes to one after another, so that what is needed first is there first.
    """
    start, fork = time.monotonic(), multiprocessing.get_context("fork")
    left, running, failed = list(jobs), dict[str, Any](), list[str]()
    while left or running:
        while left and len(running) < (cores or len(os.sched_getaffinity(0))):
            name = left.pop(0)
            running[name] = fork.Process(target=jobs[name], daemon=True)
            running[name].start()
        rest = start + seconds - time.monotonic()
        if not wait([process.sentinel for process in running.values()], max(0.0, rest)):
            break
        for name in [name for name, process in running.items() if not process.is_alive()]:
            if running.pop(name).exitcode:
                failed.append(name)
    for process in running.values():
        process.kill()
    return {
        "units": len(jobs), "late": ", ".join([*running, *left]) or "none", "failed": ", ".join(failed) or "none",
        "compile_s": round(time.monotonic() - start, 1),
    }  # fmt: skip
