"""Real torchrun jobs on CPU: two FSDP ranks, resume, other rank counts, the phase switch, starts that must fail."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from data_mixtures.mixture import Mixture
from laneformer import Laneformer, LaneformerConfig
from laneformer.config import BOS

ROOT = Path(__file__).resolve().parents[2]
SEQ_LEN, GLOBAL_BATCH, STEPS = 32, 4, 4
# small enough that a launch costs its imports; a window shorter than the sequence, and partials that are broadcast
ARCHITECTURE = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "sliding_window": 8, "max_position_embeddings": SEQ_LEN, "vocab_size": 512,
}  # fmt: skip
SMALL = LaneformerConfig.from_flavor("tiny", swa_layers=(0, 1, 2), **ARCHITECTURE)


def launch(
    run: Path, lock: Path, *overrides: str, ranks: int = 2, config: str = "debug_phase1"
) -> subprocess.CompletedProcess:
    """One training job in its own processes; `overrides` are TorchTitan's command-line flags."""
    architecture = [a for k, v in ARCHITECTURE.items() for a in (f"--architecture.{k}", str(v))]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "-m", "train",
        "--job.config_file", f"configs/{config}.toml", "--job.dump_folder", str(run), "--mixture.lock", str(lock),
        "--training.seq_len", str(SEQ_LEN), "--training.global_batch_size", str(GLOBAL_BATCH),
        "--training.local_batch_size", "2", "--training.steps", str(STEPS), "--lr_scheduler.total_steps", str(STEPS),
        "--lr_scheduler.warmup_steps", "1", "--lr_scheduler.decay_ratio", "0.5", "--checkpoint.interval", "2",
        "--architecture.swa_layers", "0", "1", "2",
        *architecture, *overrides,
    ]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)


def succeed(run: Path, lock: Path, *overrides: str, **options) -> list[dict]:
    job = launch(run, lock, *overrides, **options)
    assert job.returncode == 0, job.stdout[-2000:] + job.stderr[-4000:]
    return metrics(run)


def fail(run: Path, lock: Path, *overrides: str, **options) -> str:
    job = launch(run, lock, *overrides, **options)
    assert job.returncode != 0, "the job was expected to refuse"
    return job.stdout + job.stderr


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights(run: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    target = run / f"step-{step}.pt"
    dcp_to_torch_save(run / f"checkpoint/step-{step}", target)
    state = torch.load(target, weights_only=False)
    return {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    assert len(a) == len(Laneformer(SMALL).state_dict())
    return max((a[k] - b[k]).abs().max().item() for k in a)


@pytest.fixture(scope="module")
def whole_run(prepared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four uninterrupted steps of phase 1 on two ranks."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    succeed(run, prepared_data / "phase1.lock.json", "--metrics.enable_wandb")
    return run


def copy_stopped_at(step: int, whole: Path, run: Path) -> None:
    """The run folder as it would be, had the job died after saving `step`."""
    shutil.copytree(whole, run)
    for path in run.glob("checkpoint/step-*"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)


def test_run_folder_and_metrics(whole_run: Path, prepared_data: Path) -> None:
    rows = metrics(whole_run)
    assert [r["step"] for r in rows] == [1, 2, 3, 4]
    assert all(r["attempt"] == 1 and r["phase"] == "phase1" for r in rows)
    assert rows[-1]["tokens"] == STEPS * GLOBAL_BATCH * SEQ_LEN == rows[-1]["tokens_total"]
    assert abs(rows[0]["loss"] - math.log(SMALL.vocab_size)) < 0.1  # a fresh model knows nothing
    assert [r["lr"] for r in rows] == sorted((r["lr"] for r in rows), reverse=True)
    assert rows[0]["lr"] == 3e-3
    assert rows[-1]["lr"] < rows[0]["lr"]
    assert rows[0]["mfu"] is None, "a CPU has no datasheet peak to compare with"
    for name in ("config.toml", "model.json", "lineage.json", "attempts.jsonl", "tokenizer.model"):
        assert (whole_run / name).is_file(), name
    assert LaneformerConfig.from_dict(json.loads((whole_run / "model.json").read_text())) == SMALL
    assert list((whole_run / "tb").rglob("events*")), "TensorBoard is on in the debug config"
    assert list((whole_run / "tb").rglob("offline-run-*/*.wandb")), "wandb was asked for, and WANDB_MODE is offline"


def test_first_loss_is_the_plain_models(whole_run: Path, prepared_data: Path) -> None:
    """Sharded initialisation draws what one process draws: the first loss is that of the plain, seeded model."""
    model = Laneformer(SMALL)
    model.init_weights(seed=1)
    expected = batch_loss(model, Mixture.open(prepared_data / "phase1.lock.json"))
    rounding = 8 * torch.finfo(torch.float32).eps * expected  # sums of two ranks in another order
    assert abs(metrics(whole_run)[0]["loss"] - expected) < rounding
    model.init_weights(seed=2)
    assert abs(batch_loss(model, Mixture.open(prepared_data / "phase1.lock.json")) - expected) > rounding


def batch_loss(model: Laneformer, mixture: Mixture) -> float:
    tokens = torch.from_numpy(mixture.sequences(0, GLOBAL_BATCH)[0])
    with torch.no_grad():
        logits = model(tokens[:, :-1])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), tokens[:, 1:].flatten()).item()


def test_masked_documents_are_seen_one_by_one(prepared_data: Path, tmp_path: Path) -> None:
    """With mask_documents the job's loss is that of every document alone, also of one that its window cuts."""
    lock = prepared_data / "phase1.lock.json"
    tokens = torch.from_numpy(Mixture.open(lock).sequences(0, 200)[0])
    inside = (tokens[:, 1:SEQ_LEN] == BOS).sum(1)
    first = int(inside.unfold(0, GLOBAL_BATCH, 1).sum(1).argmax())  # the batch in which most documents begin
    skip = ("--resilience.skip_sequences", "0", str(first)) if first else ()
    (row,) = succeed(tmp_path / "masked", lock, "--model.mask_documents", "--training.steps", "1", *skip, ranks=1)
    tokens = tokens[first : first + GLOBAL_BATCH]
    begins = [[0, *(at for at in range(1, SEQ_LEN) if window[at] == BOS)] for window in tokens]
    assert any(len(each) > 1 for each in begins), "a document begins inside a window"
    assert any(window[0] != BOS for window in tokens), "a window begins inside a document"
    model = Laneformer(SMALL)
    model.init_weights(seed=1)
    alone = 0.0
    for window, starts in zip(tokens, begins, strict=True):
        for first, end in zip(starts, [*starts[1:], SEQ_LEN], strict=True):
            alone += loss_sum(model, window[None, first : end + 1])
    expected = alone / (GLOBAL_BATCH * SEQ_LEN)
    rounding = 8 * torch.finfo(torch.float32).eps * expected  # as above; rotations by other positions among them
    assert abs(row["loss"] - expected) < rounding
    unmasked = sum(loss_sum(model, window[None]) for window in tokens) / (GLOBAL_BATCH * SEQ_LEN)
    assert abs(unmasked - expected) > rounding, "without the mask it would be another loss"


def loss_sum(model: Laneformer, tokens: torch.Tensor) -> float:
    with torch.no_grad():
        logits = model(tokens[:, :-1])
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).double(), tokens[:, 1:].flatten(), reduction="sum"
    ).item()


