"""Tests of the multi-token prediction head: trained with the model, and after it."""

from __future__ import annotations

import pytest
import torch

from records.checkpoints import read_metadata
from tests.train.logged import STEPS, train_logged
from tests.train.runs import metrics, weights

pytestmark = pytest.mark.job
HEAD = ("--architecture.num_nextn_predict_layers", "1")


@pytest.fixture(scope="module")
def with_head(phase1, tmp_path_factory):
    run = tmp_path_factory.mktemp("with_head") / "run"
    train_logged(run, phase1, *HEAD)
    return run


def test_trained_with_the_model(with_head):
    # Every step logs the loss of the draft, every validation three losses and how often drafts are
    # right.
    rows = metrics(with_head)
    assert all(len(row["draft_loss"]) == 1 and row["draft_loss"][0] > 1 for row in rows)
    validated = [row for row in rows if "valid_loss" in row]
    assert validated
    for row in validated:
        assert len(row["valid_draft_loss"]) == len(row["valid_acceptance"]) == 3
        assert all(0 <= odds <= 1 for odds in row["valid_acceptance"] if odds is not None)
    before, after = (row["valid_draft_loss"][0] for row in (validated[0], validated[-1]))
    assert after < before


def test_ranks_change_no_step(with_head, phase1, tmp_path):
    # One rank goes on from the same start to the same losses: the head is sharded, and runs twice.
    train_logged(tmp_path / "alone", phase1, *HEAD, ranks=1)
    for ours, theirs in zip(metrics(tmp_path / "alone"), metrics(with_head), strict=True):
        assert abs(ours["draft_loss"][0] - theirs["draft_loss"][0]) < 1e-4
        assert abs(ours["grad_norm"] - theirs["grad_norm"]) < 1e-3 * theirs["grad_norm"]


def test_a_checkpoint_without_the_head_is_a_start_and_no_restart(
    metrics_run, with_head, phase1, tmp_path
):
    # The base stays as it was, bit for bit; the head has moved.
    parent = metrics_run / f"checkpoint/step-{STEPS}"
    start = ("--checkpoint.initial_load_path", str(parent), "--checkpoint.initial_load_model_only")
    frozen = ("--mtp.freeze_base", "--mtp.steps", "3", "--mtp.loss_weight", "1.0")
    run = tmp_path / "after"
    train_logged(run, phase1, *HEAD, *frozen, *start)
    rows = metrics(run)
    assert all(len(row["draft_loss"]) == 3 for row in rows)
    first, last = (row["valid_draft_loss"][0] for row in rows if "valid_loss" in row)
    # on the same held-out windows
    assert last < first
    before, after, born = (
        weights(metrics_run, STEPS),
        weights(run, STEPS),
        weights(with_head, STEPS),
    )
    names = {name for name in after if not name.startswith("optimizer")}
    assert {name for name in names if name.startswith("mtp.")} == {
        n for n in born if n.startswith("mtp.")
    }
    for name in (n for n in names if not n.startswith("mtp.")):
        assert torch.equal(before[name], after[name]), name
    stored = read_metadata(run / f"checkpoint/step-{STEPS}").state_dict_metadata
    moments = [name for name in stored if "exp_avg" in name]
    assert moments
    assert all(".mtp." in name for name in moments)
