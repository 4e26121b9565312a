"""Run real jobs on CPU ranks at toy size, and read their run folders."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from data_mixtures.mixture import Mixture
from laneformer import Laneformer, LaneformerConfig
from records.files import read_lines
from records.job import job_flags

ROOT = Path(__file__).resolve().parents[2]
SEQ_LEN, GLOBAL_BATCH, STEPS = 32, 4, 4
# small enough that a launch costs its imports; a window shorter than the sequence, and partials
# that are broadcast
ARCHITECTURE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "sliding_window": 8,
    "max_position_embeddings": SEQ_LEN,
    "vocab_size": 512,
}
SMALL = LaneformerConfig.from_flavor("tiny", swa_layers=(0, 1, 2), **ARCHITECTURE)


@functools.cache
def fork_server() -> subprocess.Popen[str]:
    # one for all jobs of this test process
    command = [sys.executable, "-m", "tests.train.fork_server"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        command,
        cwd=ROOT,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=limit_open_files,
    )
    atexit.register(server.kill)
    return server


def limit_open_files() -> None:
    # most systems allow a login shell this many, and Slurm takes the limits of its jobs from it
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )


def toy(
    run: Path, lock: Path, settings: Mapping[str, Any], config: str = "debug_phase1"
) -> list[str]:
    """Return the arguments of `python -m train` for configs/`config`.toml at toy size."""
    shapes = {f"architecture.{name}": value for name, value in ARCHITECTURE.items()}
    merged = {
        "job.config_file": f"configs/{config}.toml",
        "job.dump_folder": run,
        "mixture.lock": lock,
        "training.seq_len": SEQ_LEN,
        "training.local_batch_size": 2,
        **shapes,
        "architecture.swa_layers": (0, 1, 2),
        **settings,
    }
    return job_flags(merged)


def launch(
    run: Path,
    lock: Path,
    *overrides: str,
    ranks: int = 2,
    config: str = "debug_phase1",
    fails: bool = False,
) -> subprocess.CompletedProcess[str]:
    settings = {
        "training.global_batch_size": GLOBAL_BATCH,
        "training.steps": STEPS,
        "lr_scheduler.total_steps": STEPS,
        "lr_scheduler.warmup_steps": 1,
        "lr_scheduler.decay_ratio": 0.5,
        "checkpoint.interval": 2,
    }
    return run_job(run, [*toy(run, lock, settings, config), *overrides], ranks, fails=fails)


def run_job(
    run: Path,
    arguments: list[str],
    ranks: int,
    limit_s: float = 1100.0,
    fails: bool = False,
    **env: str,
) -> subprocess.CompletedProcess[str]:
    """Run `python -m train` on `ranks` processes and return their output as stdout.

    After `limit_s` seconds it also has the stacks of each. AssertionError for an unexpected end.
    """
    log = run.with_name(f"{run.name}.{time.monotonic_ns()}.log")
    job = {
        "command": arguments,
        "ranks": ranks,
        "log": str(log),
        "limit_s": limit_s,
        "environment": {"WANDB_MODE": "offline", **env},
    }
    status = next(filter(None, ask(job)), 0)
    assert bool(status) == fails, log.read_text()[-6000:]
    return subprocess.CompletedProcess(arguments, status, log.read_text(), "")


def ask(job: dict[str, Any], meanwhile: Callable[[], None] = lambda: None) -> Any:
    """Send a job to the fork server and return its answer; call `meanwhile` while it runs."""
    server = fork_server()
    print(json.dumps(job), file=server.stdin, flush=True)
    try:
        meanwhile()
        return json.loads(server.stdout.readline())
    except BaseException:
        # the test's time is over: this job's answer must not be the next one's
        end_fork_server()
        raise


def end_fork_server() -> None:
    # with all that it has started: a job would go on in folders that its test has left
    server = psutil.Process(fork_server().pid)
    for process in (*server.children(recursive=True), server):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    fork_server().wait()
    fork_server.cache_clear()


def run_forked(
    folder: Path,
    *program: str,
    name: str = "output",
    meanwhile: Callable[[], None] = lambda: None,
    **env: str,
) -> tuple[int, str]:
    """Run `python -m PROGRAM` by the fork server; return its exit status and output."""
    log = folder / f"{name}.log"
    log.unlink(missing_ok=True)
    job = {
        "command": [sys.executable, "-m", *program],
        "environment": env,
        "log": str(log),
        "pid": str(log.with_suffix(".pid")),
    }
    return ask(job, meanwhile), log.read_text()


def train_toy(run: Path, lock: Path, *overrides: str, **options) -> list[dict]:
    launch(run, lock, *overrides, **options)
    return metrics(run)


def fail(run: Path, lock: Path, *overrides: str, **options) -> str:
    return launch(run, lock, *overrides, **options, fails=True).stdout


def metrics(run: Path) -> list[dict]:
    return read_lines(run / "metrics.jsonl")


def load_saved(run: Path, step: int = STEPS) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile() as target:
        dcp_to_torch_save(run / f"checkpoint/step-{step}", target.name)
        return torch.load(target.name, weights_only=False)


def weights(run: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    return {k: v for k, v in load_saved(run, step).items() if isinstance(v, torch.Tensor)}


def copy_stopped_at(step: int, whole: Path, run: Path) -> None:
    # as if the job had died after saving `step`
    shutil.copytree(whole, run)
    for path in run.glob("checkpoint/step-*"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)


def batch_loss(model: Laneformer, mixture: Mixture) -> float:
    tokens = torch.from_numpy(mixture.sequences(0, GLOBAL_BATCH)[0])
    with torch.no_grad():
        logits = model(tokens[:, :-1])
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).double(), tokens[:, 1:].flatten()
    ).item()
