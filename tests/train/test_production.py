"""Tests of the shipped configs/phase1.toml, phase2.toml and phase3.toml on CPU ranks.

Only shapes, lengths and places differ from the 2B run: its 15 layers, 8 lanes, windows and delay,
compiled layers and loss, bfloat16 compute, selective checkpointing, validation and asynchronous
checkpoints meet only here. The short form is two ranks of phase 1, really started, and the later
phases. The long form is two replicas of two shards under the supervisor, and a rank that dies.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from records.files import read_json, read_lines
from tests.train import production
from tests.train.production import EVERY, HYBRID, STEPS, assert_trained
from tests.train.runs import metrics


@pytest.mark.job
def test_short_form(production_run):
    assert_trained("phase1", production_run)


@pytest.mark.rotate
def test_supervised_replicas_survive_a_killed_rank(phase1, tmp_path):
    # One of four ranks, after the first checkpoint; only the second attempt validates.
    plan = tmp_path / "faults.json"
    plan.write_text(json.dumps([{"kind": "kill", "step": EVERY + 1, "rank": 1}]))
    launcher = ["train.supervise", "--nproc-per-node", "4"]
    changes = {**HYBRID, "resilience.backoff_s": 0.1, "validation.freq": STEPS}
    run = production.train(
        launcher, "phase1", tmp_path / "run", phase1, changes, LANEFORMER_FAULTS=str(plan)
    )
    assert [attempt["step"] for attempt in read_lines(run / "attempts.jsonl")] == [0, EVERY]
    assert_trained("phase1", run, "resilience.backoff_s", validated=[STEPS])


@pytest.mark.rotate
def test_phases_2_and_3_go_on_from_there(production_run, data_folder, tmp_path):
    # Phase 3 has another rope, its sources from their beginnings and, as with 80 GB, the lanes on
    # several ranks.
    parent, lock = production_run, data_folder / "phase2.lock.json"
    sources = ",".join(source["name"] for source in read_json(lock)["sources"])
    of_phase_3 = {"mixture.begin_again": sources, "parallelism.tensor_parallel_degree": 2}
    phases: tuple[tuple[str, int, dict[str, Any]], ...] = (
        ("phase2", 2, {}),
        ("phase3", 4, of_phase_3),
    )
    for phase, ranks, changes in phases:
        start = parent / f"checkpoint/step-{STEPS}"
        more = {**changes, "checkpoint.initial_load_path": start}
        run = production.train(production.torchrun(ranks), phase, tmp_path / phase, lock, more)
        assert read_json(run / "lineage.json")["parent"] == str(start)
        assert metrics(run)[0]["tokens_total"] > metrics(parent)[-1]["tokens_total"]
        assert_trained(phase, run, "mixture.begin_again")
        parent = run
    last = metrics(parent)[-1]
    by_position = last["valid_loss_by_position"]
    assert by_position.keys() == last["valid_loss_by_source"].keys() != set()
    assert all("0" in bins.keys() <= {"0", "16"} for bins in by_position.values())
