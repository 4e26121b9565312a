"""The run as it should be, made once for all tests that compare with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.logged import train_logged
from tests.train.runs import succeed
from tests.train.supervised import INTERVAL, STEPS, undisturbed


@pytest.fixture(scope="session")
def reference(prepared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folder of STEPS undisturbed steps on two ranks."""
    return undisturbed(
        tmp_path_factory.mktemp("reference"), prepared_data / "phase1.lock.json", STEPS, INTERVAL
    )


@pytest.fixture(scope="session")
def whole_run(prepared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four uninterrupted steps of phase 1 on two ranks."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    succeed(run, prepared_data / "phase1.lock.json", "--metrics.enable_wandb")
    return run


@pytest.fixture(scope="session")
def logged_run(prepared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps on two ranks, two micro-batches each; validation every third, a checkpoint every second."""
    folder = tmp_path_factory.mktemp("runs") / "seen"
    job = ("--metrics.enable_wandb", "--metrics.gpu_hour_price", "3600", "--metrics.currency", "EUR")
    train_logged(folder, prepared_data / "phase1.lock.json", *job)
    return folder
