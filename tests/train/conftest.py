"""Runs without faults, each trained once for all tests that compare with them."""

from __future__ import annotations

import pytest

from tests.train import production
from tests.train.logged import train_logged
from tests.train.runs import train_toy
from tests.train.supervised import INTERVAL, STEPS, run_undisturbed


@pytest.fixture(scope="session")
def phase1(data_folder):
    return data_folder / "phase1.lock.json"


@pytest.fixture(scope="session")
def reference(phase1, shared):
    # of STEPS steps on two ranks
    return (
        shared("reference", lambda folder: run_undisturbed(folder, phase1, STEPS, INTERVAL)) / "run"
    )


@pytest.fixture(scope="session")
def whole_run(phase1, shared):
    # four steps on two ranks in one attempt
    return (
        shared(
            "whole_run",
            lambda folder: train_toy(folder / "whole", phase1, "--metrics.enable_wandb"),
        )
        / "whole"
    )


@pytest.fixture(scope="session")
def metrics_run(phase1, shared):
    # six steps on two ranks, two micro-batches each; validation every third step, a checkpoint every second
    job = (
        "--metrics.enable_wandb",
        "--metrics.gpu_hour_price",
        "3600",
        "--metrics.currency",
        "EUR",
        "--resilience.spike_window",
        "4",
    )
    return (
        shared("metrics_run", lambda folder: train_logged(folder / "seen", phase1, *job)) / "seen"
    )


@pytest.fixture(scope="session")
def production_run(phase1, shared):
    # as a user starts it, without the fork server (tests/train/production.py)
    launcher = production.torchrun(2)
    folder = shared(
        "production_run",
        lambda folder: production.train(launcher, "phase1", folder / "run", phase1, {}, warm=False),
    )
    return folder / "run"
