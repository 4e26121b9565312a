"""`evals.in_loop`: the job evaluates its own checkpoints, for a small run without a core or GPU to
spare for a watcher.

Rank 0 starts `python -m evals.watch --run RUN --once` and all ranks wait for it in a process group of their
own: the other groups time out after comm.train_timeout_seconds, which is meant for a step. A failed
evaluation does not end the job; like everything without a record it is retried at the next evaluation.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torchtitan.tools.logging import logger

from records.evals import wanted
from records.events import record_event

from .supervise import signals
from .supervise.attempt import end_workers

POLL_S = 0.2
END_S = 30.0  # from SIGTERM to SIGKILL
# set by torchrun and wandb for this worker; an evaluation is not one, and may use all cores
OF_A_WORKER = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
)
PREFIXES = ("GROUP_", "ROLE_", "TORCHELASTIC_", "WANDB_SERVICE")


class InLoop:
    """The evaluations of a job; constructed on every rank, since it creates a process group.

    Raises ValueError for settings that would never evaluate anything.
    """

    def __init__(self, job_config: Any):
        section, interval = job_config.evals, job_config.checkpoint.interval
        if section.every_steps < 1 or section.every_steps % interval or not section.commands:
            raise ValueError(
                f"evals.in_loop evaluates saved checkpoints: it needs evals.commands, and evals.every_steps = "
                f"{section.every_steps} must be a multiple of checkpoint.interval = {interval}"
            )
        self.run, self.every_steps = Path(job_config.job.dump_folder), section.every_steps
        self.last_step = job_config.training.steps
        hang_timeout_s = job_config.resilience.hang_timeout_s
        self.limit_s = 0.9 * hang_timeout_s  # after more the supervisor assumes a hang
        self.group = torch.distributed.new_group(
            timeout=timedelta(seconds=hang_timeout_s + END_S), backend="gloo"
        )

    def wanted(self, step: int) -> bool:
        return wanted(step, self.every_steps, self.last_step)

    def evaluate(self, step: int) -> float:
        """Evaluate all checkpoints without a record, that of `step` included; called on
        every rank. Returns seconds.
        """
        started = time.perf_counter()
        if torch.distributed.get_rank() == 0:
            problem = self._watch_once()
            if problem:
                logger.warning(f"Evaluation at step {step}: {problem}")
                record_event(self.run, "evaluation_failed", step=step, reason=problem)
        torch.distributed.barrier(group=self.group)
        seconds = time.perf_counter() - started
        logger.info(f"evaluation  step: {step}  {seconds:.1f} s")
        return seconds

    def _watch_once(self) -> str | None:
        """Run the watcher to its end; returns what went wrong."""
        command = [sys.executable, "-m", "evals.watch", "--run", str(self.run), "--once"]
        kept = {k: v for k, v in os.environ.items() if k not in OF_A_WORKER and not k.startswith(PREFIXES)}
        process, began_s = subprocess.Popen(command, env=kept), time.monotonic()
        while process.poll() is None:
            time.sleep(POLL_S)
            stopping = bool(signals.WORKER.asked) or (self.run / "stop").exists()
            if stopping or time.monotonic() - began_s > self.limit_s:
                end_workers(process, END_S)  # and what it started
                # after a stop the next start catches up
                return (
                    None if stopping else f"ended after {self.limit_s:.0f} s; raise resilience.hang_timeout_s"
                )
        return f"exit status {process.returncode}, see {self.run}/logs/evals" if process.returncode else None
