"""Training speed of the real trainer against TorchTitan's own Llama of the same parameter count.

    python -m tools.bench train --flavor 2b --out docs/benchmarks/train-h200.md       one GPU
    python -m tools.bench train --flavor tiny --seq-len 128 --local-batch 2           a laptop's CPU

Each trial is a job on synthetic tokens, without checkpoints. Speeds are medians over the timed
steps of all trials; the ratio is taken within a round, whose order alternates.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

if not torch.accelerator.is_available():
    from train.job_config import patch_torch_for_cpu

    patch_torch_for_cpu()  # before torchtitan is imported

from laneformer import LaneformerConfig
from laneformer.engine.cuda.cards import card_of_device
from records.command import Count, Natural
from records.job import job_flags
from tools.bench import harness
from tools.bench.harness import Result, spread
from tools.markdown import records
from tools.plan import sums
from tools.synthetic import write_synthetic_lock

PROGRAMS = {"laneformer": ["train"], "llama": ["tools.bench.llama", "--model.name", "bench_llama3"]}
FLAGS = """--job.config_file configs/phase1.toml
--lr_scheduler.warmup_steps 1 --training.gc_freq 1000 --metrics.log_freq 1
--parallelism.data_parallel_replicate_degree 1 --parallelism.data_parallel_shard_degree -1
--checkpoint.no-enable --validation.no-enable --metrics.no-enable_tensorboard --metrics.no-enable_wandb"""
SPEED, MFU = r"tps: ([\d,]+)", r"mfu: ([\d.]+)%"
TIMEOUT_S = 3600
FILE_START = """# Training speed of the real trainer and of TorchTitan's Llama

Each section is one run of its command: random weights, synthetic tokens, the job as `python -m train` runs it, with
TorchTitan's own Llama of the same parameter count in alternating trials. Steps that compile are not counted."""


@dataclass(kw_only=True)
class Options(harness.Options):
    """Measure tokens/s/GPU, MFU, peak memory and step times, and the ratio to a dense Llama."""

    flavor: Literal["2b", "300m", "tiny"] = "2b"
    """Model shape."""
    gpus: Count = 1
    """Ranks of the job, on this machine."""
    seq_len: Count = 4096
    """Tokens per sequence."""
    local_batch: Natural = 0
    """Sequences per GPU and step; 0: the largest power of two that fits by the estimate of tools.plan."""
    steps: Count = 20
    """Timed steps per trial."""
    warmup: Count = 5
    """Steps before the timed ones."""
    rounds: Count = 2
    """Trials of each model."""
    both: str = ""
    """Further flags of both jobs, in one word: `--both="--activation_checkpoint.mode full --compile.no-enable"`."""
    ours: str = ""
    """Further flags of the Laneformer's job, such as those of float8 products.
    `--ours="--model.converters quantize.linear.float8 --quantize.linear.float8.recipe_name rowwise"`
    """


def measure(options: Options, console: Any) -> Result:
    """Run all trials; return every figure of the report."""
    config = LaneformerConfig.from_flavor(options.flavor)
    if options.seq_len > config.max_position_embeddings:
        raise ValueError(
            f"seq_len = {options.seq_len} exceeds the {config.max_position_embeddings} positions of {options.flavor}"
        )
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    batch = options.local_batch or choose_local_batch(options, device)
    logs: dict[str, list[str]] = {name: [] for name in PROGRAMS}
    with tempfile.TemporaryDirectory() as folder:
        # few tokens, read repeatedly: generating them is slow, and their number does not change the
        # speed
        windows = min((options.steps + options.warmup) * batch * options.gpus, 64)
        lock = write_synthetic_lock(
            Path(folder) / "data", windows, options.seq_len, config.vocab_size
        )
        for index, order in enumerate(harness.alternate(PROGRAMS, options.rounds)):
            for name in order:
                with console.status(f"round {index + 1} of {options.rounds}: {name}"):
                    log = run_job(name, options, batch, lock, Path(folder) / f"{name}-{index}")
                logs[name].append(log)
                speed = np.median(find_steps(SPEED, log, options))
                console.print(f"round {index + 1}: {name} {speed:,.0f} tokens/s/GPU")
    medians = [
        [np.median(find_steps(SPEED, log, options)) for log in logs[name]] for name in PROGRAMS
    ]
    return {
        "device": device,
        "torch": torch.__version__,
        "local_batch": batch,
        "models": {name: summarize(logs[name], options) for name in PROGRAMS},
        "ratios": [float(ours / llama) for ours, llama in zip(*medians, strict=True)],
    }


