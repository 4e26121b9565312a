"""An averaged checkpoint in use: a phase starts from it, and the watcher evaluates it like any other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data_mixtures.mixture import Mixture
from evals.watch import Watcher
from laneformer import Laneformer
from laneformer.hf.export import load_weights
from records.events import read_outcome
from records.job import read_job
from tests.train.runs import SMALL, batch_loss, metrics, succeed
from tools.average import average

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def averaged(whole_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("averaged") / "mean"
    average((whole_run,), out, last=2)
    return out


@pytest.mark.job
def test_a_phase_starts_from_it(averaged: Path, prepared_data: Path, tmp_path: Path) -> None:
    start = averaged / "checkpoint/step-4"
    model = Laneformer(SMALL)
    model.load_state_dict(load_weights(start, SMALL))
    options = ("--checkpoint.initial_load_path", str(start), "--checkpoint.initial_load_model_only",
               "--checkpoint.no-allow_fresh_start", "--phase.name", "phase2", "--training.steps", "1")  # fmt: skip
    (row,) = succeed(tmp_path / "next", prepared_data / "phase2.lock.json", *options)
    expected = batch_loss(model, Mixture.open(prepared_data / "phase2.lock.json"))
    assert row["loss"] == pytest.approx(expected, rel=1e-5), "the first loss is that of the averaged weights"
    assert json.loads((tmp_path / "next/lineage.json").read_text())["parent"] == str(start.resolve())
    assert read_outcome(tmp_path / "next")["code"] == 0  # type: ignore[index]


@pytest.mark.rotate
def test_the_watcher_evaluates_it(averaged: Path, prepared_data: Path, whole_run: Path) -> None:
    options = ["--job.config_file", str(averaged / "config.toml"), "--job.dump_folder", str(averaged)]
    options += [
        "--evals.every_steps",
        "100",
        "--evals.commands",
        f"bits_per_byte --data {prepared_data} --limit 2",
    ]
    assert Watcher(read_job(options)).watch(once=True, every_s=0) == 0
    (record,) = map(json.loads, (averaged / "evals.jsonl").read_text().splitlines())
    last = metrics(whole_run)[-1]
    assert [record[key] for key in ("kind", "step", "phase")] == ["bits_per_byte", 4, "phase1"]
    assert record["tokens_total"] == last["tokens_total"]