def test_checkpointed_layers_start_from_the_same_numbers(whole_run: Path, prepared_data: Path, tmp_path: Path) -> None:
    """Recomputing activations changes neither the initialisation nor the gradients."""
    selective = ("--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option", "op")
    rows = succeed(tmp_path / "ac", prepared_data / "phase1.lock.json", *selective, "--training.steps", "2")
    assert [r["loss"] for r in rows] == [r["loss"] for r in metrics(whole_run)[:2]]
    assert [r["grad_norm"] for r in rows] == [r["grad_norm"] for r in metrics(whole_run)[:2]]


def test_resume_is_bit_exact(whole_run: Path, prepared_data: Path, tmp_path: Path) -> None:
    run = tmp_path / "resumed"
    copy_stopped_at(2, whole_run, run)
    rows = succeed(run, prepared_data / "phase1.lock.json")
    assert [(r["step"], r["attempt"]) for r in rows[-2:]] == [(3, 2), (4, 2)]
    for resumed, whole in zip(rows[-2:], rows[2:4], strict=True):
        assert {k: resumed[k] for k in ("loss", "lr", "grad_norm", "tokens")} == {
            k: whole[k] for k in ("loss", "lr", "grad_norm", "tokens")
        }
    assert largest_difference(weights(run), weights(whole_run)) == 0.0
    attempts = [json.loads(line) for line in (run / "attempts.jsonl").read_text().splitlines()]
    assert attempts[1]["started_from"].endswith("checkpoint/step-2")


def test_resume_on_one_rank_and_without_accumulation(whole_run: Path, prepared_data: Path, tmp_path: Path) -> None:
    """One rank takes two micro-batches where two ranks took one each: the same step, to rounding."""
    run = tmp_path / "one"
    copy_stopped_at(2, whole_run, run)
    rows = succeed(run, prepared_data / "phase1.lock.json", ranks=1)
    # AdamW divides by the root of the second moment: an element with a tiny gradient may move by up to lr either way,
    # so losses are compared to rounding, weights to a fraction of the two steps' learning rates
    for resumed, whole in zip(rows[-2:], rows[2:4], strict=True):
        assert abs(resumed["loss"] - whole["loss"]) < 1e-5
    moved = largest_difference(weights(whole_run), weights(whole_run, step=2))
    assert largest_difference(weights(run), weights(whole_run)) < 0.01 * moved