def choose_local_batch(options: Options, device: str) -> int:
    """Return the batch that the memory plan allows; 1 on an unknown device."""
    gpu = card_of_device(device)
    if gpu is None:
        return 1
    job = sums.Job(
        LaneformerConfig.from_flavor(options.flavor),
        options.seq_len,
        steps=1,
        global_batch=options.gpus,
        local_batch=1,
        shard=options.gpus,
    )
    batch = sums.largest_local_batch(job, gpu)
    if batch == 0:
        raise ValueError(
            f"the memory plan sees no room for one sequence of {options.flavor} on {options.gpus} x {gpu.name}"
        )
    return batch


def run_job(name: str, options: Options, batch: int, lock: Path, run: Path) -> str:
    """Return the output of one trial; RuntimeError with its end if it fails."""
    settings = {
        "job.dump_folder": run,
        "mixture.lock": lock,
        "model.flavor": options.flavor,
        "training.seq_len": options.seq_len,
        "training.local_batch_size": batch,
        "training.global_batch_size": batch * options.gpus,
        "training.steps": options.warmup + options.steps,
    }
    flags = job_flags(settings) + shlex.split(
        f"{FLAGS} {options.both} {options.ours if name == 'laneformer' else ''}"
    )
    ranks = (
        f"torch.distributed.run --standalone --nproc_per_node={options.gpus} --local_ranks_filter=0"
    )
    outcome = subprocess.run(
        [sys.executable, "-m", *ranks.split(), "-m", *PROGRAMS[name], *flags],
        cwd=harness.ROOT,
        env={"OMP_NUM_THREADS": "1", **os.environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    if outcome.returncode != 0:
        raise RuntimeError(f"{name} failed: {outcome.stdout[-3000:]}")
    return outcome.stdout


def find(pattern: str, log: str) -> list[float]:
    """Return the numbers in TorchTitan's log lines that match."""
    # colours differ by version, the numbers do not
    return [float(number.replace(",", "")) for number in re.findall(pattern, log)]


def find_steps(pattern: str, log: str, options: Options) -> list[float]:
    """Return the numbers of the timed steps."""
    return find(pattern, log)[options.warmup :]


def summarize(logs: list[str], options: Options) -> Result:
    """Summarize the steps of all trials; None where nothing was measured."""
    speeds, mfus = (
        [step for log in logs for step in find_steps(pattern, log, options)]
        for pattern in (SPEED, MFU)
    )
    speed, joins = spread(speeds), re.findall(r"Joins and norms: (\w+)", logs[0])
    return {
        "parameters": int(find(r"size: ([\d,]+) total parameters", logs[0])[0]),
        "tokens_per_s_per_gpu": speed.pop("median"),
        **speed,
        # on a CPU TorchTitan takes the peak of a GPU
        "mfu_percent": float(np.median(mfus)) if torch.cuda.is_available() else None,
        "peak_memory_gib": max(find(r"memory: *([\d.]+)GiB", "".join(logs)), default=None),
        "joins_and_norms": joins[0] if joins else None,
    }


def section(options: Options, result: Result) -> tuple[str, str]:
    """Title and body of one section of a benchmark file."""
    shape = f"local batch {result['local_batch']} x {options.seq_len}"
    body = (
        f"{options.steps} timed steps per trial, {options.rounds} rounds. torch {result['torch']}.\n\n"
        f"{records([{'': name, **each} for name, each in result['models'].items()])}\n\n"
        f"Laneformer / Llama, within a round: {', '.join(f'{r:.2f}' for r in result['ratios'])}."
    )
    return f"`{options.flavor}`, {options.gpus} x {result['device']}, {shape}", body
