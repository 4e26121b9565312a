"""Validation loss on fixed held-out windows, by source and position: the same windows at every
step, on any number of ranks.

All windows form one list, cut into micro-batches for all ranks. The list is padded to a whole number of them,
since every rank must run the same number of forward passes (FSDP gathers weights in each); the padding is
summed into a bin of its own that is not read. The total weighs sources as the mixture does, so that it is
comparable with the loss. So does what is measured of the head that drafts, if the model has one.
"""

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

from .data import inputs_and_labels
from .diagnostics import ratios
from .metrics import RunMetrics
from .supervise.heartbeat import enter

FIRST_OCTAVE = 16  # tokens; the positions before it are one bin


def held_out(lock_path: Path, windows_per_source: int) -> dict[str, list[np.ndarray]]:
    """Held-out windows (n, S + 1) of each source of a mixture that has some; if they are packed, their flags as well.

    Raises ValueError where no source has any that the mixture reads.
    """
    lock, folder = read_lock(lock_path), lock_path.parent
    weights = {source["name"]: source["weight"] for source in lock["sources"]}
    parts = (False, True) if lock["packing"] != PACKING else (False,)
    windows_of = {
        name: [valid_windows(folder, name, windows_per_source, flags) for flags in parts]
        for name in weights
    }
    without = [name for name, (windows, *_) in windows_of.items() if not len(windows)]
    if not sum(weight for name, weight in weights.items() if name not in without):
        raise ValueError(
            f"{', '.join(without)} of {lock_path} have no held-out windows to validate on; raise valid_per_10000 in "
            "the recipe and prepare again, or set validation.enable = false"
        )
    if without:
        logger.warning(f"no held-out windows, so not in the validation loss: {', '.join(without)}")
    return {name: each for name, each in windows_of.items() if name not in without}


def deal_out(
    columns: Sequence[np.ndarray], bins: np.ndarray, ranks: int, rank: int, batch: int
) -> list[tuple[torch.Tensor, ...]]:
    """One rank's micro-batches of N rows: of each column (batch, ...), and the rows' bins (batch,).

    All ranks have as many: they are filled up with the first row, whose bin there is a new last one.
    """
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

        sources = held_out(lock, section.windows_per_source)
        weights = {source["name"]: source["weight"] for source in read_lock(lock)["sources"]}
        self.names, self.weights = list(sources), [weights[name] for name in sources]
        self.octaves = octaves(job_config.training.seq_len)
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
        self.metrics.log_held_out(step, time.perf_counter() - started, self._figures(sums))

    def _sum_windows(self, model: Any) -> list[list[float]]:
        """The sums over all ranks (sources, n) of what `_figures` reads of each window."""
        sums = torch.zeros(len(self.names) + 1, 1, dtype=torch.float64, device=utils.device_type)
        for *streams, source in self.windows:  # a few: signals wait
            inputs, labels = inputs_and_labels(*map(on_device, streams))
            documents = inputs.get("documents")
            with self.context():
                losses = model(inputs["input"], labels, documents)
            places = octave_sums(losses, labels, documents, self.octaves)
            rows = torch.cat([places, draft_sums(model.drafted, len(losses))], 1)
            # the number of columns is known from the first batch on
            sums = sums.expand(-1, rows.shape[1]).index_add(0, on_device(source), rows)
        if self.mesh is not None:
            torch.distributed.all_reduce(sums, group=self.mesh.get_group())
        return sums[:-1].tolist()  # the last bin is the padding's

    def _figures(self, sums: list[list[float]]) -> dict[str, Any]:
        """What the row of a validation gets of the sums of each source."""
        of, n = dict(zip(self.names, sums, strict=True)), len(self.octaves)
        by_source = {name: sum(row[:n]) / sum(row[n : 2 * n]) for name, row in of.items()}
        drafts = [draft_figures(row[2 * n :]) for row in of.values()]
        return {
            "valid_loss": self._weighted(list(by_source.values())),
            "valid_loss_by_source": by_source,
            "valid_loss_by_position": {name: self._by_octave(row) for name, row in of.items()},
            **{
                f"valid_{name}": [
                    self._weighted(column)
                    for column in zip(*(each[name] for each in drafts), strict=True)
                ]
                for name in drafts[0]
            },
        }

    def _by_octave(self, sums: list[float]) -> dict[int, float]:
        """{first position of an octave: mean loss}, without octaves that have no token."""
        bins = zip(self.octaves, sums, sums[len(self.octaves) :], strict=False)
        return {first: loss / tokens for first, loss, tokens in bins if tokens}

    def _weighted(self, by_source: Sequence[float]) -> float:
        return sum(w * value for w, value in zip(self.weights, by_source, strict=True)) / sum(
            self.weights
        )


def on_device(part: torch.Tensor) -> torch.Tensor:
    return part.to(utils.device_type, torch.int64)


def octaves(seq_len: int) -> list[int]:
    """The first position of each bin of positions below seq_len: 0, 16, 32, 64 ..."""
    return [
        0,
        *(1 << power for power in range(FIRST_OCTAVE.bit_length() - 1, (seq_len - 1).bit_length())),
    ]


def octave_sums(
    losses: torch.Tensor,
    labels: torch.Tensor,
    documents: torch.Tensor | None,
    firsts: Sequence[int],
) -> torch.Tensor:
    """Losses and labels (B, S) -> for each sequence the sums of the loss, then the numbers of tokens, in the
    n bins of positions that `firsts` begin, float64 (B, 2 n). A position counts from the beginning of the
    token's document, or of the window if documents (B, S) are not known or it begins inside one.
    """
    position = torch.arange(labels.shape[1], device=labels.device).repeat(len(labels), 1)
    if documents is not None:
        documents = documents.contiguous()
        position -= torch.searchsorted(documents, documents)
    octave = torch.bucketize(position, torch.tensor(firsts[1:], device=labels.device), right=True)
    parts = torch.stack([losses.detach(), labels != IGNORE_INDEX], 1).double()
    return (parts @ nn.functional.one_hot(octave, len(firsts)).double()).flatten(1)


def draft_sums(drafted: Drafted | None, sequences: int) -> torch.Tensor:
    """For each sequence (b, 3 K): sums of every step's loss, of its tokens, and of drafts accepted up to it.

    Zero columns of a model without a head that drafts.
    """
    if drafted is None:
        return torch.zeros(sequences, 0, dtype=torch.float64, device=utils.device_type)
    assert drafted.accepted is not None, "the model was not in eval mode"
    counted = drafted.labels != IGNORE_INDEX
    parts = (drafted.losses, counted, drafted.accepted & counted)
    return torch.cat([part.double().sum(2) for part in parts]).T


def draft_figures(sums: list[float]) -> dict[str, list[float]]:
    """Of one source: each step's mean loss, and the odds that its draft is accepted where those before it
    were.
    """
    if not sums:
        return {}
    steps = len(sums) // 3
    losses, tokens, accepted = (sums[i * steps : (i + 1) * steps] for i in range(3))
    before = [tokens[0], *accepted]
    return {
        "draft_loss": ratios(*losses, *tokens),
        "acceptance": ratios(*accepted, *before[:steps]),
    }
