"""metrics.jsonl: TorchTitan's metrics processor, which also writes every logged step as one JSON line.

Console, TensorBoard and wandb get what TorchTitan logs and, beside it, what the line holds: loss by source,
z-scores, tokens by source, checkpoint time, validation loss. One row a logged step; a validation adds to its row.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.distributed import ParallelDims
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from records.files import append_line, read_lines, replace_last_line
from records.run import name_wandb_run

from .checkpoint_times import CheckpointTimes
from .data import MixtureLoader
from .source_losses import SourceLosses
from .statistics import RunningZ

Z_WINDOW = 128  # logged steps


class RunMetrics(MetricsProcessor):
    """Console, TensorBoard and wandb as TorchTitan does them; beside them the run's own record (rank 0)."""

    def __init__(self, job_config: Any, parallel_dims: ParallelDims, tag: str | None = None):
        super().__init__(job_config, parallel_dims, tag)
        self.path = Path(job_config.job.dump_folder) / "metrics.jsonl"
        self.attempt = 0  # set by the trainer once the attempt is on record
        self.tokens_before = 0  # of earlier phases
        self.last_logged_step = 0
        self.row: dict[str, Any] = {}  # the last one written
        self.loss_z, self.grad_norm_z = RunningZ(Z_WINDOW), RunningZ(Z_WINDOW)

    def sees(self, loader: MixtureLoader, source_losses: SourceLosses, checkpoint_times: CheckpointTimes) -> None:
        """Take the parts of the job that are logged; TorchTitan builds the metrics before them."""
        self.loader, self.source_losses, self.checkpoint_times = loader, source_losses, checkpoint_times

    def continue_after(self, step: int) -> None:
        """Begin an attempt behind `step`: the z-scores go on from the rows that led there."""
        self.last_logged_step = step
        if torch.distributed.get_rank() != 0:
            return
        by_step = {row["step"]: row for row in read_lines(self.path) if row["step"] <= step}
        for row in [by_step[step] for step in sorted(by_step)][-Z_WINDOW:]:
            for z, key in ((self.loss_z, "loss"), (self.grad_norm_z, "grad_norm")):
                z.add(math.nan if row.get(key) is None else row[key])

    def should_log(self, step: int) -> bool:
        """Also the last step, whose checkpoint is the one that is used."""
        return super().should_log(step) or step == self.job_config.training.steps

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """One logged step; called on every rank, since the loss by source is summed over them."""
        throughput, memory = self._throughput(step), self.device_memory_monitor.get_peak_stats()
        losses = self.source_losses.reduce(self.parallel_dims.get_optional_mesh("loss"))
        checkpoint_s, checkpoint_total_s = self.checkpoint_times.take()
        training, names = self.job_config.training, self.loader.mixture.source_names
        tokens = step * training.global_batch_size * training.seq_len
        row = {
            "step": step,
            "phase": self.job_config.phase.name,
            "attempt": self.attempt,
            "loss": global_avg_loss,
            "max_loss": global_max_loss,
            "loss_z": self.loss_z.score(global_avg_loss),
            "loss_by_source": {n: loss for n, loss in zip(names, losses, strict=True) if loss is not None},
            "lr": (extra_metrics or {}).get("lr"),
            "grad_norm": grad_norm,
            "grad_norm_z": self.grad_norm_z.score(grad_norm),
            "tokens": tokens,
            "tokens_total": self.tokens_before + tokens,
            "tokens_by_source": self.loader.tokens_per_source(),
            **throughput,
            "checkpoint_s": round(checkpoint_s, 3),  # asking whether there is something to wait for is no wait
            "checkpoint_total_s": checkpoint_total_s,
            "memory_gib": memory.max_reserved_gib,
            "memory_active_gib": memory.max_active_gib,
            "time": time.time(),
        }
        self.loss_z.add(global_avg_loss)
        self.grad_norm_z.add(grad_norm)
        super().log(step, global_avg_loss, global_max_loss, grad_norm, {**(extra_metrics or {}), **_scalars(row)})
        self.last_logged_step = step
        if torch.distributed.get_rank() == 0:
            self.row = row
            append_line(self.path, _json_line(row))

    def _throughput(self, step: int) -> dict[str, float | None]:
        """Speed of the whole job since the last row, and for how long rank 0 waited for data."""
        seconds = time.perf_counter() - self.time_last_log
        training, devices = self.job_config.training, torch.distributed.get_world_size()
        tokens_per_s = (step - self.last_logged_step) * training.global_batch_size * training.seq_len / seconds
        # an unknown device has no peak to compare with: null, not TorchTitan's guess of an A100
        known_peak = utils.device_type != "cpu"
        mfu = 100 * self.num_flops_per_token * tokens_per_s / (devices * self.gpu_peak_flops) if known_peak else None
        return {
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_per_device": tokens_per_s / devices,
            "mfu": mfu,
            "data_s": sum(self.data_loading_times),
            "seconds": seconds,
        }

    def log_held_out(self, step: int, loss: float, by_source: dict[str, float], seconds: float) -> None:
        """Add a validation to the row of its step; the time it took counts in no throughput."""
        self.time_last_log += seconds
        row = {**self.row, "valid_loss": loss, "valid_loss_by_source": by_source, "valid_s": seconds}
        scalars = {"valid_loss": loss, **{f"valid_loss_by_source/{name}": value for name, value in by_source.items()}}
        self.logger.log(scalars, step)
        logger.info(f"validation  step: {step}  loss: {loss:.4f}  {seconds:.1f} s")
        if torch.distributed.get_rank() == 0:
            assert self.row.get("step") == step, f"validation at step {step}, the last row is {self.row.get('step')}"
            replace_last_line(self.path, _json_line(self.row), _json_line(row))
            self.row = row


def _scalars(row: dict[str, Any]) -> dict[str, float]:
    """What TensorBoard and wandb get beyond TorchTitan's own: figures by source as group/name."""
    scalars = {}
    for key in ("loss_z", "grad_norm_z", "tokens_total", "tokens_per_s", "checkpoint_s", "checkpoint_total_s"):
        if row[key] is not None:
            scalars[key] = row[key]
    for key in ("loss_by_source", "tokens_by_source"):
        scalars |= {f"{key}/{name}": value for name, value in row[key].items()}
    return scalars


def _json_line(row: dict[str, Any]) -> str:
    """JSON has no NaN: a diverged loss is written as null, and the dashboard shows a gap."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: finite(each) for name, each in value.items()}
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(row))


def build_run_metrics(
    job_config: Any, parallel_dims: ParallelDims, model_args: Any = None, tag: str | None = None
) -> RunMetrics:
    """TorchTitan's metrics builder; a restarted run continues its own wandb run, offline or online."""
    name_wandb_run(Path(job_config.job.dump_folder))
    return RunMetrics(job_config, parallel_dims, tag)
