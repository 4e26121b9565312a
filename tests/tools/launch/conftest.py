"""A checkout to launch from, and an undisturbed run of the small job, for the tests of launches."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.launch.launch_assets import SMALL, environment, launch, make_checkout


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkout(tmp_path_factory.mktemp("launch") / "checkout")


@pytest.fixture(scope="session")
def undisturbed(checkout: Path, prepared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of 40 steps of phase 1 on two ranks, `--local`, from a snapshot;
    the environment holds secrets.
    """
    run = tmp_path_factory.mktemp("runs") / "undisturbed"
    arguments = ("--run", str(run), "--nodes", "1", "--gpus-per-node", "2", "--cpu", "--local")
    lock = ("--mixture.lock", str(prepared_data / "phase1.lock.json"))
    env = {
        **environment(),
        "WANDB_API_KEY": "hush",
        "HF_TOKEN": "hush",
        "NCCL_DEBUG": "WARN",
        "LOADEDMODULES": "cuda/13",
    }
    done = launch(checkout, "configs/debug_phase1.toml", *arguments, *SMALL, *lock, env=env)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return run
