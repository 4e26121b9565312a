"""An averaged checkpoint in use: a phase starts from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data_mixtures.mixture import Mixture
from laneformer import Laneformer
from laneformer.hf.export import load_weights
from records.events import read_outcome
from tests.train.runs import SMALL, batch_loss, succeed
from tools.average import average

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.job
def test_a_phase_starts_from_it(whole_run: Path, prepared_data: Path, tmp_path: Path) -> None:
    average((whole_run,), tmp_path / "mean", last=2)
    start = tmp_path / "mean/checkpoint/step-4"
    model = Laneformer(SMALL)
    model.load_state_dict(load_weights(start, SMALL))
    options = ("--checkpoint.initial_load_path", str(start), "--checkpoint.initial_load_model_only",
               "--checkpoint.no-allow_fresh_start", "--phase.name", "phase2", "--training.steps", "1")  # fmt: skip
    (row,) = succeed(tmp_path / "next", prepared_data / "phase2.lock.json", *options, ranks=1)
    expected = batch_loss(model, Mixture.open(prepared_data / "phase2.lock.json"))
    assert row["loss"] == pytest.approx(expected, rel=1e-5), "the first loss is that of the averaged weights"
    assert json.loads((tmp_path / "next/lineage.json").read_text())["parent"] == str(start.resolve())
    assert read_outcome(tmp_path / "next")["code"] == 0  # type: ignore[index]
