"""The run as it should be, made once for all tests that compare with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.shared import Shared
from tests.train import production
from tests.train.logged import train_logged
from tests.train.runs import succeed
from tests.train.supervised import INTERVAL, STEPS, undisturbed


@pytest.fixture(scope="session")
def reference(prepared_data: Path, shared: Shared) -> Path:
    """Run folder of STEPS undisturbed steps on two ranks."""
    lock = prepared_data / "phase1.lock.json"
    return shared("reference", lambda folder: undisturbed(folder, lock, STEPS, INTERVAL)) / "run"


@pytest.fixture(scope="session")
def whole_run(prepared_data: Path, shared: Shared) -> Path:
    """Four uninterrupted steps of phase 1 on two ranks."""
    lock = prepared_data / "phase1.lock.json"
    return (
        shared("whole_run", lambda folder: succeed(folder / "whole", lock, "--metrics.enable_wandb"))
        / "whole"
    )


@pytest.fixture(scope="session")
def logged_run(prepared_data: Path, shared: Shared) -> Path:
    """Six steps on two ranks, two micro-batches each; validation every third, a checkpoint every second."""
    lock = prepared_data / "phase1.lock.json"
    job = ("--metrics.enable_wandb", "--metrics.gpu_hour_price", "3600", "--metrics.currency", "EUR")
    return shared("logged_run", lambda folder: train_logged(folder / "seen", lock, *job)) / "seen"


@pytest.fixture(scope="session")
def shipped_run(prepared_data: Path, shared: Shared) -> Path:
    """configs/phase1.toml on two ranks, started as a user starts it (tests/train/production.py)."""
    lock, launcher = prepared_data / "phase1.lock.json", production.torchrun(2)
    made = shared(
        "shipped_run",
        lambda folder: production.train(launcher, "phase1", folder / "run", lock, {}, warm=False),
    )
    return made / "run"
