"""Training speed of the real trainer and of TorchTitan's own Llama of the same parameter
count, in alternating runs.

    python -m tools.bench train --flavor 2b --out docs/benchmarks/DATE-train-h200.md          one GPU
    python -m tools.bench train --flavor tiny --seq-len 128 --local-batch 2 --steps 6 --warmup 2     a laptop's CPU

Each trial is a job of its own (`torchrun -m train`, or `-m tools.bench.llama` on TorchTitan's trainer) on
synthetic tokens: loader, FSDP, compile, optimizer and metrics are those of a real run, checkpoints are off.
The first steps of a trial, which compile, are not counted. Speeds are medians over the steps of all trials;
the ratio is taken within a round, whose order alternates.
"""

from __future__ import annotations

import os
import re
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
from records.files import read_lines
from tools.bench import harness
from tools.bench.harness import Recipe, Result
from tools.markdown import table
from tools.plan import sums as plan_sums
from tools.synthetic import write_synthetic_lock

PROGRAMS = {"laneformer": ["train"], "llama": ["tools.bench.llama", "--model.name", "bench_llama3"]}
FLAGS = """--lr_scheduler.warmup_steps 1 --training.gc_freq 1000 --metrics.log_freq 1
--parallelism.data_parallel_replicate_degree 1 --parallelism.data_parallel_shard_degree -1
--checkpoint.no-enable --validation.no-enable --metrics.no-enable_tensorboard --metrics.no-enable_wandb"""
TIMEOUT_S = 3600
FILE_START = """# Training speed of the real trainer and of TorchTitan's Llama

Each section is one run of its command: random weights, synthetic tokens, the job as `python -m train` runs it, with
TorchTitan's own Llama of the same parameter count in alternating trials. Steps that compile are not counted."""


@dataclass(kw_only=True)
class Options(harness.Options):
    """Measure tokens/s/GPU, MFU, peak memory and step times, and the ratio to a dense Llama."""

    flavor: Literal["2b", "300m", "tiny"] = "2b"
    """Model shape."""
    gpus: int = 1
    """Ranks of the job, on this machine."""
    seq_len: int = 4096
    """Tokens per sequence."""
    local_batch: int = 0
    """Sequences per GPU and step; 0: the largest power of two that fits by the estimate of tools.plan."""
    steps: int = 20
    """Timed steps per trial."""
    warmup: int = 5
    """Steps before the timed ones."""
    rounds: int = 2
    """Trials of each model."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Data type that FSDP casts the weights to."""
    checkpointing: Literal["none", "selective", "full"] = "selective"
    """Activation checkpointing of both models."""
    compile: bool = True
    """Whether both models are compiled with torch.compile."""
    float8: Recipe = "none"
    """Recipe of float8 products for the Laneformer's w1, w2 and w3; emulated without a GPU."""

    def check(self) -> None:
        """ValueError for a value that cannot be measured."""
        harness.check_at_least(self, gpus=1, seq_len=1, steps=1, warmup=1, rounds=1)
        longest = LaneformerConfig.from_flavor(self.flavor).max_position_embeddings
        if self.seq_len > longest:
            raise ValueError(f"seq_len = {self.seq_len} exceeds the {longest} positions of {self.flavor}")


def measure(options: Options, console: Any) -> Result:
    """All trials; every figure of the report."""
    options.check()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    batch = options.local_batch or choose_local_batch(options, device)
    rounds: list[dict[str, Result]] = []
    with tempfile.TemporaryDirectory() as folder:
        config = LaneformerConfig.from_flavor(options.flavor)
        windows = (options.steps + options.warmup) * batch * options.gpus
        # few tokens, read repeatedly: generating them is slow, and their number does not change the speed
        lock = write_synthetic_lock(
            Path(folder) / "data", min(windows, 64), options.seq_len, config.vocab_size
        )
        for index, order in enumerate(harness.alternate(PROGRAMS, options.rounds)):
            trials = {}
            for name in order:
                with console.status(f"round {index + 1} of {options.rounds}: {name}"):
                    trials[name] = trial(name, options, batch, lock, Path(folder) / f"{name}-{index}")
                console.print(
                    f"round {index + 1}: {name} {trials[name]['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU"
                )
            rounds.append(trials)
    ratios = [r["laneformer"]["tokens_per_s_per_gpu"] / r["llama"]["tokens_per_s_per_gpu"] for r in rounds]
    names = ("flavor", "gpus", "seq_len", "steps", "warmup", "dtype", "checkpointing", "compile", "float8")
    return {
        "device": device, "torch": torch.__version__, **{name: getattr(options, name) for name in names},
        "local_batch": batch, "models": {name: summary([r[name] for r in rounds]) for name in PROGRAMS},
        "ratio": float(np.median(ratios)), "ratios": ratios,
    }  # fmt: skip


