"""What a run shows of itself: loss by source, z-scores, tokens by source, validation, checkpoint time, TensorBoard."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace as Section

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from data_mixtures.mixture import Mixture, valid_windows
from laneformer import Laneformer, LaneformerConfig
from records.files import append_line
from train.guard import RunningZ
from train.metrics import Z_WINDOW, RunMetrics, sequence_losses
from train.validate import HeldOutValidator, deal_out

ROOT = Path(__file__).resolve().parents[2]
SEQ_LEN, GLOBAL_BATCH, STEPS, WINDOWS = 32, 8, 6, 5
ARCHITECTURE = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "sliding_window": 8, "max_position_embeddings": SEQ_LEN, "vocab_size": 512,
}  # fmt: skip
SMALL = LaneformerConfig.from_flavor("tiny", swa_layers=(0, 1, 2), **ARCHITECTURE)
EPSILON = torch.finfo(torch.float32).eps


def train(run: Path, lock: Path, *overrides: str, ranks: int = 2) -> list[dict]:
    architecture = [a for k, v in ARCHITECTURE.items() for a in (f"--architecture.{k}", str(v))]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "-m", "train",
        "--job.config_file", "configs/debug_phase1.toml", "--job.dump_folder", str(run), "--mixture.lock", str(lock),
        "--training.seq_len", str(SEQ_LEN), "--training.global_batch_size", str(GLOBAL_BATCH),
        "--training.local_batch_size", "2", "--training.steps", str(STEPS), "--checkpoint.interval", "3",
        "--validation.freq", "3", "--validation.windows_per_source", str(WINDOWS), "--architecture.swa_layers",
        "0", "1", "2", *architecture, *overrides,
    ]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
    job = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert job.returncode == 0, job.stdout[-2000:] + job.stderr[-4000:]
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def run(prepared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps on two ranks, two micro-batches each; validation and a checkpoint every third."""
    folder = tmp_path_factory.mktemp("runs") / "seen"
    train(folder, prepared_data / "phase1.lock.json", "--metrics.enable_wandb")
    return folder


def rows_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def checkpoint_model(run: Path, step: int) -> Laneformer:
    target = run / f"step-{step}.pt"
    dcp_to_torch_save(run / f"checkpoint/step-{step}", target)
    model = Laneformer(SMALL)
    model.load_state_dict({k: v for k, v in torch.load(target, weights_only=False).items() if k in model.state_dict()})
    return model


@torch.no_grad()
def plain_loss(model: Laneformer, tokens: np.ndarray) -> float:
    """Mean loss of windows (n, S + 1) in nats per token: one process, float32 model, loss in float64."""
    batch = torch.from_numpy(tokens.astype(np.int64))
    logits = model(batch[:, :-1]).double()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).item()


def test_loss_by_source_averages_to_the_loss(run: Path, prepared_data: Path) -> None:
    mixture = Mixture.open(prepared_data / "phase1.lock.json")
    for row in rows_of(run):
        _, source = mixture.sequences((row["step"] - 1) * GLOBAL_BATCH, GLOBAL_BATCH)
        share = {name: float((source == i).mean()) for i, name in enumerate(mixture.source_names)}
        assert set(row["loss_by_source"]) == {name for name in share if share[name]}
        mean = sum(share[name] * loss for name, loss in row["loss_by_source"].items())
        # both sum the same losses in float32, whole micro-batches here and sequences there: at most one rounding for
        # each of the GLOBAL_BATCH * SEQ_LEN additions
        assert abs(mean - row["loss"]) < GLOBAL_BATCH * SEQ_LEN * EPSILON * row["loss"]
        assert math.log(512) * 0.5 < min(row["loss_by_source"].values())


def test_the_first_step_by_source_is_the_plain_models(run: Path, prepared_data: Path) -> None:
    model = Laneformer(SMALL)
    model.init_weights(seed=1)
    mixture = Mixture.open(prepared_data / "phase1.lock.json")
    tokens, source = mixture.sequences(0, GLOBAL_BATCH)
    logged = rows_of(run)[0]["loss_by_source"]
    for index, name in enumerate(mixture.source_names):
        if name in logged:
            expected = plain_loss(model, tokens[source == index])
            assert abs(logged[name] - expected) < SEQ_LEN * EPSILON * expected
            another = plain_loss(model, tokens[source != index])
            assert abs(logged[name] - another) > SEQ_LEN * EPSILON * expected, "sources would not be told apart"


