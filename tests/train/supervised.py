"""A tiny job under its supervisor, with faults on schedule: what the fault tests and the chaos run share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.train.runs import ask, run_job

ROOT = Path(__file__).resolve().parents[2]
SEQ_LEN, GLOBAL_BATCH, RANKS = 32, 4, 2
STEPS, INTERVAL = 40, 5  # of the reference run, and between checkpoints
COMPARED = ("loss", "max_loss", "grad_norm", "lr", "tokens")
SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "sliding_window": 8, "max_position_embeddings": SEQ_LEN, "vocab_size": 512,
}  # fmt: skip


def arguments(run: Path, lock: Path, steps: int, interval: int) -> list[str]:
    """What `python -m train` gets; bit for bit comparable: float32, a fixed number of ranks."""
    settings = {
        "job.config_file": "configs/debug_phase1.toml", "job.dump_folder": run, "mixture.lock": lock,
        "training.seq_len": SEQ_LEN, "training.global_batch_size": GLOBAL_BATCH, "training.local_batch_size": 2,
        "training.steps": steps, "lr_scheduler.warmup_steps": 2, "checkpoint.interval": interval,
        "checkpoint.keep_latest_k": 2, "resilience.keep_every_steps": 10, "resilience.backoff_s": 0.1,
        "resilience.hang_timeout_s": 12, "resilience.on_bad_step": "rollback", "resilience.max_same_reason": 0,
        **{f"architecture.{name}": value for name, value in SMALL.items()},
    }  # fmt: skip
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    return [*flags, "--architecture.swa_layers", "0", "--metrics.no-enable_tensorboard"]


def undisturbed(folder: Path, lock: Path, steps: int, interval: int, *more: str) -> Path:
    """The run as it should be, without a supervisor. Returns its folder."""
    run = folder / "run"
    folder.mkdir(parents=True, exist_ok=True)
    done = run_job(run, [*arguments(run, lock, steps, interval), *more], RANKS)
    assert done.returncode == 0, done.stdout[-6000:]
    return run


def faulty(
    folder: Path, lock: Path, steps: int, interval: int, faults: list[dict[str, Any]], *more: str
) -> subprocess.CompletedProcess[str]:
    """One attempt with faults, without a supervisor; its run folder is folder/run."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = folder / "faults.json"
    plan.write_text(json.dumps([{"rank": None, **fault} for fault in faults]))
    command = [
        *arguments(folder / "run", lock, steps, interval),
        "--experimental.custom_import",
        "tests.train.faults",
    ]
    return run_job(folder / "run", [*command, *more], RANKS, LANEFORMER_FAULTS=str(plan))


def supervise(
    folder: Path,
    lock: Path,
    steps: int,
    interval: int,
    faults: list[dict[str, Any]],
    *more: str,
    warm: bool = True,
    meanwhile: Callable[[], None] = lambda: None,
) -> tuple[Path, int, str]:
    """One life of the supervisor: (run folder, its exit status, what it said).

    warm: it and the attempts' processes are forked by the fork server; otherwise all is really started. meanwhile:
    called when it has been started, if warm.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plan = folder / "faults.json"
    plan.write_text(json.dumps([{"rank": None, **fault} for fault in faults]))
    command = [
        sys.executable, "-m", "train.supervise", "--nproc-per-node", str(RANKS),
        *arguments(folder / "run", lock, steps, interval), "--experimental.custom_import", "tests.train.faults", *more,
    ]  # fmt: skip
    env, said, pid = {"LANEFORMER_FAULTS": str(plan)}, folder / "supervisor.log", folder / "supervisor.pid"
    if warm:
        job = {"command": command, "environment": env, "log": str(said), "pid": str(pid)}
        status = ask(job, meanwhile)
    else:
        with open(said, "a") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, env={**environment(), **env}, stdout=log, stderr=subprocess.STDOUT
            )
            pid.write_text(str(process.pid))
            try:
                status = process.wait(timeout=1100)
            finally:
                process.kill()
    return folder / "run", status, said.read_text()


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}


def curve(run: Path) -> dict[int, dict[str, Any]]:
    """metrics.jsonl merged: for each step the record of the last attempt that reached it."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: {key: row[key] for key in COMPARED} for row in rows}


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Weights and moments of a checkpoint."""
    with tempfile.NamedTemporaryFile() as target:
        dcp_to_torch_save(run / f"checkpoint/step-{step}", target.name)
        state = torch.load(target.name, weights_only=False)
    return {k: v for k, v in {**state, **state["optimizer"]}.items() if isinstance(v, torch.Tensor)}


def assert_same(run: Path, reference: Path, steps: int) -> None:
    """Bit for bit: the merged curve, the final weights and moments."""
    expected = curve(reference)
    assert sorted(expected) == list(range(1, steps + 1))
    assert curve(run) == expected
    ours, theirs = weights(run, steps), weights(reference, steps)
    assert ours.keys() == theirs.keys()
    assert len(theirs) > 20
    different = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
    assert not different, different[:5]
