"""Tests of real jobs: bitwise resume, other rank counts, phase switch, damaged checkpoints."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import tomli
import tomli_w
import torch

from data_mixtures.mixture import Mixture
from laneformer import Laneformer, LaneformerConfig
from records.checkpoints import read_checksums
from records.events import REFUSED, read_outcome
from records.files import read_json, read_lines
from tests.train.runs import (
    GLOBAL_BATCH,
    ROOT,
    SEQ_LEN,
    SMALL,
    STEPS,
    batch_loss,
    copy_stopped_at,
    fail,
    launch,
    load_saved,
    metrics,
    train_toy,
    weights,
)
from tests.train.supervised import assert_same

pytestmark = pytest.mark.job


def test_resume_is_bit_exact_from_the_last_checkpoint_without_a_flipped_bit(
    whole_run, phase1, tmp_path
):
    # Every rank hashes what it writes; one flipped bit in a data file, and the checkpoint before is
    # used.
    run = tmp_path / "flipped"
    shutil.copytree(whole_run, run)
    newest = run / "checkpoint/step-4"
    files = {path.name for path in newest.iterdir() if path.name != "checksums.json"}
    assert read_checksums(newest).keys() == files
    # two ranks
    assert {"__0_0.distcp", "__1_0.distcp", ".metadata", "model.json"} <= files
    content = bytearray((newest / "__1_0.distcp").read_bytes())
    content[len(content) // 2] ^= 1
    (newest / "__1_0.distcp").write_bytes(content)
    job = launch(run, phase1)
    assert "__1_0.distcp is damaged" in job.stdout
    rows = metrics(run)[-2:]
    assert [(row["step"], row["attempt"]) for row in rows] == [(3, 2), (4, 2)]
    assert read_lines(run / "attempts.jsonl")[1]["started_from"].endswith("checkpoint/step-2")
    assert_same(run, whole_run, STEPS)
    assert len(list((run / "checkpoint-aside").glob("step-4.*"))) == 1


def test_another_architecture_is_refused(whole_run, phase1, tmp_path):
    # Neither a restart nor a new phase goes on with a model that computes something else, or lacks
    # layers.
    run = tmp_path / "other"
    copy_stopped_at(2, whole_run, run)
    before = (run / "model.json").read_text()
    output = fail(
        run, phase1, "--architecture.rope_theta", "5e5", "--architecture.broadcast_delay", "1"
    )
    assert "broadcast_delay = 2 (this job: 1), rope_theta = 10000.0 (this job: 500000.0)" in output
    assert "Traceback" not in output
    assert output.count("The job is refused") == 1
    assert (run / "model.json").read_text() == before
    outcome = read_outcome(run)
    # what the supervisor does not try again
    assert (outcome["step"], outcome["code"]) == (0, REFUSED)
    for path in (run / "model.json", *run.glob("checkpoint/*/model.json")):
        # as older versions left it
        path.unlink()
    (run / "checkpoint/step-2/checksums.json").unlink()
    output = fail(run, phase1, "--architecture.num_hidden_layers", "3", ranks=1)
    assert "holds 9 tensors this architecture has not, such as layers.3." in output


def second_mixture(data: Path) -> Mixture:
    # as phase 2 goes on behind `whole_run`
    used = Mixture.open(data / "phase1.lock.json").windows_per_source(STEPS * GLOBAL_BATCH)
    lock = data / "phase2.lock.json"
    return Mixture.open(lock, {k: used[k] for k in Mixture.open(lock).source_names if k in used})


YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "layers": "full",
}


def test_a_phase_goes_on_with_another_rope(whole_run, data_folder, tmp_path):
    # Only what is output changes: its first loss is that of the same weights with YaRN on full
    # layers, one of them without rotation, and windows' own base; each of these alone is refused
    # where the job does not name it.
    run, lock = tmp_path / "yarn", data_folder / "phase2.lock.json"
    job = tomli.loads((ROOT / "configs/debug_phase2.toml").read_text())
    job["architecture"] = {"rope_scaling": YARN, "nope_layers": [3]}
    job["checkpoint"]["allow_changes"] = ["rope_scaling", "rope_theta", "window_rope_theta"]
    (tmp_path / "job.toml").write_text(tomli_w.dumps(job))
    path = os.path.relpath(tmp_path / "job", ROOT / "configs")
    arguments = (
        "--checkpoint.initial_load_path",
        str(whole_run / "checkpoint/step-4"),
        "--training.steps",
        "1",
    )
    arguments += ("--architecture.rope_theta", "1e3", "--architecture.window_rope_theta", "1e4")
    assert "nope_layers = () (this job: (3,))" in fail(run, lock, *arguments, config=path, ranks=1)
    allowed = ("rope_scaling", "rope_theta", "window_rope_theta", "nope_layers")
    rows = train_toy(run, lock, *arguments, "--checkpoint.allow_changes", *allowed, config=path)
    changed = replace(
        SMALL, rope_scaling=YARN, nope_layers=(3,), rope_theta=1e3, window_rope_theta=1e4
    )
    assert LaneformerConfig.from_dict(read_json(run / "model.json")) == changed
    mixture = second_mixture(data_folder)
    losses = []
    for config in (changed, SMALL):
        model = Laneformer(config)
        model.load_state_dict(weights(whole_run))
        losses.append(batch_loss(model, mixture))
    rounding = 8 * torch.finfo(torch.float32).eps * losses[0]
    assert abs(rows[0]["loss"] - losses[0]) < rounding < abs(losses[0] - losses[1])


def test_phase_switch_keeps_the_model(whole_run, data_folder, tmp_path):
    # The first loss of phase 2 is the loss of phase 1's last weights on that batch; the schedule
    # starts again.
    parent = whole_run / "checkpoint/step-4"
    run, lock = tmp_path / "phase2", data_folder / "phase2.lock.json"
    arguments = ("--checkpoint.initial_load_path", str(parent), "--optimizer.weight_decay", "0.05")
    rows = train_toy(run, lock, *arguments, config="debug_phase2")
    model = Laneformer(SMALL)
    model.load_state_dict(weights(whole_run))
    expected = batch_loss(model, second_mixture(data_folder))
    assert abs(rows[0]["loss"] - expected) < 8 * torch.finfo(torch.float32).eps * expected
    assert rows[0]["phase"] == "phase2"
    # the schedule and the learning rate are phase 2's
    assert rows[0]["lr"] == 1.5e-3
    assert rows[0]["tokens_total"] == (STEPS + 1) * GLOBAL_BATCH * SEQ_LEN
    assert read_json(run / "lineage.json")["parent"] == str(parent)
    # DCP brings the old settings along with the moments; the checkpoint must hold this job's, and
    # the moments too
    optimizer = load_saved(run)["optimizer"]
    assert optimizer["param_groups.tok_embeddings.weight.weight_decay"] == 0.05
    assert optimizer["param_groups.norm.weight.weight_decay"] == 0.0
    assert optimizer["param_groups.norm.weight.initial_lr"] == 1.5e-3
    assert "state.tok_embeddings.weight.exp_avg" in optimizer


def test_a_finished_run_is_not_extended(whole_run, phase1, tmp_path):
    run = shutil.copytree(whole_run, tmp_path / "run")
    settings = ("--training.steps", "6", "--lr_scheduler.total_steps", "6")
    assert "the decay had begun at step 4; keep the schedule" in fail(run, phase1, *settings)
    assert (run / "checkpoint/step-4/.metadata").is_file()
    assert read_outcome(run)["code"] == REFUSED


def test_never_random_weights_by_accident(whole_run, data_folder, tmp_path):
    # A parent that is missing; a run whose checkpoints were lost. (Damaged ones: tests/records.)
    locks = [data_folder / f"phase{n}.lock.json" for n in (1, 2)]
    missing = ("--checkpoint.initial_load_path", str(tmp_path / "nowhere/checkpoint/step-9"))
    output = fail(tmp_path / "a", locks[1], *missing, config="debug_phase2", ranks=1)
    assert "is not a complete checkpoint" in output
    # the file system of the checkpoints is away
    run = shutil.copytree(whole_run, tmp_path / "lost", ignore=shutil.ignore_patterns("checkpoint"))
    output = fail(run, locks[0], "--resilience.max_failed_saves", "1", ranks=1)
    assert f"ends at step {STEPS}, but" in output
