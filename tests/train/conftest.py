"""Runs without faults, made once for all tests that compare with them."""

from __future__ import annotations

import pytest

from tests.train import production
from tests.train.logged import train_logged
from tests.train.runs import succeed
from tests.train.supervised import INTERVAL, STEPS, run_undisturbed


@pytest.fixture(scope="session")
def phase1(prepared_data):
    """Return the lock file of the first phase."""
    return prepared_data / "phase1.lock.json"


@pytest.fixture(scope="session")
def reference(phase1, shared):
    """Run folder of STEPS run_undisturbed steps on two ranks."""
    return (
        shared("reference", lambda folder: run_undisturbed(folder, phase1, STEPS, INTERVAL)) / "run"
    )


@pytest.fixture(scope="session")
def whole_run(phase1, shared):
    """Four uninterrupted steps of phase 1 on two ranks."""
    return (
        shared(
            "whole_run", lambda folder: succeed(folder / "whole", phase1, "--metrics.enable_wandb")
        )
        / "whole"
    )


@pytest.fixture(scope="session")
def logged_run(phase1, shared):
    """Run six steps on two ranks, two micro-batches each."""
    # validation every third step, a checkpoint every second
    job = (
        "--metrics.enable_wandb",
        "--metrics.gpu_hour_price",
        "3600",
        "--metrics.currency",
        "EUR",
        "--resilience.spike_window",
        "4",
    )
    return shared("logged_run", lambda folder: train_logged(folder / "seen", phase1, *job)) / "seen"


@pytest.fixture(scope="session")
def shipped_run(phase1, shared):
    """Run configs/phase1.toml on two ranks as a user starts it (tests/train/production.py)."""
    launcher = production.torchrun(2)
    made = shared(
        "shipped_run",
        lambda folder: production.train(launcher, "phase1", folder / "run", phase1, {}, warm=False),
    )
    return made / "run"
