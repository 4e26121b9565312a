"""Tests of the third stage as a job: resumed, killed, validated; and of refused data."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from data_mixtures.mixture import CONVERSATIONS, TRAINED, Mixture, valid_windows
from laneformer.hf.tokenizer import CHAT_TEMPLATE
from records import job as job_sections
from records.files import read_json
from tests.train import production
from tests.train.runs import copy_stopped_at, metrics, train_toy, weights
from tests.train.sft import chats
from tests.train.supervised import assert_same
from train.data import build_mixture_loader

STEPS, GLOBAL_BATCH, WINDOWS = 4, 4, 5
EPSILON = torch.finfo(torch.float32).eps


def flags(parent: Path, steps: int = STEPS) -> tuple[str, ...]:
    schedule = f"--training.steps {steps} --lr_scheduler.total_steps {steps}"
    validation = f"--validation.freq 2 --validation.windows_per_source {WINDOWS}"
    start = ("--checkpoint.initial_load_path", str(parent))
    return *chats.FLAGS, *start, *schedule.split(), *validation.split()


@pytest.fixture(scope="module")
def whole(lock, parent, tmp_path_factory):
    run = tmp_path_factory.mktemp("sft") / "whole"
    train_toy(run, lock, *flags(parent), config="debug_sft")
    return run


def plain_loss(
    weights_of: Path, step: int, tokens: np.ndarray, marks: np.ndarray
) -> tuple[torch.Tensor, int, float]:
    """Return losses (B, S), counted labels and the mean loss's gradient norm, in float64."""
    inputs, labels = chats.batch(tokens, marks)
    model = chats.titan_model()
    model.load_state_dict(
        {k: v for k, v in weights(weights_of, step).items() if k in model.state_dict()}
    )
    losses = model(inputs["input"], labels, inputs["documents"])
    count = int((marks[:, 1:] & TRAINED).astype(bool).sum())
    (losses.sum() / count).backward()
    norm = (
        torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item()
    )
    return losses.detach(), count, norm


@pytest.mark.job
def test_the_mean_is_over_all_trained_tokens_of_the_global_batch(whole, lock, parent):
    # Loss and gradient of the first step, from the parent's weights; the ranks have different
    # numbers of labels.
    mixture = Mixture.open(lock)
    tokens, marks = mixture.sequences(0, GLOBAL_BATCH)[0], mixture.flags(0, GLOBAL_BATCH)
    losses, count, norm = plain_loss(parent.parents[1], STEPS, tokens, marks)
    row = metrics(whole)[0]
    # float32 through four layers, sums in another order
    rounding = 1e-6 * norm
    assert abs(row["loss"] - losses.sum().item() / count) < 16 * EPSILON * row["loss"]
    assert abs(row["grad_norm"] - norm) < 100 * rounding
    labels_of_ranks = [(marks[rank * 2 : rank * 2 + 2, 1:] & TRAINED).sum() for rank in range(2)]
    assert labels_of_ranks[0] != labels_of_ranks[1]
    means = [
        losses[rank * 2 : rank * 2 + 2].sum().item() / labels_of_ranks[rank] for rank in range(2)
    ]
    # a mean of means would be seen
    assert abs(sum(means) / 2 - row["loss"]) > 100 * EPSILON * row["loss"]
    assert row["lr"] == pytest.approx(3e-3)
    assert row["phase"] == "sft"
    # those of the phases before count
    assert row["tokens_total"] > row["tokens"]
    # whose export has it (test_turns.py)
    assert (whole / "chat_template.jinja").read_bytes() == CHAT_TEMPLATE.read_bytes()


@pytest.mark.job
def test_held_out_loss_is_that_of_answers(whole, lock):
    windows = (
        valid_windows(lock.parent, "identity", WINDOWS),
        valid_windows(lock.parent, "identity", WINDOWS, flags=True),
    )
    losses, count, _ = plain_loss(whole, STEPS, *(array.astype(np.int64) for array in windows))
    row = metrics(whole)[-1]
    assert abs(row["valid_loss"] - losses.sum().item() / count) < 64 * EPSILON * row["valid_loss"]
    assert [r["step"] for r in metrics(whole) if "valid_loss" in r] == [2, 4]


@pytest.mark.job
def test_resumed_it_is_the_same_run(whole, lock, parent, tmp_path):
    resumed = tmp_path / "resumed"
    copy_stopped_at(2, whole, resumed)
    train_toy(resumed, lock, *flags(parent), config="debug_sft")
    assert_same(resumed, whole, STEPS)


def test_packed_conversations_must_not_see_each_other(lock):
    job = SimpleNamespace(
        job=SimpleNamespace(dump_folder=str(lock.parent / "run")),
        mixture=job_sections.Mixture(lock=str(lock)),
        model=SimpleNamespace(mask_documents=False),
        resilience=job_sections.Resilience(),
        training=SimpleNamespace(seq_len=chats.SEQ_LEN, local_batch_size=1),
    )
    with pytest.raises(ValueError, match=r"set model\.mask_documents = true"):
        build_mixture_loader(1, 0, None, job)
    job.model.mask_documents = True
    assert build_mixture_loader(1, 0, None, job).mixture.packed
    assert read_json(lock)["packing"] == CONVERSATIONS
    job.mixture.lock = str(lock.parent)
    with pytest.raises(ValueError, match=r"is a folder; give the lock file in it: sft\.lock\.json"):
        build_mixture_loader(1, 0, None, job)


@pytest.mark.rotate
def test_shipped_job(production_run, lock, tmp_path):
    # configs/sft.toml on two ranks with shapes shrunk: compiled, bfloat16, checkpointed, validated
    start = production_run / f"checkpoint/step-{production.STEPS}"
    more = {"training.seq_len": chats.SEQ_LEN, "checkpoint.initial_load_path": start}
    run = production.train(production.torchrun(2), "sft", tmp_path / "sft", lock, more)
    production.assert_trained("sft", run)
