"""Measure the validation loss on fixed held-out windows, by source and position, the same on any number of ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.validate import BaseValidator
from torchtitan.distributed import ParallelDims
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from data_mixtures.mixture import PACKING, read_lock, valid_windows
from laneformer.titan.mtp import Drafted

from .data import split_inputs_and_labels
from .diagnostics import ratios
from .metrics import RunMetrics
from .supervise.heartbeat import enter

# tokens; the positions before it are one bin
FIRST_OCTAVE = 16


def read_held_out(lock_path: Path, windows_per_source: int) -> dict[str, list[np.ndarray]]:
    """Read held-out windows (n, S + 1) of each source of a mixture and, if packed, their flags.

    Raises:
        ValueError: no source has any that the mixture reads.
    """
    lock, folder = read_lock(lock_path), lock_path.parent
    weights = {source["name"]: source["weight"] for source in lock["sources"]}
    parts = (False, True) if lock["packing"] != PACKING else (False,)
    arrays = {
        name: [valid_windows(folder, name, windows_per_source, flags) for flags in parts]
        for name in weights
    }
    missing = [name for name, (windows, *_) in arrays.items() if not len(windows)]
    if not sum(weight for name, weight in weights.items() if name not in missing):
        raise ValueError(
            f"{', '.join(missing)} of {lock_path} have no held-out windows to validate on; raise valid_per_10000 in "
            "the recipe and prepare again, or set validation.enable = false"
        )
    if missing:
        logger.warning(f"no held-out windows, so not in the validation loss: {', '.join(missing)}")
    return {name: parts for name, parts in arrays.items() if name not in missing}


def deal_out(
    columns: Sequence[np.ndarray], bins: np.ndarray, ranks: int, rank: int, batch: int
) -> list[tuple[torch.Tensor, ...]]:
    """Deal N rows to one rank: micro-batches of each column (batch, ...), and the rows' bins (batch,)."""
    # every rank must run as many forward passes, in which FSDP gathers weights: the first row fills them up, in a
    # new last bin
    steps = -(-len(bins) // (ranks * batch))
    rows = np.arange(steps * ranks * batch).reshape(steps, ranks, batch)[:, rank]
    real = rows < len(bins)
    rows = np.where(real, rows, 0)
    dealt = [*(column[rows] for column in columns), np.where(real, bins[rows], bins.max() + 1)]
    return list(zip(*map(torch.from_numpy, dealt), strict=True))


class HeldOutValidator(BaseValidator):
    """Measures the loss on the held-out windows and hands it to the run's metrics."""

    def __init__(
        self,
        job_config: Any,
        dp_world_size: int,
        dp_rank: int,
        parallel_dims: ParallelDims,
        validation_context: Callable[[], AbstractContextManager[None]],
        metrics_processor: RunMetrics,
        **unused: Any,
    ):
        """TorchTitan's arguments. Raises ValueError for a mixture that cannot be validated."""
        super().__init__(job_config)
        section, lock = job_config.validation, Path(job_config.mixture.lock)
        self.context, self.metrics = validation_context, metrics_processor
        self.mesh = parallel_dims.get_optional_mesh("loss")
        sources = read_held_out(lock, section.windows_per_source)
        weights = {source["name"]: source["weight"] for source in read_lock(lock)["sources"]}
        self.names, self.weights = list(sources), [weights[name] for name in sources]
        self.octaves = list_octaves(job_config.training.seq_len)
        counts = [len(windows) for windows, *_ in sources.values()]
        streams = [np.concatenate(parts) for parts in zip(*sources.values(), strict=True)]
        source_of_row = np.repeat(np.arange(len(sources)), counts)
        self.windows = deal_out(
            streams, source_of_row, dp_world_size, dp_rank, section.local_batch_size
        )

    def should_validate(self, step: int) -> bool:
        return step % self.job_config.validation.freq == 0 or step == self.job_config.training.steps

    @torch.no_grad()
    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """Measure and log; every rank has to call it at the same step."""
        started = time.perf_counter()
        enter(f"the validation after step {step}")
        (model,) = model_parts
        model.eval()
        sums = self._sum_windows(model)
        model.train()
        self.metrics.log_held_out(step, time.perf_counter() - started, self._compute_figures(sums))

    def _sum_windows(self, model: Any) -> list[list[float]]:
        """Sum over all ranks (sources, n) what `_compute_figures` reads."""
        sums = torch.zeros(len(self.names) + 1, 1, dtype=torch.float64, device=utils.device_type)
        # only a few micro-batches: a stop request waits for the end of the validation
        for *streams, source in self.windows:
            inputs, labels = split_inputs_and_labels(*map(to_int64_on_device, streams))
            documents = inputs.get("documents")
            with self.context():
                losses = model(inputs["input"], labels, documents)
            places = sum_octaves(losses, labels, documents, self.octaves)
            rows = torch.cat([places, sum_drafts(model.drafted, len(losses))], 1)
            # the number of columns is known from the first batch on
            sums = sums.expand(-1, rows.shape[1]).index_add(0, to_int64_on_device(source), rows)
        if self.mesh is not None:
            torch.distributed.all_reduce(sums, group=self.mesh.get_group())
        # the last bin is the padding's
        return sums[:-1].tolist()

    def _compute_figures(self, sums: list[list[float]]) -> dict[str, Any]:
        row_of, n = dict(zip(self.names, sums, strict=True)), len(self.octaves)
        by_source = {name: sum(row[:n]) / sum(row[n : 2 * n]) for name, row in row_of.items()}
        drafts = [average_drafts(row[2 * n :]) for row in row_of.values()]
        return {
            # sources weigh as in the mixture
            "valid_loss": self._weigh(list(by_source.values())),
            "valid_loss_by_source": by_source,
            "valid_loss_by_position": {name: self._by_octave(row) for name, row in row_of.items()},
            **{
                f"valid_{name}": [
                    self._weigh(column)
                    for column in zip(*(figures[name] for figures in drafts), strict=True)
                ]
                for name in drafts[0]
            },
        }

    def _by_octave(self, sums: list[float]) -> dict[int, float]:
        """Return {first position of an octave: mean loss}."""
        bins = zip(self.octaves, sums, sums[len(self.octaves) :], strict=False)
        return {first: loss / tokens for first, loss, tokens in bins if tokens}

    def _weigh(self, by_source: Sequence[float]) -> float:
        return sum(w * value for w, value in zip(self.weights, by_source, strict=True)) / sum(
            self.weights
        )


def to_int64_on_device(part: torch.Tensor) -> torch.Tensor:
    return part.to(utils.device_type, torch.int64)


def list_octaves(seq_len: int) -> list[int]:
    """Return the first position of each bin: 0, 16, 32, 64 ..."""
    return [
        0,
        *(1 << power for power in range(FIRST_OCTAVE.bit_length() - 1, (seq_len - 1).bit_length())),
    ]


def sum_octaves(
    losses: torch.Tensor,
    labels: torch.Tensor,
    documents: torch.Tensor | None,
    firsts: Sequence[int],
) -> torch.Tensor:
    """Sum losses (B, S), then count tokens, of each sequence in n bins of positions: float64 (B, 2 n).

    Args:
        firsts: the positions at which the bins begin.
        documents: (B, S); a position counts from the beginning of its document, without them of the window.
    """
    position = torch.arange(labels.shape[1], device=labels.device).repeat(len(labels), 1)
    if documents is not None:
        documents = documents.contiguous()
        # documents' numbers grow along a window: the first place of a number is where its document begins
        position -= torch.searchsorted(documents, documents)
    octave = torch.bucketize(position, torch.tensor(firsts[1:], device=labels.device), right=True)
    parts = torch.stack([losses.detach(), labels != IGNORE_INDEX], 1).double()
    return (parts @ nn.functional.one_hot(octave, len(firsts)).double()).flatten(1)


def sum_drafts(drafted: Drafted | None, sequences: int) -> torch.Tensor:
    """Sum (b, 3 K) of each sequence: every step's loss, its tokens, and drafts accepted up to it."""
    if drafted is None:
        return torch.zeros(sequences, 0, dtype=torch.float64, device=utils.device_type)
    assert drafted.accepted is not None, "the model was not in eval mode"
    is_token = drafted.labels != IGNORE_INDEX
    parts = (drafted.losses, is_token, drafted.accepted & is_token)
    return torch.cat([part.double().sum(2) for part in parts]).T


def average_drafts(sums: list[float]) -> dict[str, list[float]]:
    """Return each step's mean loss of one source, and the odds that its draft is accepted."""
    if not sums:
        return {}
    steps = len(sums) // 3
    losses, tokens, accepted = (sums[i * steps : (i + 1) * steps] for i in range(3))
    # a draft is tried only where all before it were accepted
    before = [tokens[0], *accepted]
    return {
        "draft_loss": ratios(*losses, *tokens),
        "acceptance": ratios(*accepted, *before[:steps]),
    }
