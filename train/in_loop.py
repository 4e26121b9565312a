"""Evaluate after a save (`evals.in_loop`): rank 0 runs the watcher once, and all ranks wait for it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torchtitan.tools.logging import logger

from records.events import record_event

from .supervise import signals
from .supervise.workers import end_workers

# seconds from SIGTERM to SIGKILL
END_S = 30.0
# set by torchrun and wandb for this worker; an evaluation is not one, and may use all cores
OF_A_WORKER = re.compile(
    "RANK$|WORLD_SIZE$|LOCAL_|MASTER_|OMP_NUM_THREADS$|GROUP_|ROLE_|TORCHELASTIC_|WANDB_SERVICE"
)


class InLoop:
    """The evaluations of a job; every rank constructs it, as it creates a process group."""

    def __init__(self, job_config: Any):
        self.run = Path(job_config.job.dump_folder)
        hang_timeout_s = job_config.resilience.hang_timeout_s
        # after hang_timeout_s the supervisor assumes a hang
        self.limit_s = 0.9 * hang_timeout_s
        # the other groups time out after comm.train_timeout_seconds, which is meant for a step
        timeout = timedelta(seconds=hang_timeout_s + END_S)
        self.group = torch.distributed.new_group(timeout=timeout, backend="gloo")

    def evaluate(self, step: int) -> float:
        """Evaluate all checkpoints without a record; every rank calls it. Returns seconds."""
        started = time.perf_counter()
        # a failed evaluation does not end the job: without a record, it is tried again at the next one
        if torch.distributed.get_rank() == 0 and (problem := self.run_watcher()):
            logger.warning(f"Evaluation at step {step}: {problem}")
            record_event(self.run, "evaluation_failed", step=step, reason=problem)
        torch.distributed.barrier(group=self.group)
        seconds = time.perf_counter() - started
        logger.info(f"evaluation  step: {step}  {seconds:.1f} s")
        return seconds

    def run_watcher(self) -> str | None:
        """Run the watcher once; return what went wrong."""
        env = {name: value for name, value in os.environ.items() if not OF_A_WORKER.match(name)}
        command = [sys.executable, "-m", "evals.watch", "--run", str(self.run), "--once"]
        process, until_s = subprocess.Popen(command, env=env), time.monotonic() + self.limit_s
        while process.poll() is None:
            time.sleep(0.2)
            stopping = signals.WORKER.request or (self.run / "stop").exists()
            if stopping or time.monotonic() > until_s:
                # SIGTERM first, so that the watcher can end what it started
                end_workers(process, END_S)
                too_late = f"ended after {self.limit_s:.0f} s; raise resilience.hang_timeout_s"
                return None if stopping else too_late
        return (
            f"exit status {process.returncode}, see {self.run}/logs/evals"
            if process.returncode
            else None
        )
