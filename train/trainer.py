"""TorchTitan's trainer with a run folder, a checked start, and counters that survive a change of ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torchtitan.train
from torchtitan.distributed import utils as dist_utils

from laneformer.provenance import write_atomically

from .checkpoint import PhaseCheckpointManager
from .run_folder import count_attempts, open_run_folder, record_attempt
from .source_losses import SourceLosses

# the one component that a TrainSpec cannot name
torchtitan.train.CheckpointManager = PhaseCheckpointManager


class LaneformerTrainer(torchtitan.train.Trainer):
    """One phase of one run; `train()` goes from wherever the run stands to `training.steps`."""

    checkpointer: PhaseCheckpointManager
    loss_fn: Any

    def __init__(self, job_config: Any):
        if job_config.training.global_batch_size < 0:
            raise ValueError(
                "training.global_batch_size is not set; give it in sequences, so that the GPU count cannot change it"
            )
        super().__init__(job_config)
        self.checkpointer.configure(job_config)
        self.run = Path(job_config.job.dump_folder)
        self.first_step_of_process = True
        self._check_vocabulary()
        sources = self.dataloader.mixture.source_names
        self.source_losses = SourceLosses(len(sources), self.device)
        self.loss_fn = self.source_losses.watch(self.loss_fn)
        self.metrics_processor.sees(self.dataloader, self.source_losses, self.checkpointer.times)

    def _check_vocabulary(self) -> None:
        tokenizer, vocab_size = self.dataloader.tokenizer, self.model_args.config.vocab_size
        if tokenizer.is_file():
            import sentencepiece

            pieces = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer)).vocab_size()
            if pieces > vocab_size:
                raise ValueError(f"{tokenizer} has {pieces} pieces, but the model's vocab_size is {vocab_size}")

    def batch_generator(self, data_iterable: Any) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """TorchTitan asks for the batches once, right after the checkpoint is loaded: the attempt begins here."""
        self._begin_attempt()
        return super().batch_generator(data_iterable)

    def _begin_attempt(self) -> None:
        metrics, loader, training = self.metrics_processor, self.dataloader, self.job_config.training
        loader.mixture.check_epochs(training.steps * training.global_batch_size)
        metrics.attempt = count_attempts(self.run) + 1
        metrics.tokens_before = sum(loader.offsets.values()) * training.seq_len
        metrics.continue_after(self.step)
        torch.distributed.barrier()  # rank 0 adds its line only after every rank has counted them
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

    def train_step(self, data_iterator: Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]) -> None:
        super().train_step(data_iterator)
        if self.first_step_of_process and self.step != 1:
            # TorchTitan shortens the timeout after step 1 only, so a resumed job would keep the long one for ever
            timeout = timedelta(seconds=self.job_config.comm.train_timeout_seconds)
            dist_utils.set_pg_timeouts(timeout=timeout, parallel_dims=self.parallel_dims)
        self.first_step_of_process = False

    def forward_backward_step(self, *, input_dict: dict[str, torch.Tensor], **rest: Any) -> torch.Tensor:
        """TorchTitan hands every key but "input" to the model; the sources are for the log, at logged steps."""
        source = input_dict.pop("source")
        self.source_losses.source = source if self.metrics_processor.should_log(self.step) else None
        return super().forward_backward_step(input_dict=input_dict, **rest)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the step; the token counter is this rank's share of what all ranks have seen."""
        self.step = state_dict["step"]
        training, dims = self.job_config.training, self.parallel_dims
        ranks = dims.get_mesh("batch").size() if dims.dp_enabled else 1
        self.ntokens_seen = self.step * training.global_batch_size * training.seq_len // ranks
