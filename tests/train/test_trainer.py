"""Tests of real jobs: run folder, plain model's losses, exact sharding and checkpointing."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import pytest

from laneformer import LaneformerConfig
from records.files import read_json, read_lines
from tests.train import logged
from tests.train.logged import train_logged
from tests.train.runs import (
    GLOBAL_BATCH,
    SEQ_LEN,
    SMALL,
    STEPS,
    launch,
    metrics,
)


@pytest.mark.job
def test_run_folder_and_metrics(whole_run, data_folder):
    rows = metrics(whole_run)
    assert [r["step"] for r in rows] == [1, 2, 3, 4]
    assert all(r["attempt"] == 1 and r["phase"] == "phase1" for r in rows)
    assert rows[-1]["tokens"] == STEPS * GLOBAL_BATCH * SEQ_LEN == rows[-1]["tokens_total"]
    # a fresh model knows nothing
    assert abs(rows[0]["loss"] - math.log(SMALL.vocab_size)) < 0.1
    assert rows[0]["lr"] == 3e-3 > rows[-1]["lr"]
    # a CPU has no datasheet peak to compare with
    assert rows[0]["mfu"] is None
    for name in ("config.toml", "model.json", "lineage.json", "attempts.jsonl", "tokenizer.model"):
        assert (whole_run / name).is_file(), name
    assert LaneformerConfig.from_dict(read_json(whole_run / "model.json")) == SMALL


@pytest.mark.job
def test_neither_recomputed_layers_nor_kernels_that_are_replaced_change_a_bit(
    whole_run, phase1, tmp_path
):
    # A kernel that is wrong on one rank is replaced on all; a warning and an event name what
    # failed.
    run = tmp_path / "planted"
    recomputed = (
        "--activation_checkpoint.mode",
        "selective",
        "--activation_checkpoint.selective_ac_option",
        "op",
    )
    planted = (
        "--experimental.custom_import",
        "tests.train.planted_kernels",
        "--training.steps",
        "2",
    )
    job = launch(run, phase1, *recomputed, *planted)
    for name in ("loss", "grad_norm"):
        assert [row[name] for row in metrics(run)] == [row[name] for row in metrics(whole_run)[:2]]
    # of each rank
    assert job.stdout.count("this job trains with plain layers instead") == 2
    (event,) = (e for e in read_lines(run / "events.jsonl") if e["kind"] == "kernels_replaced")
    words = r"model.join_norm = triton failed: layer \d is off by .* \(on rank 1\)"
    assert re.search(words, event["reason"])


@pytest.mark.job
def test_hybrid_sharding_is_the_same_job(metrics_run, phase1, tmp_path):
    # Two replicas of two shards and two micro-batches, as the 2B recipe has: the losses of plain
    # FSDP, to rounding.
    mesh = (
        "--parallelism.data_parallel_replicate_degree 2 --parallelism.data_parallel_shard_degree 2"
    )
    facts = "--experimental.custom_import tests.train.production_facts"
    hybrid = f"{mesh} {facts} --training.local_batch_size 1 --validation.no-enable"
    rows = train_logged(tmp_path / "hsdp", phase1, *hybrid.split(), ranks=4)
    for row, whole in zip(rows[:2], metrics(metrics_run)[:2], strict=True):
        assert abs(row["loss"] - whole["loss"]) < 1e-5
        assert abs(row["grad_norm"] - whole["grad_norm"]) < 1e-3 * whole["grad_norm"]
    exchanges = read_json(tmp_path / "hsdp/facts.json")["reductions"]
    once = "of embedding, each layer, norm with head: once a step"
    assert exchanges == [SMALL.num_hidden_layers + 2] * logged.STEPS, once


@pytest.mark.job
def test_a_start_warns_of_nothing(metrics_run):
    # What a user reads there is to be about the job; a warning that is new needs an answer or a
    # reason.
    (log,) = metrics_run.parent.glob(f"{metrics_run.name}.*.log")
    lines = log.read_text().splitlines()
    assert any("Training starts" in line for line in lines)
    of_so_few_steps = "exceed total steps"
    warnings = [line for line in lines if re.search("warning", line, re.IGNORECASE)]
    assert [line for line in warnings if of_so_few_steps not in line] == []


def test_a_vocabulary_that_the_model_lacks_is_refused():
    from train.trainer import check_vocabulary

    loader = SimpleNamespace(lock="lock.json", mixture=SimpleNamespace(vocab_size=66139))
    check_vocabulary(loader, 66139)
    with pytest.raises(
        ValueError,
        match="vocabulary of 66139, but the model's vocab_size is 66138; set architecture",
    ):
        check_vocabulary(loader, 66138)
