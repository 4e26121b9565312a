"""Tests that norm scales do not decay, and that the job's settings replace a checkpoint's."""

from __future__ import annotations

from types import SimpleNamespace as Section

import pytest
import torch

from laneformer import Laneformer, LaneformerConfig
from train.optimizer import (
    apply_optimizer_settings,
    build_clamped_lr_schedulers,
    build_laneformer_optimizers,
)

CONFIG = LaneformerConfig.from_flavor("tiny", vocab_size=512)
SETTINGS = {
    "name": "AdamW",
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "implementation": "for-loop",
    "early_step_in_backward": False,
}


def test_groups_and_settings():
    model = Laneformer(CONFIG)
    container = build_laneformer_optimizers([model], Section(**SETTINGS), None)
    (optimizer,) = container.optimizers
    matrices, scales = optimizer.param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)].rsplit(".", 2)[-2][-4:] for p in scales["params"]} == {"norm"}
    assert len(matrices["params"]) + len(scales["params"]) == len(names)
    assert (matrices["weight_decay"], scales["weight_decay"]) == (0.1, 0.0)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    # as DCP leaves them
    for group in optimizer.param_groups:
        group.update(lr=9.0, initial_lr=9.0, betas=(0.1, 0.1), eps=1.0, weight_decay=9.0)
    section = Section(**{**SETTINGS, "lr": 2e-3, "weight_decay": 0.2})
    apply_optimizer_settings(container, Section(schedulers=[schedule]), section)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 1e-3]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.0]
    assert all(
        group["betas"] == (0.9, 0.95) and group["eps"] == 1e-8 for group in optimizer.param_groups
    )


@pytest.mark.parametrize("kind", ["linear", "sqrt", "cosine"])
def test_the_rate_stays_at_its_minimum(kind):
    container = build_laneformer_optimizers([torch.nn.Linear(2, 2)], Section(**SETTINGS), None)
    section = Section(
        warmup_steps=5, total_steps=30, decay_ratio=0.5, decay_type=kind, min_lr_factor=0.1
    )
    schedule = build_clamped_lr_schedulers(container, section, 30).schedulers[0]
    (factor, _) = schedule.lr_lambdas
    # the warmup starts below it
    assert [round(factor(step), 9) for step in range(5)] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert factor(15) == 1.0 > factor(16) > factor(29) > 0.1
    # the step after the last
    assert abs(factor(30) - 0.1) < 1e-12
    assert min(factor(step) for step in range(5, 200)) >= 0.1
    # the form that checkpoints hold
    assert schedule.state_dict()["lr_lambdas"] == [{}, {}]
