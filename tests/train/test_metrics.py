"""Tests of metrics.jsonl, TensorBoard and wandb: loss and tokens by source, z-scores, memory."""

from __future__ import annotations

import re
import statistics
from collections import deque

import numpy as np
import pytest
import torch

from data_mixtures.mixture import Mixture
from laneformer import Laneformer
from records.files import read_lines
from records.usage import money
from tests.records.lines import write_lines
from tests.train.logged import EPSILON, GLOBAL_BATCH, STEPS, plain_loss
from tests.train.runs import SEQ_LEN, SMALL, metrics
from train.guard import RunningZ
from train.metrics import RunMetrics


@pytest.mark.job
def test_the_first_step_by_source_is_the_plain_models(metrics_run, phase1):
    model = Laneformer(SMALL)
    model.init_weights(seed=1)
    mixture = Mixture.open(phase1)
    tokens, source = mixture.sequences(0, GLOBAL_BATCH)
    logged = metrics(metrics_run)[0]["loss_by_source"]
    for index, name in enumerate(mixture.source_names):
        if name in logged:
            expected = plain_loss(model, tokens[source == index])
            assert abs(logged[name] - expected) < SEQ_LEN * EPSILON * expected
            another = plain_loss(model, tokens[source != index])
            # sources would not be told apart
            assert abs(logged[name] - another) > SEQ_LEN * EPSILON * expected


@pytest.mark.job
def test_rows_hold_what_the_hardware_did(metrics_run):
    rows = metrics(metrics_run)
    assert [r["step"] for r in rows] == [1, 2, 3, 4, 5, 6]
    for row in rows:
        assert 0.05 < row["memory_gib"] < 64
        assert 0 <= row["data_s"] < row["seconds"]
    assert [r["checkpoint_s"] > 0 for r in rows] == [False, False, True, False, True, False]
    for key in ("loss", "grad_norm"):
        guards = RunningZ(4)  # resilience.spike_window
        for row in rows:
            assert row[f"{key}_z"] == guards.score(row[key])
            guards.add(row[key])
    finished = {
        r["step"]: r["checkpoint_total_s"] for r in rows if r["checkpoint_total_s"] is not None
    }
    # the save of step 4 waited for that of step 2, so a row up to step 5 says how long it took
    assert finished
    assert min(finished) <= 5
    assert all(0 < total < 60 for total in finished.values())


@pytest.mark.job
def test_rows_say_what_the_job_has_used_and_when_it_ends(metrics_run):
    rows, (start,) = metrics(metrics_run), read_lines(metrics_run / "attempts.jsonl")
    for row in rows:
        # two ranks; the line is written when the model is built
        hours = 2 * (row["time"] - start["time"]) / 3600
        assert hours < row["gpu_hours"] < hours + 2 * 60 / 3600
        assert row["cost"] == 3600 * row["gpu_hours"]
        rate = 2 * statistics.median(r["tokens_per_s_per_device"] for r in rows[: row["step"]])
        left_s = (STEPS - row["step"]) * GLOBAL_BATCH * SEQ_LEN / rate
        assert row["finish_time"] - row["time"] == pytest.approx(left_s, abs=0.01)
        assert row["gpu_hours_left"] == pytest.approx(2 * left_s / 3600, abs=1e-6)
    output = next(metrics_run.parent.glob(f"{metrics_run.name}.*.log")).read_text()
    line = next(
        line
        for line in output.splitlines()
        if re.search(r"step:\s+5 ", line) and "GPU-hours" in line
    )
    used, remaining = rows[4]["gpu_hours"], rows[4]["gpu_hours_left"]
    paid = money(used, {"gpu_hour_price": 3600, "currency": "EUR"})
    assert f"GPU-hours: {used:,.1f} of {used + remaining:,.1f}  cost: {paid} of " in line
    assert re.search(r"tps: .*left: \d+ s, until 20\d\d-\d\d-\d\d \d\d:\d\d UTC", line)


