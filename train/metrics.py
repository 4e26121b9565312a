"""Log metrics as TorchTitan does, and write every logged step as one JSON line of metrics.jsonl."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.metrics import BaseLogger, MetricsProcessor
from torchtitan.distributed import ParallelDims
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from records.events import record_event
from records.files import append_or_keep, read_lines, replace_last_line
from records.run import name_wandb_run, numbers_in
from records.usage import RECENT, cost, duration, gpu_hours, money, seconds_left, spans_of

from .checkpoint_saves import CheckpointTimes
from .data import MixtureLoader

# what TensorBoard and wandb get of a row beyond TorchTitan's own
SCALARS = [
    "loss_z",
    "grad_norm_z",
    "tokens_total",
    "tokens_per_s",
    "checkpoint_s",
    "checkpoint_total_s",
    "gpu_hours",
    "gpu_hours_left",
    "cost",
    "z_loss",
    "max_logit",
    "loss_by_source",
    "tokens_by_source",
    "layer_grad_norm",
    "layer_stream_rms",
    "draft_loss",
]
LINES = ("metrics.jsonl", "events.jsonl", "attempts.jsonl")


def sum_losses_by_source(
    losses: torch.Tensor, labels: torch.Tensor, source: torch.Tensor, sources: int
) -> torch.Tensor:
    """Sum losses and labels (B, S) by source int64 (B,) into float64 (2, sources): losses, tokens."""
    # every sequence comes from one source, so the sums of whole sequences suffice
    sums = torch.zeros(2, sources, dtype=torch.float64, device=losses.device)
    sums[0].index_add_(0, source, losses.detach().double().sum(1))
    sums[1].index_add_(0, source, (labels != IGNORE_INDEX).sum(1).double())
    return sums


def average_by_source(
    sums: torch.Tensor, names: tuple[str, ...], mesh: DeviceMesh | None
) -> dict[str, float]:
    """Return the mean loss of each source that has tokens, over all ranks of the mesh."""
    if mesh is not None:
        torch.distributed.all_reduce(sums, group=mesh.get_group())
    losses, tokens = sums.tolist()
    return {name: loss / n for name, loss, n in zip(names, losses, tokens, strict=True) if n}


class RunMetrics(MetricsProcessor):
    """TorchTitan's console, TensorBoard and wandb loggers, and the run's own metrics.jsonl (rank 0)."""

    def __init__(
        self,
        job_config: Any,
        parallel_dims: ParallelDims,
        model_args: Any = None,
        tag: str | None = None,
    ):
        """Take TorchTitan's arguments; a restarted run continues its own wandb run."""
        if job_config.metrics.enable_wandb and torch.distributed.get_rank() == 0:
            name_wandb_run(Path(job_config.job.dump_folder))
        super().__init__(job_config, parallel_dims, tag)
        self.path = Path(job_config.job.dump_folder) / "metrics.jsonl"
        self.last_logged_tokens = 0
        self.disk_full = False
        self.row: dict[str, Any] = {}  # the last one written
        # tokens per second and device of the last rows
        self.rates: deque[float] = deque(maxlen=RECENT)
        self.began, self.gpu_hours_before = time.time(), 0.0

    def begin_attempt(self, attempt: int, step: int, tokens: int, tokens_before: int) -> None:
        """Start logging after `step`, with speed and GPU-hours as the run's files have them.

        Args:
            tokens: what this phase was trained on by then.
            tokens_before: what earlier phases were.
        """
        self.attempt, self.tokens_before = attempt, tokens_before
        self.last_logged_tokens = tokens
        if torch.distributed.get_rank() != 0:
            return
        rows, events, attempts = (read_lines(self.path.with_name(name)) for name in LINES)
        spans = spans_of([*rows, *events, *attempts])
        if spans and spans[-1].attempt == attempt and not spans[-1].over:
            # this attempt, which the supervisor has announced
            self.began = spans.pop().began
        self.gpu_hours_before = gpu_hours(spans)
        # later rows replace those of the same step, which an earlier attempt wrote before its restart
        by_step = {row["step"]: row for row in rows if row["step"] <= step}
        for _, row in sorted(by_step.items()):
            if row.get("tokens_per_s_per_device"):
                self.rates.append(row["tokens_per_s_per_device"])

    def should_log(self, step: int) -> bool:
        # the last step too, whose checkpoint is the one that is used
        return super().should_log(step) or step == self.job_config.training.steps

    def log_step(
        self,
        step: int,
        loss: float,
        max_loss: float,
        grad_norm: float,
        z_scores: dict[str, float],
        lr: float,
        loss_sums: torch.Tensor,
        loader: MixtureLoader,
        checkpoint_times: CheckpointTimes,
        diagnostics: dict[str, Any],
    ) -> None:
        """Log one step; every rank calls it.

        Args:
            z_scores: of `Guard.check`, over its window of all steps.
            loss_sums: of `loss_sums_by_source`.
            diagnostics: of `Diagnostics.gather`.
        """
        # on every rank, since sums are exchanged; only rank 0 logs
        mesh = self.parallel_dims.get_optional_mesh("loss")
        loss_by_source = average_by_source(loss_sums, loader.mixture.source_names, mesh)
        if torch.distributed.get_rank() != 0:
            self.data_loading_times.clear()
            return
        throughput, memory = self._throughput(loader), self.device_memory_monitor.get_peak_stats()
        checkpoint_s, checkpoint_total_s = checkpoint_times.take()
        tokens = loader.tokens_read
        row = {
            "step": step,
            "phase": self.job_config.phase.name,
            "attempt": self.attempt,
            "loss": loss,
            "max_loss": max_loss,
            **z_scores,
            "loss_by_source": loss_by_source,
            "lr": lr,
            "grad_norm": grad_norm,
            "tokens": tokens,
            "tokens_total": self.tokens_before + tokens,
            "tokens_by_source": loader.tokens_per_source(),
            **throughput,
            **diagnostics,
            # polling for a pending save rounds to 0
            "checkpoint_s": round(checkpoint_s, 3),
            "checkpoint_total_s": checkpoint_total_s,
            "memory_gib": memory.max_reserved_gib,
            "memory_active_gib": memory.max_active_gib,
            **self._update_progress(step, throughput["tokens_per_s_per_device"]),
            "time": time.time(),
        }
        self.last_logged_tokens = tokens
        self._log_row(row)
        self._append(row)

    def _log_row(self, row: dict[str, Any]) -> None:
        plain = utils.NoColor() if self.job_config.metrics.disable_color_printing else utils.Color()
        # what ends TorchTitan's line on the console, its `reset`, also has ours; Color is frozen, so by a subclass
        reset = f"{plain.reset}  {format_progress(row, vars(self.job_config.metrics))}".rstrip()
        self.color = type("", (type(plain),), {"reset": reset})()
        scalars = _flat({key: row.get(key) for key in SCALARS})
        extra = {"n_tokens_seen": row["tokens"], "lr": row["lr"], **scalars}
        self.survive(
            lambda: self.log(row["step"], row["loss"], row["max_loss"], row["grad_norm"], extra)
        )

    def _append(self, row: dict[str, Any]) -> None:
        """Write a row, or keep it in memory while the disk is full."""
        self.row = row
        written = append_or_keep(self.path, _json_line(row))
        # once a full disk; the event waits for room as well, with the time of now
        if not written and not self.disk_full:
            reason = f"no room for {self.path}; its rows wait in memory"
            record_event(
                self.path.parent, "disk_full", attempt=self.attempt, step=row["step"], reason=reason
            )
        self.disk_full = not written

    def survive(self, log: Callable[[], None]) -> None:
        """Log, without TensorBoard and wandb once a full disk has ended their threads."""
        try:
            log()
        except OSError as problem:
            logger.warning(f"TensorBoard and wandb get nothing more from this attempt: {problem}")
            self.logger = BaseLogger()
            log()

    def _update_progress(
        self, step: int, tokens_per_s_per_device: float | None
    ) -> dict[str, float | None]:
        """Add a row's speed; return the job's GPU-hours so far, those left, and when it ends."""
        self.rates.append(tokens_per_s_per_device or 0.0)
        training, devices, now = (
            self.job_config.training,
            torch.distributed.get_world_size(),
            time.time(),
        )
        tokens_left = (training.steps - step) * training.global_batch_size * training.seq_len
        left_s = seconds_left(list(self.rates), tokens_left, devices)
        used = self.gpu_hours_before + devices * (now - self.began) / 3600
        return {
            "gpu_hours": used,
            "cost": cost(used, vars(self.job_config.metrics)),
            "gpu_hours_left": None if left_s is None else devices * left_s / 3600,
            "finish_time": None if left_s is None else now + left_s,
        }

    def _throughput(self, loader: MixtureLoader) -> dict[str, float | None]:
        seconds = time.perf_counter() - self.time_last_log
        devices = torch.distributed.get_world_size()
        tokens_per_s = (loader.tokens_read - self.last_logged_tokens) / seconds
        # an unknown device has no peak to compare with: null, not TorchTitan's guess of an A100
        known_peak = utils.device_type != "cpu"
        mfu = (
            100 * self.num_flops_per_token * tokens_per_s / (devices * self.gpu_peak_flops)
            if known_peak
            else None
        )
        return {
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_per_device": tokens_per_s / devices,
            "mfu": mfu,
            "data_s": sum(self.data_loading_times),
            "seconds": seconds,
        }

    def log_held_out(self, step: int, seconds: float, figures: dict[str, Any]) -> None:
        """Add a validation's figures to the row of its step."""
        # no throughput counts the seconds of a validation
        self.time_last_log += seconds
        self.survive(lambda: self.logger.log(_flat(figures), step))
        accepted = ", ".join(f"{odds:.3f}" for odds in figures.get("valid_acceptance", ()))
        drafted = f"  drafts accepted: {accepted}" if accepted else ""
        loss = figures["valid_loss"]
        logger.info(f"validation  step: {step}  loss: {loss:.4f}{drafted}  {seconds:.1f} s")
        if torch.distributed.get_rank() == 0:
            assert self.row["step"] == step, (
                f"validation at step {step}, the last row is {self.row['step']}"
            )
            row = {**self.row, **figures, "valid_s": seconds}
            replace_last_line(self.path, _json_line(self.row), _json_line(row))
            self.row = row


