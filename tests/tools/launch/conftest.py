"""A checkout to launch from, and an undisturbed run of the small job, for the tests of launches."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.launch.launch_assets import SMALL, launch, make_checkout


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkout(tmp_path_factory.mktemp("launch") / "checkout")


@pytest.fixture(scope="session")
def undisturbed(checkout: Path, prepared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of 40 steps of phase 1 on two ranks here, `--local`, from a snapshot."""
    run = tmp_path_factory.mktemp("runs") / "undisturbed"
    arguments = ("--run", str(run), "--nodes", "1", "--gpus-per-node", "2", "--cpu", "--local")
    lock = ("--mixture.lock", str(prepared_data / "phase1.lock.json"))
    done = launch(checkout, "configs/debug_phase1.toml", *arguments, *SMALL, *lock)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return run
