"""Jobs whose lanes are on several ranks: the same run as on one, whatever the degree, at each start and phase."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.train.runs import SMALL, STEPS, copy_stopped_at, fail, largest_difference, metrics, saved, succeed, weights

DEGREE = "--parallelism.tensor_parallel_degree"
SHARDS = "--parallelism.data_parallel_shard_degree"
FIGURES = ("loss", "grad_norm", "z_loss", "max_logit")
CHECKED = ("--validation.freq", "2", "--metrics.log_freq", "1")


def largest_figure(run: Path, reference: Path, first: int = 1) -> float:
    """Relative difference of what is logged of each step from `first` on, validation included."""
    worst = 0.0
    for row, other in zip(metrics(run)[first - 1 :], metrics(reference)[first - 1 :], strict=True):
        assert row["step"] == other["step"]
        names = [*FIGURES, *(["valid_loss"] if "valid_loss" in other else [])]
        pairs = [(row[name], other[name]) for name in names]
        pairs += [p for name in ("layer_grad_norm", "layer_stream_rms") for p in zip(row[name], other[name], strict=True)]
        worst = max(worst, *(abs(a - b) / abs(b) for a, b in pairs))
    return worst


@pytest.mark.parametrize(("lanes", "shards"), [(2, 1), (4, 1), (2, 2)])
def test_a_run_is_that_of_one_rank(whole_run: Path, prepared_data: Path, tmp_path: Path, lanes: int, shards: int) -> None:
    run = tmp_path / "run"
    mesh = (DEGREE, str(lanes), SHARDS, str(shards), "--activation_checkpoint.mode", "full")
    succeed(run, prepared_data / "phase1.lock.json", *mesh, ranks=lanes * shards)
    print(largest_figure(run, whole_run), largest_difference(weights(run), weights(whole_run)))
