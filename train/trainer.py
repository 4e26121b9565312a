"""TorchTitan's trainer with our own step, a run folder, a validated start and a recorded end.

Before the optimizer moves, one all-gather tells every rank the losses of all ranks and whether any of
them was asked to stop. So the guard refuses a step on every rank or on none, and all ranks stop at
the same step boundary.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torchtitan.train
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools.logging import logger

from data_mixtures.shards import tokenizer_files
from records.checkpoints import newest_saved_step
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
from records.files import append_or_keep, code_version, survive_full_disk, write_atomically
from records.skips import leave_out, windows_of

from .checkpoint import PhaseCheckpointManager, on_rank_zero
from .data import Batch, of_packed
from .diagnostics import Diagnostics
from .guard import BadStep, Guard
from .in_loop import InLoop
from .job_checks import check_job
from .job_config import resolved_toml
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
        self.guard = Guard(section)
        self.refused: list[int] = []  # steps whose batches were refused, the last spike_window steps
        (model,) = self.model_parts
        self.diagnostics = Diagnostics(model, self.parallel_dims)
        model.lm_head.z_loss_weight = job_config.training.z_loss_weight
        self.in_loop = InLoop(job_config) if job_config.evals.in_loop else None
        self._check_vocabulary()

    def _evaluate(self, step: int) -> None:
        """With evals.in_loop: evaluate the checkpoint just saved, once it is on disk; no
        throughput counts the time.
        """
        if self.in_loop is not None and self.in_loop.wanted(step):
            self.checkpointer.finish()
            self.metrics_processor.time_last_log += self.in_loop.evaluate(step)
            self.heartbeat.beat(step)

    def _check_vocabulary(self) -> None:
        mixture, vocab_size = self.dataloader.mixture, self.model_args.config.vocab_size
        if mixture.vocab_size > vocab_size:
            raise ValueError(
                f"{self.dataloader.lock} has a vocabulary of {mixture.vocab_size}, but the model's vocab_size is "
                f"{vocab_size}; set architecture.vocab_size to {mixture.vocab_size} or more"
            )
        for model in self.model_parts:
            model.model_args.bos_id = mixture.bos_id

    def batch_generator(self, data_iterable: Any) -> Iterator[Batch]:
        """Begins the attempt: TorchTitan calls this once, right after the checkpoint is loaded."""
        loader, training, dims = self.dataloader, self.job_config.training, self.parallel_dims
        loader.check_epochs(loader.sequences + (training.steps - self.step) * training.global_batch_size)
        self.started_at, seen = self.step, loader.sequences * training.seq_len
        self.ntokens_seen = seen // (dims.get_mesh("batch").size() if dims.dp_enabled else 1)
        self.metrics_processor.begin_attempt(self.attempt, self.step, seen, loader.tokens_before())
        if torch.distributed.get_rank() == 0:
            with survive_full_disk(self.run):
                self._describe_run()
            self._describe_attempt()
        self.starting = False
        return super().batch_generator(data_iterable)

    def _describe_attempt(self) -> None:
        """One line in attempts.jsonl; the first attempt leaves lineage.json."""
        source, tokens_before = self.checkpointer.started_from, self.metrics_processor.tokens_before
        if not (self.run / "lineage.json").is_file():
            # a run whose lineage.json was lost starts from its own checkpoint, which is no parent
            other = source is not None and self.run.resolve() not in source.resolve().parents
            lineage = {
                "parent": str(source.resolve()) if source and other else None,
                "tokens_before": tokens_before,
            }
            with survive_full_disk(self.run):
                write_atomically(self.run / "lineage.json", json.dumps(lineage, indent=2) + "\n")
        loader = self.dataloader
        data = {  # `records.skips.read_attempts` finds the batch of any step with it
            "lock": str(loader.lock.resolve()),
            "position": loader.sequences,
            "global_batch_size": self.job_config.training.global_batch_size,
            "offsets": loader.offsets,
        }
        facts = {
            "attempt": self.attempt,
            "time": time.time(),
            "code_version": code_version(Path(__file__).parent),
            "argv": sys.argv,
            "world_size": torch.distributed.get_world_size(),
            "torch": torch.__version__,
            "step": self.step,
            "started_from": str(source) if source else "random weights",
            "mixture_fingerprint": loader.mixture.fingerprint,
            "data": data,
            "skip_sequences": loader.skips.windows,
        }
        append_or_keep(self.run / "attempts.jsonl", json.dumps(facts))

    def _describe_run(self) -> None:
        """config.toml, model.json, the tokenizer; an earlier, different config.toml is kept as its attempt's."""
        resolved, config = resolved_toml(self.job_config), self.run / "config.toml"
        if config.is_file() and config.read_text(encoding="utf-8") != resolved:
            shutil.copy(config, self.run / f"config.attempt-{self.attempt - 1}.toml")
        write_atomically(config, resolved)
        write_atomically(
            self.run / "model.json", json.dumps(self.model_args.config.to_dict(), indent=2) + "\n"
        )
        for path in tokenizer_files(self.dataloader.lock.parent):
            write_atomically(self.run / path.name, path.read_bytes())

    def train(self) -> None:
        """TorchTitan's loop, and a record of how it ended; leaves with SystemExit where
        `records.events` has a code.
        """
        with crash_on_record(self.run, self.attempt, lambda: self.step, lambda: self.starting):
            try:
                super().train()
            except BadStep as problem:
                self.checkpointer.finish()  # a save under way is of an earlier, clean step
                self._leave_out_refused(problem)
                self._end(BAD_STEP, str(problem))
            if self.step < self.job_config.training.steps and self.stopping:
                self._end(STOPPED, signals.WORKER.asked or "another rank, or the file `stop`, asked")
            self.heartbeat.close()
            self._leave_outcome(DONE, "training.steps reached")

    def _end(self, code: int, reason: str) -> None:
        self.heartbeat.close()
        self.checkpointer.finish()  # a save under way is of an earlier, clean step
        if code == STOPPED and (self.checkpointer.failed_saves or not self.checkpointer.enable):
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

        A refused batch has moved nothing: where it is to be skipped, the step is done with
        the batch after it.
        """
        lr = self.lr_schedulers.schedulers[0].get_last_lr()[0]
        logged = self.metrics_processor.should_log(self.step)
        (model,) = self.model_parts
        model.begin_step(self.step)
        self.optimizers.zero_grad()
        batches, tokens, all_tokens = self._read_step(data_iterator)
        parts, by_source = [], []
        if logged:
            self.diagnostics.begin()
        self.heartbeat.enter(f"forward and backward of step {self.step}")
        for left, (inputs, labels) in zip(reversed(range(len(batches))), batches, strict=True):
            model.set_requires_all_reduce(
                left == 0
            )  # replicas exchange a step's gradients once, not per micro-batch
            labels = labels.to(self.device)
            with self.train_context():
                losses = model(
                    inputs["input"].to(self.device), labels, **of_packed(inputs, self.device)
                )  # (B, S)
                part = losses.sum() / all_tokens
                part.backward()
            parts.append(part.detach())
            if logged:
                source = inputs["source"].to(self.device)
                by_source.append(
                    loss_sums_by_source(losses, labels, source, len(self.dataloader.mixture.source_names))
                )
                self.diagnostics.see_logits(labels)
            del losses
        if logged:
            self.diagnostics.see_gradients()
        self.heartbeat.enter(f"the gradient norm of step {self.step}")
        max_norm = self.job_config.training.max_norm
        grad_norm = dist_utils.clip_grad_norm_(list(model.parameters()), max_norm, foreach=True)
        loss, max_loss, norm = self._exchange(
            torch.stack(parts).sum(), all_tokens / tokens.clamp(min=1), grad_norm
        )
        try:
            self.guard.check(loss, norm)
        except BadStep as problem:
            self._refuse(problem, loss, norm)
            return self.train_step(data_iterator)
        self.checkpointer.maybe_wait_for_staging()
        self.optimizers.step()
        self.lr_schedulers.step()
        if logged:
            self.metrics_processor.log_step(
                self.step, loss, max_loss, norm, lr, torch.stack(by_source).sum(0), self.dataloader,
                self.checkpointer.times, self.diagnostics.gather(),
            )  # fmt: skip
        self._after_step()

    def _read_step(self, data_iterator: Iterator[Batch]) -> tuple[list[Batch], torch.Tensor, torch.Tensor]:
        """This rank's micro-batches of one step, their tokens that count in the loss, and those of all ranks."""
        self.heartbeat.enter(f"reading the data of step {self.step}")
        batches = [next(data_iterator) for _ in range(self.gradient_accumulation_steps)]
        tokens = torch.stack([(labels != IGNORE_INDEX).sum() for _, labels in batches]).sum().to(self.device)
        self.heartbeat.enter(f"counting the tokens of step {self.step}")
        mesh = self.parallel_dims.get_mesh("batch") if self.parallel_dims.dp_enabled else None
        return batches, tokens, dist_utils.dist_sum(tokens, mesh)

    def _exchange(
        self, loss: torch.Tensor, share: torch.Tensor, grad_norm: torch.Tensor
    ) -> tuple[float, float, float]:
        """One exchange of four numbers a rank: (mean loss, highest loss of a rank, gradient norm)
        of the whole step.

        loss: this rank's part of the mean; share: all tokens / this rank's. Sets `stopping` when
        any rank wants it.
        """
        stop = signals.WORKER.asked is not None
        if torch.distributed.get_rank() == 0:
            stop = stop or (self.run / "stop").exists()
        mine = torch.stack([loss, loss * share, grad_norm, torch.full_like(loss, float(stop))]).float()
        self.heartbeat.enter(f"the exchange of step {self.step}")
        gathered = mine.new_zeros(torch.distributed.get_world_size() * len(mine))
        torch.distributed.all_gather_into_tensor(gathered, mine)
        everyone = gathered.view(-1, len(mine))
        total, _, highest, norm, stops = torch.cat(
            [everyone[:, :1].sum(dim=0), everyone.amax(dim=0)]
        ).tolist()
        self.stopping = stops > 0
        return total, highest, norm

    def _refuse(self, problem: BadStep, loss: float, grad_norm: float) -> None:
        """Record the batch, and leave it out where the policy is to skip; raises `problem` where it is
        not, or no more.

        Called on every rank. The window is on disk before the step goes on, so that a restart
        reads the same data.
        """
        section, loader = self.job_config.resilience, self.dataloader
        size = self.job_config.training.global_batch_size
        windows = windows_of(loader.skips.numbers(loader.sequences - size, size))
        if torch.distributed.get_rank() == 0:
            # every sequence of the refused batch by source and offset, in a file of its own beside the event
            path = self.run / "bad-steps" / f"step-{self.step}.attempt-{self.attempt}.{windows[0][0]}.json"
            with survive_full_disk(path):
                path.parent.mkdir(exist_ok=True)
                batch = loader.locate(loader.sequences - size, size)
                write_atomically(path, "".join(json.dumps(place) + "\n" for place in batch))
            facts = {
                "loss": repr(loss),
                "grad_norm": repr(grad_norm),
                "reason": str(problem),
                "batch": str(path),
            }
            facts["show"] = f"python -m data_mixtures show {self.run} --bad-step {self.step}"
            record_event(self.run, "bad_step", attempt=self.attempt, step=self.step, **facts)
        self.refused = [step for step in self.refused if step > self.step - section.spike_window] + [
            self.step
        ]
        if section.on_bad_step != "skip" or len(self.refused) > section.max_skips:
            raise problem
        reason = f"step {self.step}: {problem}"
        if not on_rank_zero(lambda: leave_out(self.run, windows, reason)):
            raise BadStep(f"{problem}; {self.run} has no room to record that its batch is skipped")
        loader.leave_out(windows)
        logger.warning(
            f"{reason}; sequences {windows} are skipped, {len(self.refused)} of {section.max_skips}"
        )
        self.heartbeat.beat(self.step - 1)

    def _leave_out_refused(self, problem: BadStep) -> None:
        """The data that a roll-back skips: the last skip_steps steps, but none that a checkpoint has seen."""
        section, loader = self.job_config.resilience, self.dataloader
        if torch.distributed.get_rank() == 0 and section.on_bad_step in ("skip", "rollback_and_skip"):
            saved = max(self.started_at, newest_saved_step(Path(self.checkpointer.folder)))
            count = min(section.skip_steps, self.step - saved) * self.job_config.training.global_batch_size
            windows = windows_of(loader.skips.numbers(loader.sequences - count, count))
            leave_out(self.run, windows, f"step {self.step}: {problem}")

    def _after_step(self) -> None:
        self.heartbeat.beat(self.step)
        if self.first_step_of_process and self.step != 1:
            # TorchTitan shortens the timeout after step 1 only, so a resumed job would keep the long one
            timeout = timedelta(seconds=self.job_config.comm.train_timeout_seconds)
            dist_utils.set_pg_timeouts(timeout=timeout, parallel_dims=self.parallel_dims)
        self.first_step_of_process = False

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "guard": self.guard.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the step; what was seen by then is the dataloader's to know, as the batch
        may have changed since.
        """
        self.step = state_dict["step"]
        self.guard.load_state_dict(state_dict["guard"])