def test_hybrid_sharding_is_the_same_job(whole_run: Path, prepared_data: Path, tmp_path: Path) -> None:
    """Two replicas of two shards, as the 2B recipe has 24 of 8: the losses of plain FSDP, to rounding."""
    hybrid = ("--parallelism.data_parallel_replicate_degree", "2", "--parallelism.data_parallel_shard_degree", "2")
    small = ("--training.local_batch_size", "1", "--training.steps", "2")
    rows = succeed(tmp_path / "hsdp", prepared_data / "phase1.lock.json", *hybrid, *small, ranks=4)
    for row, whole in zip(rows, metrics(whole_run)[:2], strict=True):
        assert abs(row["loss"] - whole["loss"]) < 1e-5
        assert abs(row["grad_norm"] - whole["grad_norm"]) < 1e-3 * whole["grad_norm"]


def test_damaged_newest_checkpoint_is_skipped(whole_run: Path, prepared_data: Path, tmp_path: Path) -> None:
    run = tmp_path / "damaged"
    shutil.copytree(whole_run, run)
    victim = max((run / "checkpoint/step-4").glob("*.distcp"), key=lambda p: p.stat().st_size)
    os.truncate(victim, victim.stat().st_size // 2)
    job = launch(run, prepared_data / "phase1.lock.json")
    assert job.returncode == 0, job.stderr[-3000:]
    assert "Skipping a checkpoint" in job.stdout + job.stderr
    assert victim.name in job.stdout + job.stderr
    assert [r["step"] for r in metrics(run)[-2:]] == [3, 4]


def test_phase_switch_keeps_the_model(whole_run: Path, prepared_data: Path, tmp_path: Path) -> None:
    """The first loss of phase 2 is the loss of phase 1's last weights on that batch; the schedule starts anew."""
    parent = whole_run / "checkpoint/step-4"
    run, lock = tmp_path / "phase2", prepared_data / "phase2.lock.json"
    arguments = ("--checkpoint.initial_load_path", str(parent), "--optimizer.weight_decay", "0.05")
    rows = succeed(run, lock, *arguments, config="debug_phase2")
    model = Laneformer(SMALL)
    model.load_state_dict(weights(whole_run))
    used = Mixture.open(prepared_data / "phase1.lock.json").windows_per_source(STEPS * GLOBAL_BATCH)
    mixture = Mixture.open(lock)
    mixture = Mixture.open(lock, {k: used[k] for k in mixture.source_names if k in used})
    expected = batch_loss(model, mixture)
    assert abs(rows[0]["loss"] - expected) < 8 * torch.finfo(torch.float32).eps * expected
    assert rows[0]["phase"] == "phase2"
    assert rows[0]["lr"] == 1.5e-3, "the schedule and the learning rate are phase 2's"
    assert rows[0]["tokens_total"] == (STEPS + 1) * GLOBAL_BATCH * SEQ_LEN
    assert json.loads((run / "lineage.json").read_text())["parent"] == str(parent)
    weights(run)  # as a plain file, step-4.pt
    # DCP brings the old settings along with the moments; the checkpoint must hold this job's, and the moments too
    optimizer = torch.load(run / "step-4.pt", weights_only=False)["optimizer"]
    assert optimizer["param_groups.tok_embeddings.weight.weight_decay"] == 0.05
    assert optimizer["param_groups.norm.weight.weight_decay"] == 0.0
    assert optimizer["param_groups.norm.weight.initial_lr"] == 1.5e-3
    assert "state.tok_embeddings.weight.exp_avg" in optimizer

    resumed = tmp_path / "phase2_resumed"
    copy_stopped_at(2, run, resumed)
    rows_resumed = succeed(resumed, lock, *arguments, config="debug_phase2")
    assert [r["loss"] for r in rows_resumed[-2:]] == [r["loss"] for r in rows[2:4]]
    assert largest_difference(weights(resumed), weights(run)) == 0.0


def test_never_random_weights_by_accident(whole_run: Path, prepared_data: Path, tmp_path: Path) -> None:
    lock = prepared_data / "phase2.lock.json"
    missing = tmp_path / "nowhere/checkpoint/step-9"
    said = fail(tmp_path / "a", lock, "--checkpoint.initial_load_path", str(missing), config="debug_phase2")
    assert "is not a complete checkpoint" in said
    damaged = tmp_path / "all_damaged"
    shutil.copytree(whole_run, damaged)
    for metadata in damaged.glob("checkpoint/*/.metadata"):
        metadata.write_bytes(b"")
    said = fail(damaged, prepared_data / "phase1.lock.json")
    assert "checkpoints in" in said
    assert "are incomplete" in said


def test_another_mixture_is_refused_on_resume(whole_run: Path, prepared_data: Path, tmp_path: Path) -> None:
    run = tmp_path / "other"
    copy_stopped_at(2, whole_run, run)
    assert "was trained on mixture" in fail(run, prepared_data / "phase2.lock.json")
