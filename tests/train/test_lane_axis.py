"""Tests of lanes on several ranks: the same run as on whole ranks, restarts and phases."""

from __future__ import annotations

import pytest
import torch

from laneformer.hf.export import load_weights
from records.files import read_lines
from tests.train import logged
from tests.train.logged import train_logged
from tests.train.runs import SMALL, copy_stopped_at, fail, metrics, weights
from train.metrics import _flat

pytestmark = pytest.mark.job
EPSILON = torch.finfo(torch.float32).eps
LAST = logged.STEPS
FIGURES = (
    "loss",
    "max_loss",
    "grad_norm",
    "z_loss",
    "max_logit",
    "valid_loss",
    "layer_grad_norm",
    "layer_stream_rms",
    "loss_by_source",
    "valid_loss_by_source",
)


def mesh(lanes: int, shards: int) -> tuple[str, ...]:
    degrees = {"tensor_parallel_degree": lanes, "data_parallel_shard_degree": shards}
    return tuple(
        word for name, value in degrees.items() for word in (f"--parallelism.{name}", str(value))
    )


def difference(row: dict, other: dict) -> float:
    # the largest relative one of the model's figures
    ours, theirs = (
        _flat({name: value for name, value in figures.items() if name in FIGURES})
        for figures in (row, other)
    )
    return max(abs(ours[name] - value) / abs(value) for name, value in theirs.items())


@pytest.fixture(scope="module")
def on_lanes(phase1, tmp_path_factory):
    # two lane ranks in each of two shards
    run = tmp_path_factory.mktemp("lanes") / "run"
    # each layer is computed twice
    more = ("--activation_checkpoint.mode", "full")
    train_logged(run, phase1, *mesh(2, 2), *more, ranks=4)
    return run


def test_every_figure_is_that_of_whole_ranks(on_lanes, metrics_run):
    rows, others = metrics(on_lanes), metrics(metrics_run)
    assert (
        [row["step"] for row in rows] == [row["step"] for row in others] == list(range(1, LAST + 1))
    )
    # before AdamW makes large of small: it divides by a root
    assert difference(rows[0], others[0]) < 32 * EPSILON
    assert max(difference(*pair) for pair in zip(rows, others, strict=True)) < 1e-4
    assert rows[-1]["tokens"] == others[-1]["tokens"]
    ours, theirs = weights(on_lanes, LAST), weights(metrics_run, LAST)
    assert ours.keys() == theirs.keys()
    assert {name: w.shape for name, w in ours.items()} == {
        name: w.shape for name, w in theirs.items()
    }
    assert max((ours[name] - w).abs().max().item() for name, w in theirs.items()) < 1e-4
    # as an export reads them
    exported = load_weights(on_lanes / f"checkpoint/step-{LAST}", SMALL)
    assert exported.keys() == ours.keys()
    assert all(torch.equal(exported[name], w) for name, w in ours.items())


@pytest.mark.parametrize(("lanes", "ranks"), [(4, 4), (1, 1)])
def test_a_run_goes_on_with_other_ranks(on_lanes, phase1, tmp_path, lanes, ranks):
    # from the checkpoint of step 4
    run = tmp_path / "run"
    copy_stopped_at(4, on_lanes, run)
    train_logged(run, phase1, *mesh(lanes, ranks // lanes), ranks=ranks)
    row, other = metrics(run)[-1], metrics(on_lanes)[-1]
    assert (row["step"], row["attempt"], row["tokens"]) == (LAST, 2, other["tokens"])
    assert abs(row["loss"] - other["loss"]) < 1e-5
    assert abs(row["valid_loss"] - other["valid_loss"]) < 1e-5
    assert read_lines(run / "attempts.jsonl")[-1]["world_size"] == ranks


def test_ranks_and_lanes_have_to_fit(phase1, tmp_path):
    output = fail(tmp_path / "a", phase1, *mesh(2, 2), ranks=2)
    assert "times tensor_parallel_degree = 2; start 4" in output