def choose_local_batch(options: Options, device: str) -> int:
    """What the memory plan allows; one sequence on a device that the plan does not know."""
    gpu = card_of_device(device)
    if gpu is None:
        return 1
    job = plan_sums.Job(
        config=LaneformerConfig.from_flavor(options.flavor), seq_len=options.seq_len, steps=1,
        global_batch=options.gpus, local_batch=1, shard=options.gpus, checkpointing=options.checkpointing,
        param_bytes=plan_sums.BF16 if options.dtype == "bfloat16" else plan_sums.FP32,
    )  # fmt: skip
    batch = plan_sums.largest_local_batch(job, gpu)
    if batch == 0:
        raise ValueError(
            f"the memory plan sees no room for one sequence of {options.flavor} on {options.gpus} x {gpu.name}"
        )
    return batch


def command(name: str, options: Options, batch: int, lock: Path, run: Path, *more: str) -> list[str]:
    """What follows `python -m` for one job; `more`: further flags."""
    return [
        "torch.distributed.run", "--standalone", f"--nproc_per_node={options.gpus}",
        "-m", *PROGRAMS[name], "--job.config_file", "configs/phase1.toml",
        "--job.dump_folder", str(run), "--mixture.lock", str(lock),
        "--model.flavor", options.flavor, "--training.seq_len", str(options.seq_len),
        "--training.local_batch_size", str(batch), "--training.global_batch_size", str(batch * options.gpus),
        "--training.steps", str(options.warmup + options.steps), "--training.mixed_precision_param", options.dtype,
        "--activation_checkpoint.mode", options.checkpointing,
        "--compile.enable" if options.compile else "--compile.no-enable", *FLAGS.split(),
        *(harness.float8_flags(options.float8, torch.cuda.is_available()) if name == "laneformer" else ()),
        *more,
    ]  # fmt: skip


def trial(name: str, options: Options, batch: int, lock: Path, run: Path) -> Result:
    """One job; RuntimeError with the end of its output if it fails."""
    env = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(
        [sys.executable, "-m", *command(name, options, batch, lock, run)], cwd=harness.ROOT, env=env,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"{name} failed: {done.stdout[-3000:]}")
    rows = read_lines(run / "metrics.jsonl")[options.warmup :]
    # TorchTitan's console line; MiB and colours differ by version, the number does not
    memory = [float(m) for m in re.findall(r"memory: *([\d.]+)GiB", done.stdout)]
    count = re.search(r"size: ([\d,]+) total parameters", done.stdout)
    assert count, "TorchTitan logs the parameter count"
    step_s = [row["seconds"] for row in rows]
    joins = re.search(r"Joins and norms: (\w+)", done.stdout)
    return {
        "join_norm": joins and joins[1],
        "parameters": int(count[1].replace(",", "")),
        "tokens_per_s_per_gpu": batch * options.seq_len / float(np.median(step_s)),
        "step_s": step_s,
        "mfu": rows[-1]["mfu"] and float(np.median([row["mfu"] for row in rows])),
        "peak_memory_gib": max(memory, default=None),
        "last_loss": rows[-1]["loss"],
    }


def summary(trials: list[Result]) -> Result:
    """Medians over trials, of the steps of all trials together, the highest peak; None
    where nothing was measured.
    """
    p50, p90 = np.percentile([s for t in trials for s in t["step_s"]], (50, 90)).tolist()
    rates, mfus = ([t[key] for t in trials] for key in ("tokens_per_s_per_gpu", "mfu"))
    return {
        "parameters": trials[0]["parameters"], "tokens_per_s_per_gpu": float(np.median(rates)),
        "mfu": None if None in mfus else float(np.median(mfus)), "step_s_p50": p50, "step_s_p90": p90,
        "peak_memory_gib": max((t["peak_memory_gib"] for t in trials if t["peak_memory_gib"]), default=None),
        "last_loss": trials[-1]["last_loss"], "join_norm": trials[-1]["join_norm"],
    }  # fmt: skip


def section(options: Options, result: Result) -> tuple[str, str]:
    """Title and body of one section of a benchmark file."""
    columns = ["", "parameters", "tokens/s/GPU", "MFU", "step p50", "step p90", "peak memory"]
    rows = [
        [name, f"{m['parameters']:,}", f"{m['tokens_per_s_per_gpu']:,.0f}",
         "-" if m["mfu"] is None else f"{m['mfu']:.1f}%", *(f"{m[key]:.3f} s" for key in ("step_s_p50", "step_s_p90")),
         "-" if m["peak_memory_gib"] is None else f"{m['peak_memory_gib']:.1f} GiB"]
        for name, m in result["models"].items()
    ]  # fmt: skip
    shape = (
        f"{result['gpus']} x {result['device']}, local batch {result['local_batch']} x {result['seq_len']}"
    )
    how = f"{result['dtype']}, checkpointing {result['checkpointing']}, compile {'on' if result['compile'] else 'off'}"
    how += f", the Laneformer's float8 {result['float8']}"
    how += f", joins and norms {result['models']['laneformer']['join_norm']}"
    body = (
        f"{how}; {result['steps']} timed steps per trial, {len(result['ratios'])} rounds. torch {result['torch']}.\n\n"
        f"{table(columns, rows)}\n\n"
        f"Laneformer / Llama, within a round: {', '.join(f'{r:.2f}' for r in result['ratios'])}."
    )
    return f"`{result['flavor']}`, {shape}", body