def format_progress(row: dict[str, Any], section: dict[str, Any]) -> str:
    """Say what is left of a job and what it costs, for the console."""
    if row["finish_time"] is None:
        return ""
    used, remaining, end = row["gpu_hours"], row["gpu_hours_left"], time.gmtime(row["finish_time"])
    paid, total = (money(hours, section) for hours in (used, used + remaining))
    text = f"left: {duration(row['finish_time'] - row['time'])}, until {time.strftime('%Y-%m-%d %H:%M', end)} UTC"
    text += f"  GPU-hours: {used:,.1f} of {used + remaining:,.1f}"
    return f"{text}  cost: {paid} of {total}" if paid else text


def _flat(figures: dict[str, Any]) -> dict[str, float]:
    """Flatten {"a": {"b": 1}, "c": [2, 3]} into {"a/b": 1, "c/0": 2, "c/1": 3}, without NaN."""
    flat: dict[str, float] = {}
    for name, value in figures.items():
        flat |= numbers_in(name, dict(enumerate(value)) if isinstance(value, list) else value)
    return flat


def _json_line(row: dict[str, Any]) -> str:
    """Write a row as JSON, which has no NaN: null."""
    finite = json.loads(json.dumps(row), parse_constant=lambda constant: None)
    return json.dumps(finite)