@pytest.mark.job
def test_tensorboard_holds_the_scalars(metrics_run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (events,) = {path.parent for path in (metrics_run / "tb").rglob("events.out*")}
    board = EventAccumulator(str(events))
    board.Reload()
    rows = metrics(metrics_run)

    tags = {"loss": "loss_metrics/global_avg_loss"}
    for key in ("loss", "valid_loss", "loss_z", "grad_norm_z", "checkpoint_s", "tokens_total"):
        logged = [(event.step, event.value) for event in board.Scalars(tags.get(key, key))]
        # an event holds a float32
        assert logged == [(row["step"], float(np.float32(row[key]))) for row in rows if key in row]
    for key in ("loss_by_source", "tokens_by_source", "valid_loss_by_source"):
        for name in ("web", "code"):
            values = [row[key][name] for row in rows if name in row.get(key, {})]
            assert [event.value for event in board.Scalars(f"{key}/{name}")] == pytest.approx(
                values, rel=EPSILON
            )
    # wandb was asked for, and WANDB_MODE is offline
    assert list((metrics_run / "tb").rglob("offline-run-*/*.wandb"))


@pytest.fixture
def new_attempt(tmp_path, monkeypatch):
    # in an empty run folder, without TorchTitan's set-up
    metrics = object.__new__(RunMetrics)
    metrics.path, metrics.rates, metrics.began = tmp_path / "metrics.jsonl", deque(), 0.0
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    return metrics


def test_gpu_hours_go_on_after_a_restart(new_attempt):
    # What earlier attempts held, and this one from the moment at which the supervisor announced it.
    run = new_attempt.path.parent
    write_lines(run / "attempts.jsonl", [{"attempt": 1, "time": 1000.0, "world_size": 4}])
    write_lines(run / "events.jsonl", [{"kind": "supervisor_start", "attempt": 2, "time": 9000.0}])
    write_lines(
        new_attempt.path,
        [{"step": 7, "attempt": 1, "time": 4600.0, "tokens_per_s_per_device": 50.0}],
    )
    new_attempt.begin_attempt(attempt=2, step=5, tokens=50, tokens_before=0)
    assert (new_attempt.gpu_hours_before, new_attempt.began, list(new_attempt.rates)) == (
        4.0,
        9000.0,
        [],
    )
    new_attempt.begin_attempt(attempt=2, step=7, tokens=70, tokens_before=0)
    assert list(new_attempt.rates) == [50.0]


def test_the_speed_goes_on_after_a_restart(new_attempt):
    # From the rows that led to the step where the attempt begins; those behind it are taken back.
    rates = [(1, 1.0), (2, 2.0), (3, None), (4, 4.0), (2, 2.5), (3, 3.5), (4, 4.5)]
    write_lines(
        new_attempt.path, ({"step": step, "tokens_per_s_per_device": rate} for step, rate in rates)
    )
    with open(new_attempt.path, "a") as file:
        file.write('{"step": 5, "lo')
    new_attempt.begin_attempt(attempt=2, step=3, tokens=30, tokens_before=0)
    assert list(new_attempt.rates) == [1.0, 2.5, 3.5]
    assert new_attempt.last_logged_tokens == 30


@pytest.mark.job
def test_layers_and_logits_are_the_plain_models(metrics_run, phase1):
    # Gradient norms by layer of the whole step, streams of the first micro-batch, logits of all:
    # two ranks as one.
    (row, *_) = metrics(metrics_run)
    model = Laneformer(SMALL)
    model.init_weights(seed=1)
    tokens = torch.from_numpy(Mixture.open(phase1).sequences(0, GLOBAL_BATCH)[0])
    streams: list[torch.Tensor] = []
    for layer in model.layers:
        layer.register_forward_hook(lambda _, __, outputs: streams.append(outputs[0]))
    logits = model(tokens[:, :-1]).double()
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    # two micro-batches
    first = GLOBAL_BATCH // 2
    rms = [stream[:first].double().square().mean().sqrt().item() for stream in streams]
    norms = [
        sum(p.grad.double().square().sum() for p in layer.parameters()) ** 0.5
        for layer in model.layers
    ]
    # float32 through four layers: a hundred roundings of the value
    assert row["layer_stream_rms"] == pytest.approx(rms, rel=100 * EPSILON)
    assert row["layer_grad_norm"] == pytest.approx(
        [float(norm) for norm in norms], rel=100 * EPSILON
    )
    assert row["max_logit"] == pytest.approx(logits.max().item(), rel=100 * EPSILON)
    assert row["z_loss"] == pytest.approx(
        logits.logsumexp(-1).square().mean().item(), rel=100 * EPSILON
    )
    # one value for each layer
    assert len(set(row["layer_stream_rms"])) == SMALL.num_hidden_layers
