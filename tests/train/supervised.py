"""Run a tiny supervised job with scheduled faults, for the fault tests and the chaos run."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.train.runs import GLOBAL_BATCH, load_saved, metrics, run_forked, run_job, toy

RANKS = 2
# a step of a toy on a busy machine is no hang; a stopped rank costs this, asleep
HANG_TIMEOUT_S = 30
# of the reference run, and between checkpoints
STEPS, INTERVAL = 40, 5
COMPARED = ("loss", "max_loss", "grad_norm", "lr", "tokens")


def arguments(run: Path, lock: Path, steps: int, interval: int) -> list[str]:
    # float32 and a fixed number of ranks: bit for bit comparable
    settings = {
        "training.global_batch_size": GLOBAL_BATCH,
        "training.steps": steps,
        "lr_scheduler.warmup_steps": 2,
        "checkpoint.interval": interval,
        "checkpoint.keep_latest_k": 2,
        "resilience.keep_every_steps": 10,
        "resilience.backoff_s": 0.1,
        "resilience.hang_timeout_s": HANG_TIMEOUT_S,
        "resilience.on_bad_step": "rollback",
        "resilience.max_same_reason": 0,
        "architecture.num_hidden_layers": 2,
        "architecture.swa_layers": (0,),
    }
    return [*toy(run, lock, settings), "--metrics.no-enable_tensorboard"]


def run_undisturbed(folder: Path, lock: Path, steps: int, interval: int, *more: str) -> Path:
    # without a supervisor and faults
    run = folder / "run"
    folder.mkdir(parents=True, exist_ok=True)
    run_job(run, [*arguments(run, lock, steps, interval), *more], RANKS)
    return run


def plan_faults(folder: Path, faults: list[dict[str, Any]]) -> dict[str, str]:
    """Return the environment in which tests.train.faults commits these; `rank` None: all ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = folder / "faults.json"
    plan.write_text(json.dumps([{"rank": None, **fault} for fault in faults]))
    return {"LANEFORMER_FAULTS": str(plan)}


def run_faulty(
    folder: Path,
    lock: Path,
    steps: int,
    interval: int,
    faults: list[dict[str, Any]],
    *more: str,
    module: str = "tests.train.faults",
    fails: bool = False,
) -> subprocess.CompletedProcess[str]:
    # one attempt without a supervisor, in folder/run
    env = plan_faults(folder, faults)
    command = [
        *arguments(folder / "run", lock, steps, interval),
        "--experimental.custom_import",
        module,
    ]
    return run_job(folder / "run", [*command, *more], RANKS, fails=fails, **env)


def supervise(
    folder: Path,
    lock: Path,
    steps: int,
    interval: int,
    faults: list[dict[str, Any]],
    *more: str,
    meanwhile: Callable[[], None] = lambda: None,
) -> tuple[Path, int, str]:
    """Run the supervisor once; return (run folder, exit status, output)."""
    command = [
        "train.supervise",
        "--nproc-per-node",
        str(RANKS),
        *arguments(folder / "run", lock, steps, interval),
        "--experimental.custom_import",
        "tests.train.faults",
        *more,
    ]
    env = plan_faults(folder, faults)
    return folder / "run", *run_forked(
        folder, *command, name="supervisor", meanwhile=meanwhile, **env
    )


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}


def curve(run: Path) -> dict[int, dict[str, Any]]:
    # later rows replace those of an earlier attempt
    return {row["step"]: {key: row[key] for key in COMPARED} for row in metrics(run)}


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    # with the moments
    state = load_saved(run, step)
    return {k: v for k, v in {**state, **state["optimizer"]}.items() if isinstance(v, torch.Tensor)}


def assert_same(run: Path, reference: Path, steps: int) -> None:
    """Assert that the merged curve, final weights and moments are bitwise equal."""
    expected = curve(reference)
    assert sorted(expected) == list(range(1, steps + 1))
    assert curve(run) == expected
    ours, theirs = weights(run, steps), weights(reference, steps)
    assert ours.keys() == theirs.keys()
    assert len(theirs) > 20
    different = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
    assert not different, different[:5]