def test_tokens_by_source_are_the_mixtures_closed_form(run: Path, prepared_data: Path) -> None:
    mixture = Mixture.open(prepared_data / "phase1.lock.json")
    for row in rows_of(run):
        windows = mixture.windows_per_source(row["step"] * GLOBAL_BATCH)
        assert row["tokens_by_source"] == {name: n * SEQ_LEN for name, n in windows.items()}
        assert sum(row["tokens_by_source"].values()) == row["tokens_total"]


def test_validation_is_the_checkpoints_loss_in_one_process(run: Path, prepared_data: Path) -> None:
    """Fifteen windows on two ranks of four: one more is padded, which must not count."""
    rows = rows_of(run)
    assert [r["step"] for r in rows if "valid_loss" in r] == [3, 6]
    mixture = Mixture.open(prepared_data / "phase1.lock.json")
    weights = dict(zip(mixture.source_names, mixture.weights, strict=True))
    model = checkpoint_model(run, STEPS)
    expected = {name: plain_loss(model, valid_windows(prepared_data, name, WINDOWS)) for name in weights}
    total = sum(weights[name] * expected[name] for name in weights) / sum(weights.values())
    rounding = 2 * SEQ_LEN * EPSILON * total  # a sum of float32 over a sequence, and the logits' own
    for name, loss in rows[-1]["valid_loss_by_source"].items():
        assert abs(loss - expected[name]) < rounding, name
    assert abs(rows[-1]["valid_loss"] - total) < rounding
    assert abs(rows[2]["valid_loss"] - total) > rounding, "step 3 has other weights"


def test_rows_hold_what_the_hardware_did(run: Path) -> None:
    rows = rows_of(run)
    assert [r["step"] for r in rows] == [1, 2, 3, 4, 5, 6]
    for row in rows:
        assert 0.05 < row["memory_gib"] < 64
        assert row["loss_z"] == row["grad_norm_z"] == 0.0, "a quarter of the window is not filled yet"
        assert 0 <= row["data_s"] < row["seconds"]
    assert [r["checkpoint_s"] > 0 for r in rows] == [False, False, False, True, False, False]
    finished = [r["checkpoint_total_s"] for r in rows if r["checkpoint_total_s"] is not None]
    assert len(finished) <= 1, "the save of step 3; the last one ends after the last row"
    assert all(total > 0 for total in finished)


def test_tensorboard_holds_the_scalars(run: Path) -> None:
    (events,) = {path.parent for path in (run / "tb").rglob("events.out*")}
    board = EventAccumulator(str(events))
    board.Reload()
    rows = rows_of(run)

    def logged(tag: str) -> list[tuple[int, float]]:
        return [(e.step, e.value) for e in board.Scalars(tag)]

    def kept(*path: str) -> list[tuple[int, float]]:
        values = []
        for row in rows:
            value = row
            for key in path:
                value = value.get(key, {})
            if value != {}:
                values.append((row["step"], float(np.float32(value))))  # an event holds a float32
        return values

    assert logged("loss_metrics/global_avg_loss") == kept("loss")
    assert logged("valid_loss") == kept("valid_loss")
    for key in ("loss_z", "grad_norm_z", "checkpoint_s", "tokens_total"):
        assert logged(key) == kept(key)
    for name in ("web", "code"):
        for key in ("loss_by_source", "tokens_by_source", "valid_loss_by_source"):
            assert logged(f"{key}/{name}") == kept(key, name)
    assert list((run / "tb").rglob("offline-run-*/*.wandb")), "wandb was asked for, and WANDB_MODE is offline"


def test_one_rank_validates_and_resumes_the_same(run: Path, prepared_data: Path, tmp_path: Path) -> None:
    """From the checkpoint of step 3 on one rank: tokens, losses by source and validation of step 6, to rounding."""
    alone = tmp_path / "alone"
    shutil.copytree(run, alone)
    shutil.rmtree(alone / "checkpoint/step-6")
    train(alone, prepared_data / "phase1.lock.json", ranks=1)
    whole, last = rows_of(run)[-1], rows_of(alone)[-1]
    assert (last["step"], last["attempt"]) == (6, 2)
    assert last["tokens_by_source"] == whole["tokens_by_source"]
    # three steps of AdamW apart, with gradients summed in another order: the bound of the tests of resuming
    assert abs(last["valid_loss"] - whole["valid_loss"]) < 1e-5
    for name, loss in whole["loss_by_source"].items():
        assert abs(last["loss_by_source"][name] - loss) < 1e-4


