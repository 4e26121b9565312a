"""Tests of numbers of steps to continue with: those that keep past learning rates."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli_w
import torch
from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.config import LRScheduler

from records.job import stable_range
from train.checkpoint_checks import check_schedule

SCHEDULE = {"warmup_steps": 10, "decay_ratio": 0.2, "decay_type": "linear", "min_lr_factor": 0.1}
# of 100 steps
LAST_STABLE = 81


@pytest.mark.parametrize("warmup", [0, 10, 100, 200])
@pytest.mark.parametrize("ratio", [None, 0.0, 0.2, 0.5, 1.0])
def test_the_stable_part_is_that_of_torchtitans_own_scheduler(warmup, ratio):
    section = LRScheduler(warmup_steps=warmup, total_steps=150, decay_ratio=ratio)
    optimizer = torch.optim.SGD([torch.zeros(1)])
    rate = build_lr_schedulers([optimizer], section, 9).schedulers[0].lr_lambdas[0]
    first, last = stable_range(section, 9)
    stable = [step for step in range(1, 151) if step > warmup and rate(step - 1) == 1]
    assert list(range(first, last + 1)) == stable


def make_checkpoint(run: Path, step: int, steps: int = 100, **schedule: Any) -> Path:
    # with all that the run saved before
    for saved in range(20, step + 1, 20):
        (run / f"checkpoint/step-{saved}").mkdir(parents=True)
        (run / f"checkpoint/step-{saved}/.metadata").touch()
    sections = {"training": {"steps": steps}, "lr_scheduler": {**SCHEDULE, **schedule}}
    (run / "config.toml").write_text(tomli_w.dumps(sections))
    return run / f"checkpoint/step-{step}"


def describe_job(steps: int, **schedule: Any) -> Any:
    section = SimpleNamespace(**{"total_steps": None, **SCHEDULE, **schedule})
    return SimpleNamespace(training=SimpleNamespace(steps=steps), lr_scheduler=section)


@pytest.mark.parametrize(
    ("step", "changes", "says"),
    [
        (100, {"steps": 200}, rf"begun at step {LAST_STABLE + 1}; .*--checkpoint.load_step 80`"),
        (LAST_STABLE + 1, {"steps": 120}, r"total_steps = 100 \(this job: 120\), last_stable_step"),
        (90, {"steps": 100, "decay_type": "cosine"}, r"decay_type = linear \(this job: cosine\)"),
        (90, {"steps": 100, "min_lr_factor": 0.0}, "min_lr_factor = 0.1"),
        (80, {"steps": 80, "decay_ratio": 0.5}, r"begun at step 42; .*--checkpoint.load_step 40`"),
        (15, {"steps": 15}, r"begun at step 14; .*/checkpoint has none up to step 13"),
        (
            60,
            {"steps": 50},
            r"step-60 is beyond .* training.steps = 50; .*--checkpoint.load_step 40`",
        ),
    ],
)
def test_no_rate_jumps_and_no_job_ends_before_its_start(tmp_path, step, changes, says):
    checkpoint = make_checkpoint(tmp_path, step)
    with pytest.raises(ValueError, match=says):
        check_schedule(checkpoint, describe_job(**changes))


@pytest.mark.parametrize(
    ("step", "changes"),
    [
        (100, {"steps": 100}),
        (90, {"steps": 100}),
        (90, {"steps": 95, "total_steps": 100}),
        (90, {"steps": 100, "warmup_steps": 20}),
        (LAST_STABLE, {"steps": 200}),
        (60, {"steps": 79, "total_steps": 79, "decay_ratio": 20 / 79}),
    ],
    ids=[
        "finished",
        "same",
        "shorter, same schedule",
        "warmup is over",
        "extended",
        "decay branch",
    ],
)
def test_what_changes_no_rate_is_allowed(tmp_path, step, changes):
    check_schedule(make_checkpoint(tmp_path, step), describe_job(**changes))


def test_a_checkpoint_whose_schedule_is_lost_is_said(tmp_path, caplog):
    checkpoint = make_checkpoint(tmp_path, 90)
    (tmp_path / "config.toml").unlink()
    check_schedule(checkpoint, describe_job(200))
    assert f"{checkpoint}: its schedule is not known" in caplog.text
