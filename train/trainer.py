"""TorchTitan's trainer with our own step, a run folder, a validated start and a recorded end."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torchtitan.train
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools.logging import logger

from records.evals import is_selected
from records.events import (
    BAD_STEP,
    DONE,
    STOPPED,
    STOPPED_UNSAVED,
    next_attempt,
    record_crash,
    record_event,
    write_outcome,
)

from .attempt_record import describe_attempt
from .bad_steps import BadSteps
from .checkpoint import PhaseCheckpointManager
from .data import Batch, select_packed_inputs, to_device
from .diagnostics import Diagnostics, gather_ranks
from .guard import BadStep, Guard
from .in_loop import InLoop
from .job_checks import check_job
from .metrics import sum_losses_by_source
from .supervise import signals
from .supervise.heartbeat import Heartbeat
from .supervise.lock import hold_rank


class LaneformerTrainer(torchtitan.train.Trainer):
    """One phase of one run; `train()` continues from wherever the run stands to `training.steps`."""

    step: int = 0
    first_step_of_process = True
    starting = True  # until a checkpoint is loaded and the data can be read
    checkpointer: PhaseCheckpointManager

    def __init__(self, job_config: Any):
        self.run = Path(job_config.job.dump_folder)
        self.attempt = next_attempt(self.run)
        with record_crash(self.run, self.attempt, lambda: self.step, lambda: self.starting):
            self._build(job_config)

    def _build(self, job_config: Any) -> None:
        check_job(job_config, int(os.environ["WORLD_SIZE"]))
        section, rank = job_config.resilience, int(os.environ.get("RANK", "0"))
        # before anything is written: a worker of an earlier attempt may still write the same files
        self.lock = hold_rank(self.run, rank)
        self.heartbeat = Heartbeat(
            self.run / "heartbeats", rank, section.hang_timeout_s, section.start_timeout_s
        )
        signals.WORKER.deadline_s = section.stop_deadline_s
        self.stopping = False
        # the one component that a TrainSpec cannot name
        torchtitan.train.CheckpointManager = functools.partial(
            PhaseCheckpointManager,
            job_config,
            get_architecture=lambda: self.model_args.config,
            stopping=lambda: self.stopping,
            after_save=self._evaluate,
        )
        super().__init__(job_config)
        (model,) = self.model_parts
        if model.fallback and rank == 0:
            record_event(self.run, "kernels_replaced", attempt=self.attempt, reason=model.fallback)
        self.guard = Guard(section)
        self.bad_steps = BadSteps(self.run, self.attempt, job_config, self.dataloader)
        self.diagnostics = Diagnostics(model)
        model.lm_head.z_loss_weight = job_config.training.z_loss_weight
        self.in_loop = InLoop(job_config) if job_config.evals.in_loop else None
        check_vocabulary(self.dataloader, self.model_args.config.vocab_size)
        model.model_args.bos_id = self.dataloader.mixture.bos_id  # only the data knows it

    def _evaluate(self, step: int) -> None:
        job = self.job_config
        if self.in_loop and is_selected(step, job.evals.every_steps, job.training.steps):
            self.checkpointer.wait_for_save()
            self.metrics_processor.time_last_log += self.in_loop.evaluate(step)
            self.heartbeat.beat(step)

    def batch_generator(self, data_iterable: Any) -> Iterator[Batch]:
        """Begin the attempt, the checkpoint being loaded; a `yield` here would put it off to the first batch."""
        loader, training, dims = self.dataloader, self.job_config.training, self.parallel_dims
        loader.check_epochs(
            loader.state.sequences + (training.steps - self.step) * training.global_batch_size
        )
        self.started_at, tokens = self.step, loader.tokens_read
        # TorchTitan's count is of the positions that one data-parallel rank has read
        self.ntokens_seen = tokens // (dims.get_mesh("batch").size() if dims.dp_enabled else 1)
        self.metrics_processor.begin_attempt(
            self.attempt, self.step, tokens, loader.tokens_before()
        )
        if torch.distributed.get_rank() == 0:
            started_from = self.checkpointer.started_from
            model = self.model_args.config
            describe_attempt(
                self.run, self.attempt, self.step, self.job_config, model, loader, started_from
            )
        # a ValueError up to here means wrong settings, which no restart mends; from here on it is a crash
        self.starting = False
        return super().batch_generator(data_iterable)

    def train(self) -> None:
        """Run TorchTitan's loop and record how it ended; SystemExit where `records.events` has a code."""
        with record_crash(self.run, self.attempt, lambda: self.step, lambda: self.starting):
            try:
                super().train()
            except BadStep as problem:
                self.checkpointer.wait_for_save()  # before the newest saved step, an earlier one, is read
                self.bad_steps.record_rollback_skips(problem, self.step, self.started_at)
                self._end(BAD_STEP, str(problem))
            if self.step < self.job_config.training.steps and self.stopping:
                self._end(
                    STOPPED, signals.WORKER.request or "another rank, or the file `stop`, asked"
                )
            self.heartbeat.close()
            self._leave_outcome(DONE, "training.steps reached")

    def _end(self, code: int, reason: str) -> NoReturn:
        self.heartbeat.close()
        self.checkpointer.wait_for_save()  # a save under way is of an earlier, clean step
        if code == STOPPED and (self.checkpointer.failed.problem or not self.checkpointer.enable):
            code, reason = (
                STOPPED_UNSAVED,
                f"{reason}, but step {self.step} could not be saved; see events.jsonl",
            )
        self._leave_outcome(code, reason)
        self.close()
        torch.distributed.destroy_process_group()
        raise SystemExit(code)

    def _leave_outcome(self, code: int, reason: str) -> None:
        if torch.distributed.get_rank() == 0:
            logger.info(f"This attempt ends at step {self.step} with code {code}: {reason}")
            write_outcome(self.run, self.attempt, code, self.step, reason)
            (self.run / "stop").unlink(missing_ok=True)  # else it would stop the next attempt
        torch.distributed.barrier()  # torchrun ends all ranks when the first one leaves

    def should_continue_training(self) -> bool:
        return not self.stopping and super().should_continue_training()

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        """Read, forward and backward, agree, judge; only then move the weights and log."""
        (model,) = self.model_parts
        logged = self.metrics_processor.should_log(self.step)
        with self.heartbeat.step(self.step) as mark:
            model.begin_step(self.step)
            while True:
                mark("reading the data")
                batches = [next(data_iterator) for _ in range(self.gradient_accumulation_steps)]
                mark("counting the tokens")
                batches, label_count, all_labels = count_labels(
                    batches, self.device, self.parallel_dims.get_optional_mesh("batch")
                )
                mark("forward and backward")
                loss_part, sums_by_source = self.compute_gradients(batches, all_labels, logged)
                mark("the gradient norm")
                max_norm = self.job_config.training.max_norm
                norm = dist_utils.clip_grad_norm_(list(model.parameters()), max_norm, foreach=True)
                mark("the exchange")
                # turns this rank's part of the mean over all labels into the mean over its own
                to_own_mean = all_labels / label_count.clamp(min=1)
                # losses and stop requests reach all ranks: a step is refused, or is the last, on all or on none
                loss, max_loss, grad_norm, self.stopping = agree_on_step(
                    loss_part, to_own_mean, norm, is_stop_requested(self.run), self.parallel_dims.tp
                )
                try:
                    z_scores = self.guard.check(loss, grad_norm)
                    break
                except BadStep as problem:
                    # nothing has moved: the next batch takes its place, unless this raises
                    self.bad_steps.skip_or_raise(problem, self.step, loss, grad_norm)
                    self.heartbeat.beat(self.step - 1)
            lr = self.lr_schedulers.schedulers[0].get_last_lr()[0]
            # the copy of the weights for the save under way must be complete before they change
            self.checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
            self.lr_schedulers.step()
            if logged:
                self.metrics_processor.log_step(
                    self.step,
                    loss,
                    max_loss,
                    grad_norm,
                    z_scores,
                    lr,
                    sums_by_source,
                    self.dataloader,
                    self.checkpointer.times,
                    self.diagnostics.gather(),
                )
        if self.first_step_of_process and self.step != 1:
            # TorchTitan shortens the timeout after step 1 only, so a resumed job would keep the long one
            timeout = timedelta(seconds=self.job_config.comm.train_timeout_seconds)
            dist_utils.set_pg_timeouts(timeout=timeout, parallel_dims=self.parallel_dims)
        self.first_step_of_process = False

    def compute_gradients(
        self, batches: list[Batch], all_labels: int, logged: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return this rank's part of the mean loss, and sums by source if `logged`."""
        (model,) = self.model_parts
        self.optimizers.zero_grad()
        if logged:
            self.diagnostics.begin()
        parts, by_source = [], []
        for i, (inputs, labels) in enumerate(batches):
            is_last = i == len(batches) - 1
            model.set_requires_all_reduce(is_last)  # replicas exchange a step's gradients once
            with self.train_context():
                losses = model(inputs["input"], labels, **select_packed_inputs(inputs))  # (B, S)
                part = losses.sum() / all_labels
                part.backward()
            parts.append(part.detach())
            if logged:
                sources = len(self.dataloader.mixture.source_names)
                by_source.append(sum_losses_by_source(losses, labels, inputs["source"], sources))
                self.diagnostics.end_micro_batch(labels)
            del losses  # else they would live through the next micro-batch's forward
        if logged:
            self.diagnostics.measure_gradients()
        return torch.stack(parts).sum(), torch.stack(by_source).sum(0) if logged else None

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "guard": self.guard.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]  # but ntokens_seen comes from the loader
        self.guard.load_state_dict(state_dict["guard"])


