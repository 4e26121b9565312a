"""TorchTitan's trainer with our own step, a run folder, a validated start and a recorded end.

Before the optimizer moves, one all-gather tells every rank the losses of all ranks and whether any of
them was asked to stop. So the guard refuses a step on every rank or on none, and all ranks stop at
the same step boundary.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torchtitan.train
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools.logging import logger

from records.evals import wanted
from records.events import (
    BAD_STEP,
    DONE,
    STOPPED,
    STOPPED_UNSAVED,
    crash_on_record,
    next_attempt,
    record_event,
    write_outcome,
)

from .attempt_record import describe_attempt
from .bad_steps import BadSteps
from .checkpoint import PhaseCheckpointManager
from .data import Batch, of_packed, to_device
from .diagnostics import Diagnostics, gather_ranks
from .guard import BadStep, Guard
from .in_loop import InLoop
from .job_checks import check_job
from .metrics import loss_sums_by_source
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
        with crash_on_record(self.run, self.attempt, lambda: self.step, lambda: self.starting):
            self._build(job_config)

    def _build(self, job_config: Any) -> None:
        check_job(job_config, int(os.environ["WORLD_SIZE"]))
        section, rank = job_config.resilience, int(os.environ.get("RANK", "0"))
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
            architecture=lambda: self.model_args.config,
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
        model.model_args.bos_id = self.dataloader.mixture.bos_id

    def _evaluate(self, step: int) -> None:
        """With evals.in_loop: evaluate the checkpoint just saved; no throughput counts the time."""
        last_step = self.job_config.training.steps
        if self.in_loop is not None and wanted(step, self.job_config.evals.every_steps, last_step):
            self.checkpointer.finish()
            self.metrics_processor.time_last_log += self.in_loop.evaluate(step)
            self.heartbeat.beat(step)

    def batch_generator(self, data_iterable: Any) -> Iterator[Batch]:
        """Begins the attempt: TorchTitan calls this once, right after the checkpoint is loaded."""
        loader, training, dims = self.dataloader, self.job_config.training, self.parallel_dims
        loader.check_epochs(
            loader.state.sequences + (training.steps - self.step) * training.global_batch_size
        )
        self.started_at, seen = self.step, loader.tokens
        self.ntokens_seen = seen // (dims.get_mesh("batch").size() if dims.dp_enabled else 1)
        self.metrics_processor.begin_attempt(self.attempt, self.step, seen, loader.tokens_before())
        if torch.distributed.get_rank() == 0:
            source = self.checkpointer.started_from
            model = self.model_args.config
            describe_attempt(
                self.run, self.attempt, self.step, self.job_config, model, loader, source
            )
        self.starting = False
        return super().batch_generator(data_iterable)

    def train(self) -> None:
        """TorchTitan's loop, and a record of how it ended; leaves with SystemExit where
        `records.events` has a code.
        """
        with crash_on_record(self.run, self.attempt, lambda: self.step, lambda: self.starting):
            try:
                super().train()
            except BadStep as problem:
                self.checkpointer.finish()  # a save under way is of an earlier, clean step
                self.bad_steps.leave_out_last(
                    problem, self.step, self.started_at, self.checkpointer.folder
                )
                self._end(BAD_STEP, str(problem))
            if self.step < self.job_config.training.steps and self.stopping:
                self._end(
                    STOPPED, signals.WORKER.asked or "another rank, or the file `stop`, asked"
                )
            self.heartbeat.close()
            self._leave_outcome(DONE, "training.steps reached")

    def _end(self, code: int, reason: str) -> None:
        self.heartbeat.close()
        self.checkpointer.finish()  # a save under way is of an earlier, clean step
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
            (self.run / "stop").unlink(missing_ok=True)  # obeyed
        torch.distributed.barrier()  # torchrun ends all ranks when the first one leaves

    def should_continue_training(self) -> bool:
        return not self.stopping and super().should_continue_training()

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        """Read, forward and backward, exchange, judge; only then move the weights and log.

        A refused batch has moved nothing: where it is to be skipped, the batch after it takes its place.
        """
        (model,) = self.model_parts
        logged = self.metrics_processor.should_log(self.step)
        with self.heartbeat.step(self.step) as mark:
            model.begin_step(self.step)
            while True:
                mark("reading the data")
                batches = [next(data_iterator) for _ in range(self.gradient_accumulation_steps)]
                mark("counting the tokens")
                batches, tokens, all_tokens = self.count_tokens(batches)
                mark("forward and backward")
                part, sums_by_source = self.compute_gradients(batches, all_tokens, logged)
                mark("the gradient norm")
                max_norm = self.job_config.training.max_norm
                norm = dist_utils.clip_grad_norm_(list(model.parameters()), max_norm, foreach=True)
                mark("the exchange")
                share = all_tokens / tokens.clamp(min=1)
                loss, max_loss, grad_norm, self.stopping = exchange(
                    part, share, norm, stop_asked(self.run), self.parallel_dims.tp
                )
                try:
                    self.guard.check(loss, grad_norm)
                    break
                except BadStep as problem:
                    self.bad_steps.leave_out(
                        problem, self.step, loss, grad_norm
                    )  # raises if it may not
                    self.heartbeat.beat(self.step - 1)
            lr = self.lr_schedulers.schedulers[0].get_last_lr()[0]
            self.checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
            self.lr_schedulers.step()
            if logged:
                self.metrics_processor.log_step(
                    self.step,
                    loss,
                    max_loss,
                    grad_norm,
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

    def count_tokens(self, batches: list[Batch]) -> tuple[list[Batch], torch.Tensor, torch.Tensor]:
        """Micro-batches on their way to the device; their tokens that count in the loss, and all ranks'."""
        counts = [(labels != IGNORE_INDEX).sum() for _, labels in batches]
        tokens = torch.stack(counts).sum().to(self.device)
        moving = [to_device(batch, self.device) for batch in batches]  # ahead of their use
        mesh = self.parallel_dims.get_mesh("batch") if self.parallel_dims.dp_enabled else None
        return moving, tokens, dist_utils.dist_sum(tokens, mesh)

    def compute_gradients(
        self, batches: list[Batch], all_tokens: torch.Tensor, logged: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """This rank's part of the mean loss; of a logged step also losses and tokens by source."""
        (model,) = self.model_parts
        self.optimizers.zero_grad()
        if logged:
            self.diagnostics.begin()
        parts, by_source = [], []
        for i, (inputs, labels) in enumerate(batches):
            is_last = i == len(batches) - 1
            model.set_requires_all_reduce(is_last)  # replicas exchange a step's gradients once
            with self.train_context():
                losses = model(inputs["input"], labels, **of_packed(inputs))  # (B, S)
                part = losses.sum() / all_tokens
                part.backward()
            parts.append(part.detach())
            if logged:
                sources = len(self.dataloader.mixture.source_names)
                by_source.append(loss_sums_by_source(losses, labels, inputs["source"], sources))
                self.diagnostics.see_logits(labels)
            del losses
        if logged:
            self.diagnostics.see_gradients()
        return torch.stack(parts).sum(), torch.stack(by_source).sum(0) if logged else None

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "guard": self.guard.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the step; what was seen by then is the dataloader's to know, as the batch
        may have changed since.
        """
        self.step = state_dict["step"]
        self.guard.load_state_dict(state_dict["guard"])


def check_vocabulary(loader: Any, vocab_size: int) -> None:
    """ValueError where the mixture has tokens that the model lacks."""
    if loader.mixture.vocab_size > vocab_size:
        raise ValueError(
            f"{loader.lock} has a vocabulary of {loader.mixture.vocab_size}, but the model's vocab_size is "
            f"{vocab_size}; set architecture.vocab_size to {loader.mixture.vocab_size} or more"
        )


def stop_asked(run: Path) -> bool:
    """Whether this rank was asked to stop; rank 0 also looks for the file `stop`."""
    of_run = torch.distributed.get_rank() == 0 and (run / "stop").exists()
    return signals.WORKER.asked is not None or of_run


def exchange(
    loss: torch.Tensor, share: torch.Tensor, grad_norm: torch.Tensor, stop: bool, alike: int
) -> tuple[float, float, float, bool]:
    """One all-gather of four numbers a rank: (mean loss, highest loss of a rank, gradient norm, whether any rank
    wants to stop), equal on all ranks.

    loss: this rank's part of the mean; share: all tokens / this rank's; alike: ranks that have the same
    sequences, each for its own lanes.
    """
    mine = torch.stack([loss / alike, loss * share, grad_norm, torch.full_like(loss, float(stop))])
    everyone = gather_ranks(mine.float())
    total, _, highest, norm, stops = torch.cat(
        [everyone[:, :1].sum(dim=0), everyone.amax(dim=0)]
    ).tolist()
    return total, highest, norm, stops > 0
