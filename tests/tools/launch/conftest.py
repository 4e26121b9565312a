"""A checkout to launch from, and an undisturbed run of the small job, for the tests of launches."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.launch.launch_assets import SMALL, launch, make_checkout


@pytest.fixture(scope="session")
def checkout(shared):
    return shared("checkout", make_checkout)


@pytest.fixture(scope="session")
def run_without_faults(checkout, data_folder, shared):
    # 40 steps of phase 1 on two ranks, `--local`, from a snapshot
    lock = data_folder / "phase1.lock.json"
    return shared("undisturbed", lambda folder: run_job(checkout, lock, folder / "run")) / "run"


def run_job(checkout: Path, lock: Path, run: Path) -> None:
    arguments = ("--run", str(run), "--nodes", "1", "--gpus-per-node", "2", "--cpu", "--local")
    outcome = launch(
        checkout, "configs/debug_phase1.toml", *arguments, *SMALL, "--mixture.lock", str(lock)
    )
    assert outcome.returncode == 0, outcome.stdout[-3000:] + outcome.stderr[-3000:]