def count_labels(
    batches: list[Batch], device: torch.device, mesh: DeviceMesh | None
) -> tuple[list[Batch], torch.Tensor, int]:
    """Return batches on their way to the device, their labels that count, and all ranks'."""
    counts = [(labels != IGNORE_INDEX).sum() for _, labels in batches]
    label_count = torch.stack(counts).sum().to(device)
    # all copies start now, ahead of their use
    moving = [to_device(batch, device) for batch in batches]
    # the host waits here for the sum over ranks, while the copies go on
    return moving, label_count, dist_utils.dist_sum(label_count, mesh)


def check_vocabulary(loader: Any, vocab_size: int) -> None:
    if loader.mixture.vocab_size > vocab_size:
        raise ValueError(
            f"{loader.lock} has a vocabulary of {loader.mixture.vocab_size}, but the model's vocab_size is "
            f"{vocab_size}; set architecture.vocab_size to {loader.mixture.vocab_size} or more"
        )


def is_stop_requested(run: Path) -> bool:
    """Tell whether a signal or the file `stop` asks this rank to stop."""
    # one rank looks for the file: the others learn it in `agree_on_step`
    file_exists = torch.distributed.get_rank() == 0 and (run / "stop").exists()
    return signals.WORKER.request is not None or file_exists


def agree_on_step(
    loss: torch.Tensor,
    to_own_mean: torch.Tensor,
    grad_norm: torch.Tensor,
    stop: bool,
    lane_ranks: int,
) -> tuple[float, float, float, bool]:
    """All-gather four numbers a rank: (mean loss, highest loss, gradient norm, whether any rank wants to stop).

    Args:
        loss: this rank's part of the mean.
        to_own_mean: all labels / this rank's.
        lane_ranks: ranks that have the same sequences, each for its own lanes.
    """
    # `lane_ranks` ranks bring the same loss into the sum; the other columns are maxima, where that
    # does not matter
    local = torch.stack(
        [loss / lane_ranks, loss * to_own_mean, grad_norm, torch.full_like(loss, float(stop))]
    )
    table = gather_ranks(local.float())
    # one copy to the host: the sum of the first column, then the maxima of all four
    mean_loss, _, max_loss, max_grad_norm, max_stop = torch.cat(
        [table[:, :1].sum(dim=0), table.amax(dim=0)]
    ).tolist()
    return mean_loss, max_loss, max_grad_norm, max_stop > 0
