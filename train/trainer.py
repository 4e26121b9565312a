"""TorchTitan's trainer with a run folder, a checked start, and an end that is always on record.

The step is our own: before the optimizer moves, one exchange tells all ranks each other's loss and whether anybody was
asked to stop. So the guard refuses a step on every rank or on none, and all ranks stop at the same step boundary.
"""

from __future__ import annotations

import contextlib
import json
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

from laneformer.titan import TitanLaneformer
from records.events import DONE, STOPPED, UNCLEAN, crash_on_record, record_event, write_outcome
from records.files import write_atomically

from .checkpoint import PhaseCheckpointManager
from .guard import Guard, UncleanStep
from .in_loop import InLoop
from .run_folder import count_attempts, open_run_folder, record_attempt
from .source_losses import SourceLosses
from .supervise import signals
from .supervise.heartbeat import Heartbeat

# the one component that a TrainSpec cannot name
torchtitan.train.CheckpointManager = PhaseCheckpointManager


class LaneformerTrainer(torchtitan.train.Trainer):
    """One phase of one run; `train()` goes from wherever the run stands to `training.steps`."""

    checkpointer: PhaseCheckpointManager
    step: int = 0
    loss_fn: Any

    def __init__(self, job_config: Any):
        self.run = Path(job_config.job.dump_folder)
        self.attempt = count_attempts(self.run) + 1
        with crash_on_record(self.run, self.attempt, lambda: self.step):
            self._build(job_config)

    def _build(self, job_config: Any) -> None:
        if job_config.training.global_batch_size < 0:
            raise ValueError(
                "training.global_batch_size is not set; give it in sequences, so that the GPU count cannot change it"
            )
        section, rank = job_config.resilience, int(os.environ.get("RANK", "0"))
        self.heartbeat = Heartbeat(self.run / "heartbeats", rank, section.hang_timeout_s, section.start_timeout_s)
        signals.WORKER.deadline_s = section.stop_deadline_s
        super().__init__(job_config)
        self.returns_losses = isinstance(self.model_parts[0], TitanLaneformer)  # a rival of bench_train does not
        if self.returns_losses:
            # one device included: parallelize wraps that in FSDP, too, and autocast on top would widen the streams
            self.maybe_enable_amp = contextlib.nullcontext()
        self.checkpointer.configure(job_config)
        self.guard = Guard(section)
        self.stopping = False
        self.first_step_of_process = True
        self._check_vocabulary()
        sources = self.dataloader.mixture.source_names
        self.source_losses = SourceLosses(len(sources), self.device)
        self.loss_fn = self.source_losses.watch(self.loss_fn)
        self.metrics_processor.sees(self.dataloader, self.source_losses, self.checkpointer.times)
        if job_config.evals.in_loop:
            self.in_loop = InLoop(job_config)
            self.checkpointer.evaluate = self._evaluate

    def _evaluate(self, step: int) -> None:
        """Evaluate the checkpoint that was just saved, once it is on disk; the time this takes counts in no speed."""
        if not self.in_loop.wanted(step):
            return
        self.checkpointer.finish()
        self.metrics_processor.time_last_log += self.in_loop.evaluate(step)
        self.heartbeat.beat(step)

    def _check_vocabulary(self) -> None:
        tokenizer, vocab_size = self.dataloader.tokenizer, self.model_args.config.vocab_size
        if tokenizer.is_file():
            import sentencepiece

            pieces = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer)).vocab_size()
            if pieces > vocab_size:
                raise ValueError(f"{tokenizer} has {pieces} pieces, but the model's vocab_size is {vocab_size}")

    def post_dataloading_process(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], dict[str, Any]]:
        """Hand the labels to the model, which returns a loss per token (B, S) in place of logits."""
        inputs, labels, extra_inputs, extra_kwargs = super().post_dataloading_process(input_dict, labels)
        if self.returns_losses:
            extra_inputs["labels"] = labels
        return inputs, labels, extra_inputs, extra_kwargs

    def batch_generator(self, data_iterable: Any) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """TorchTitan asks for the batches once, right after the checkpoint is loaded: the attempt begins here."""
        self._begin_attempt()
        return super().batch_generator(data_iterable)

    def _begin_attempt(self) -> None:
        metrics, loader, training = self.metrics_processor, self.dataloader, self.job_config.training
        loader.check_epochs(training.steps * training.global_batch_size)
        metrics.attempt = self.attempt
        metrics.tokens_before = loader.tokens_before()
        metrics.continue_after(self.step)
        if torch.distributed.get_rank() != 0:
            return
        open_run_folder(self.run, self.job_config, self.model_args.config, loader.tokenizer)
        source = self.checkpointer.started_from
        if not (self.run / "lineage.json").is_file():
            lineage = {"parent": str(source.resolve()) if source else None, "tokens_before": metrics.tokens_before}
            write_atomically(self.run / "lineage.json", json.dumps(lineage, indent=2) + "\n")
        record_attempt(
            self.run,
            step=self.step,
            started_from=str(source) if source else "random weights",
            mixture_fingerprint=loader.mixture.fingerprint,
        )

    def train(self) -> None:
        """TorchTitan's loop, and a record of how it ended; leaves with SystemExit where `records.events` has a code."""
        with crash_on_record(self.run, self.attempt, lambda: self.step):
            try:
                super().train()
            except UncleanStep as problem:
                self._end(UNCLEAN, str(problem))
            if self.step < self.job_config.training.steps and self.stopping:
                self._end(STOPPED, signals.WORKER.asked or "another rank, or the file `stop`, asked")
            self.heartbeat.close()
            self._leave_outcome(DONE, "training.steps reached")

    def _end(self, code: int, reason: str) -> None:
        self.heartbeat.close()
        self.checkpointer.finish()  # a save under way is of an earlier, clean step
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

    def train_step(self, data_iterator: Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]) -> None:
        """Read, forward and backward, exchange, judge; only then move the weights and log."""
        self.optimizers.zero_grad()
        lr = self.lr_schedulers.schedulers[0].get_last_lr()[0]
        batches = [next(data_iterator) for _ in range(self.gradient_accumulation_steps)]
        tokens = torch.stack([(labels != IGNORE_INDEX).sum() for _, labels in batches]).sum().to(self.device)
        mesh = self.parallel_dims.get_mesh("batch") if self.parallel_dims.dp_enabled else None
        all_tokens = dist_utils.dist_sum(tokens, mesh)
        parts = []
        for inputs, labels in batches:
            inputs = {name: value.to(self.device) for name, value in inputs.items()}
            part = self.forward_backward_step(
                input_dict=inputs, labels=labels.to(self.device), global_valid_tokens=all_tokens
            )
            parts.append(part.detach())
        grad_norm = dist_utils.clip_grad_norm_(
            list(self.model_parts[0].parameters()), self.job_config.training.max_norm, foreach=True
        )
        loss, max_loss, norm = self._exchange(torch.stack(parts).sum(), all_tokens / tokens, grad_norm)
        self._judge(loss, norm)
        self.checkpointer.maybe_wait_for_staging()
        self.optimizers.step()
        self.lr_schedulers.step()
        if self.metrics_processor.should_log(self.step):
            seen = self.ntokens_seen * torch.distributed.get_world_size()
            self.metrics_processor.log(self.step, loss, max_loss, norm, extra_metrics={"n_tokens_seen": seen, "lr": lr})
        self._after_step()

    def _exchange(self, loss: torch.Tensor, share: torch.Tensor, grad_norm: torch.Tensor) -> tuple[float, float, float]:
        """One exchange of four numbers a rank: (mean loss, highest loss of a rank, gradient norm) of the whole step.

        loss: this rank's part of the mean; share: all tokens / this rank's. Sets `stopping` when any rank wants it.
        """
        stop = signals.WORKER.asked is not None
        if torch.distributed.get_rank() == 0:
            stop = stop or (self.run / "stop").exists()
        mine = torch.stack([loss, loss * share, grad_norm, torch.full_like(loss, float(stop))]).float()
        gathered = mine.new_zeros(torch.distributed.get_world_size() * len(mine))
        torch.distributed.all_gather_into_tensor(gathered, mine)
        everyone = gathered.view(-1, len(mine))
        total, _, highest, norm, stops = torch.cat([everyone[:, :1].sum(dim=0), everyone.amax(dim=0)]).tolist()
        self.stopping = self.checkpointer.save_now = stops > 0
        return total, highest, norm

    def _judge(self, loss: float, grad_norm: float) -> None:
        try:
            self.guard.check(loss, grad_norm)
        except UncleanStep as problem:
            if torch.distributed.get_rank() == 0:
                self._record_unclean_step(loss, grad_norm, str(problem))
            raise

    def _record_unclean_step(self, loss: float, grad_norm: float, reason: str) -> None:
        """The refused batch, every sequence by source and offset, in a file of its own beside the event."""
        size = self.job_config.training.global_batch_size
        batch = self.dataloader.locate(self.dataloader.sequences - size, size)
        path = self.run / "unclean" / f"step-{self.step}.attempt-{self.attempt}.json"
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, "".join(json.dumps(place) + "\n" for place in batch))
        facts = {"loss": repr(loss), "grad_norm": repr(grad_norm), "reason": reason, "batch": str(path)}
        record_event(self.run, "unclean_step", attempt=self.attempt, step=self.step, **facts)

    def _after_step(self) -> None:
        self.heartbeat.beat(self.step)
        if self.first_step_of_process and self.step != 1:
            # TorchTitan shortens the timeout after step 1 only, so a resumed job would keep the long one for ever
            timeout = timedelta(seconds=self.job_config.comm.train_timeout_seconds)
            dist_utils.set_pg_timeouts(timeout=timeout, parallel_dims=self.parallel_dims)
        self.first_step_of_process = False

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "guard": self.guard.state_dict()}

    def forward_backward_step(self, *, input_dict: dict[str, torch.Tensor], **rest: Any) -> torch.Tensor:
        """TorchTitan hands every key but "input" to the model; the sources are for the log, at logged steps."""
        source = input_dict.pop("source")
        watched = self.returns_losses and self.metrics_processor.should_log(self.step)
        self.source_losses.source = source if watched else None
        return super().forward_backward_step(input_dict=input_dict, **rest)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the step; the token counter is this rank's share of what all ranks have seen."""
        self.step = state_dict["step"]
        self.guard.load_state_dict(state_dict["guard"])
        training, dims = self.job_config.training, self.parallel_dims
        ranks = dims.get_mesh("batch").size() if dims.dp_enabled else 1
        self.ntokens_seen = self.step * training.global_batch_size * training.seq_len // ranks