def test_validation_off_the_logged_steps_is_refused() -> None:
    job: object = Section(validation=Section(freq=5), metrics=Section(log_freq=2))
    with pytest.raises(ValueError, match=r"freq = 5 is not a multiple of metrics.log_freq = 2"):
        HeldOutValidator(job, 1, 0, None, None, None)  # type: ignore[arg-type]


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 5))
def test_every_held_out_window_is_read_once_whatever_the_ranks(windows: int, ranks: int, batch: int) -> None:
    tokens, source = np.arange(windows)[:, None], np.zeros(windows, dtype=np.int64)
    dealt, sources = deal_out(tokens, source, ranks, batch, unread=1)
    assert dealt.shape[1:3] == (ranks, batch)
    assert sorted(dealt[sources == 0].ravel()) == list(range(windows))
    assert (sources == 1).sum() < ranks * batch


def test_sequence_losses_add_up_to_the_loss() -> None:
    logits, labels = torch.randn(3, 7, 11, dtype=torch.float64).float(), torch.randint(0, 11, (3, 7))
    labels[1, 2:5] = -100  # left out of the loss
    expected = torch.nn.functional.cross_entropy(logits.double().flatten(0, 1), labels.flatten(), reduction="sum")
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    by_sequence = sequence_losses(losses)
    assert by_sequence.shape == (3,)
    # every loss was rounded to float32 once or twice, the sums are exact beside that
    assert torch.allclose(by_sequence.sum(), expected, rtol=21 * EPSILON, atol=0)


@given(st.lists(st.floats(-1e6, 1e6), min_size=8, max_size=40), st.floats(0.5, 8), st.floats(-100, 100))
def test_z_scores_do_not_depend_on_unit_and_a_spike_does_not_hide_itself(values, scale: float, shift: float) -> None:
    plain, again = RunningZ(32), RunningZ(32)
    for value in values:
        plain.add(value)
        again.add(value)
    again.add(math.nan)
    assert list(plain.values) == list(again.values) == values[-32:]
    spread = max(values[-32:]) - min(values[-32:])
    assert plain.score(max(values[-32:]) + 10 * spread + 1) >= 0 >= plain.score(min(values[-32:]) - 10 * spread - 1)
    assert plain.score(math.inf) == math.inf


def test_z_scores_find_a_spike_after_a_spike() -> None:
    z = RunningZ(128)
    noise = np.random.default_rng(0).normal(2.0, 0.1, 128)
    scores = []
    for value in noise:
        scores.append(z.score(value))
        z.add(value)
    assert scores[:32] == [0.0] * 32
    # sqrt(pi / 2 / n) and 1.17 / sqrt(n) are the relative errors of median and deviation: about 15% at 64 values
    assert abs(z.score(3.0) - 10) < 3
    z.add(1e9)
    assert abs(z.score(3.0) - 10) < 3, "one spike moves neither the centre nor the scale"
    assert z.score(math.nan) == math.inf


def test_z_scores_go_on_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the rows that led to the step where the attempt begins; those behind it are taken back."""
    metrics = object.__new__(RunMetrics)
    metrics.path = tmp_path / "metrics.jsonl"
    metrics.loss_z, metrics.grad_norm_z = RunningZ(Z_WINDOW), RunningZ(Z_WINDOW)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    steps = [(1, 1.0), (2, 2.0), (3, None), (4, 4.0), (2, 2.5), (3, 3.5), (4, 4.5)]
    for step, loss in steps:
        append_line(metrics.path, json.dumps({"step": step, "loss": loss, "grad_norm": 0.5}))
    with open(metrics.path, "a") as file:
        file.write('{"step": 5, "lo')
    metrics.begin_attempt(attempt=2, step=3, tokens_before=0)
    assert list(metrics.loss_z.values) == [1.0, 2.5, 3.5]
    assert list(metrics.grad_norm_z.values) == [0.5] * 3
    assert metrics.last_logged_step == 3
