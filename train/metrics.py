"""metrics.jsonl: TorchTitan's metrics processor, which also writes every logged step as one JSON line."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.distributed import ParallelDims
from torchtitan.tools import utils

from laneformer.provenance import append_line


class RunMetrics(MetricsProcessor):
    """Console, TensorBoard and wandb as TorchTitan does them; the run's own record on rank 0 beside them."""

    def __init__(self, job_config: Any, parallel_dims: ParallelDims, tag: str | None = None):
        super().__init__(job_config, parallel_dims, tag)
        self.path = Path(job_config.job.dump_folder) / "metrics.jsonl"
        self.attempt = 0  # set by the trainer once the attempt is on record
        self.tokens_before = 0  # of earlier phases
        self.last_logged_step = 0

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        seconds = time.perf_counter() - self.time_last_log
        data_s = sum(self.data_loading_times)
        training = self.job_config.training
        tokens = step * training.global_batch_size * training.seq_len
        steps = step - self.last_logged_step
        tokens_per_s = steps * training.global_batch_size * training.seq_len / seconds
        devices = torch.distributed.get_world_size()
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)
        self.last_logged_step = step
        if torch.distributed.get_rank() != 0:
            return
        # an unknown device has no peak to compare with: null, not TorchTitan's guess of an A100
        known_peak = utils.device_type != "cpu"
        mfu = 100 * self.num_flops_per_token * tokens_per_s / (devices * self.gpu_peak_flops) if known_peak else None
        record = {
            "step": step,
            "phase": self.job_config.phase.name,
            "attempt": self.attempt,
            "loss": global_avg_loss,
            "max_loss": global_max_loss,
            "lr": (extra_metrics or {}).get("lr"),
            "grad_norm": grad_norm,
            "tokens": tokens,
            "tokens_total": self.tokens_before + tokens,
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_per_device": tokens_per_s / devices,
            "mfu": mfu,
            "data_s": data_s,
            "seconds": seconds,
            "time": time.time(),
        }
        append_line(self.path, json.dumps({k: _finite(v) for k, v in record.items()}))


def _finite(value: Any) -> Any:
    """JSON has no NaN: a diverged loss is written as null, and the dashboard shows a gap."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def build_run_metrics(
    job_config: Any, parallel_dims: ParallelDims, model_args: Any = None, tag: str | None = None
) -> RunMetrics:
    """TorchTitan's metrics builder; a restarted run continues its own wandb run, offline or online."""
    run = Path(job_config.job.dump_folder).resolve()
    os.environ.setdefault("WANDB_PROJECT", "laneformer")
    os.environ.setdefault("WANDB_RUN_NAME", run.name)
    os.environ.setdefault("WANDB_RUN_ID", hashlib.sha256(str(run).encode()).hexdigest()[:16])
    os.environ.setdefault("WANDB_RESUME", "allow")
    return RunMetrics(job_config, parallel_dims, tag)
