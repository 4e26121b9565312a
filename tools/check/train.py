"""Check training on this machine in ten minutes on one GPU.

    python -m tools.check train                     at the 2B model's widths, with four layers
    python -m tools.check train --nproc 8           and with HSDP over the GPUs of a node
    python -m tools.check train --device cpu        the same path, shrunk: what CI runs

The job is configs/phase1.toml with one layer of each kind. It runs with the kernels that it chooses
(on a GPU fused joins, FlexAttention, Inductor), with plain ones, with float8 products, killed and
resumed; its peak memory is compared with tools.plan.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

if not torch.accelerator.is_available():
    from train.job_config import patch_torch_for_cpu

    # before torchtitan is imported
    patch_torch_for_cpu()

from laneformer import LaneformerConfig
from laneformer.titan.float8 import CAPABILITY
from records.command import Count
from records.files import read_lines
from records.job import job_flags
from tools.check.gates import MARGIN, ROOT, Gate, at_most, equal, run_check, verdict
from tools.check.killed_job import KILL_AT
from tools.plan import sums
from tools.synthetic import write_synthetic_lock
from train.job_checks import FLOAT8

# killed between two saves: the steps from 11 on are repeated
STEPS, SAVES_EVERY, KILLED_AT = 20, 10, 14
# steps that compile
WARMUP = 5
# windowed with equal streams, windowed with own ones, windowed and whole with delayed outputs
ARCHITECTURE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "broadcast_delay": 1,
    "swa_layers": (0, 1, 2),
}
SHRUNK: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 512,
    "sliding_window": 16,
    "max_position_embeddings": 64,
}
PLAIN = (
    *("--compile.no-enable", "--checkpoint.no-enable", "--validation.no-enable"),
    *("--model.attention", "sdpa", "--model.join_norm", "plain"),
    *("--training.local_batch_size", "1"),
)
FLOAT32 = ("--training.mixed_precision_param", "float32")
FLOAT8_FLAGS = ("--model.converters", FLOAT8, f"--{FLOAT8}.recipe_name", "rowwise")
COMPARED = ("loss", "grad_norm", "tokens", "lr", "valid_loss")
TIMEOUT_S = 900


@dataclass
class Options:
    """Accept this machine for training, or say which comparison fails; exit status 1 then."""

    device: Literal["cuda", "cpu"] = "cuda"
    """cpu: the same path with shrunk shapes; what needs a GPU is reported as "not yet measured"."""
    nproc: Count = 1
    """GPUs (processes on a CPU): with more than one the job is also run sharded, with replicas from four on."""
    local_batch: Count = 4
    """Sequences a GPU, as in configs/phase1.toml."""
    out: Path = Path("runs/check_train.md")
    """File for the verdict and the tables."""
    json: bool = False
    """Print nothing but the JSON line."""

    def check(self) -> None:
        """Raise ValueError for what cannot run here."""
        gpus = torch.cuda.device_count()
        if self.device == "cuda" and gpus < self.nproc:
            raise ValueError(
                f"--nproc {self.nproc} on {gpus} GPU(s); lower it, or take --device cpu"
            )
        if self.device == "cpu" and gpus:
            raise ValueError(
                "--device cpu needs the GPUs hidden: set CUDA_VISIBLE_DEVICES= in front of the command"
            )
        if self.nproc & (self.nproc - 1):
            raise ValueError(f"--nproc {self.nproc} is not a power of two")

    @property
    def architecture(self) -> dict[str, Any]:
        return ARCHITECTURE if self.device == "cuda" else ARCHITECTURE | SHRUNK

    @property
    def config(self) -> LaneformerConfig:
        return LaneformerConfig.from_flavor("2b", **self.architecture)

    @property
    def global_batch(self) -> int:
        return max(self.nproc, self.local_batch)


class Jobs:
    def __init__(self, options: Options, folder: Path, console: Console):
        self.options, self.folder, self.console = options, folder, console
        config = options.config
        self.seq_len = config.max_position_embeddings
        self.lock = write_synthetic_lock(folder / "data", 64, self.seq_len, config.vocab_size)

    def flags(self, run: Path, *more: str) -> list[str]:
        """Return the flags of `python -m train`; the last of a repeated flag counts."""
        options = self.options
        settings: dict[str, Any] = {
            "job.config_file": "configs/phase1.toml",
            "job.dump_folder": run,
            "mixture.lock": self.lock,
            "training.seq_len": self.seq_len,
            "training.local_batch_size": options.local_batch,
            "training.global_batch_size": options.global_batch,
            "training.steps": STEPS,
            "lr_scheduler.warmup_steps": WARMUP,
            "parallelism.data_parallel_replicate_degree": 1,
            "parallelism.data_parallel_shard_degree": -1,
            "checkpoint.interval": SAVES_EVERY,
            "metrics.log_freq": 1,
            "validation.freq": SAVES_EVERY,
            "validation.local_batch_size": 1,
            "validation.windows_per_source": 1,
        }
        if options.device == "cpu":
            # there is no pinned memory, and Inductor would take minutes of g++
            settings |= {"checkpoint.async_mode": "async", "compile.backend": "eager"}
        settings |= {f"architecture.{name}": value for name, value in options.architecture.items()}
        return [
            *job_flags(settings),
            "--metrics.no-enable_tensorboard",
            "--metrics.no-enable_wandb",
            *more,
        ]

    def rows(
        self, name: str, *more: str, ranks: int = 1, killed: bool = False
    ) -> list[dict[str, Any]]:
        """Return a job's rows of metrics.jsonl; RuntimeError on an unexpected exit status."""
        self.console.print(f"job: {name}", style="dim")
        run, log = self.folder / name, self.folder / f"{name}.log"
        env = {KILL_AT: str(KILLED_AT)} if killed else {}
        more = (*more, "--experimental.custom_import", "tools.check.killed_job") if killed else more
        command = f"torch.distributed.run --standalone --nproc_per_node={ranks} -m train"
        # an exit status of 0 from a job that should have been killed is as wrong as another from one that should end
        status = start([*command.split(), *self.flags(run, *more)], log, env)
        if (status == 0) == killed:
            raise RuntimeError(f"job {name} ended with status {status}: {log.read_text()[-3000:]}")
        return read_lines(run / "metrics.jsonl")


def start(module: list[str], log: Path, env: Mapping[str, str]) -> int:
    """Return the exit status of `python -m MODULE ...`; its output goes to `log`."""
    with open(log, "ab") as output:
        return subprocess.run(
            [sys.executable, "-m", *module],
            cwd=ROOT,
            env={"OMP_NUM_THREADS": "1", **os.environ, **env},
            stdout=output,
            stderr=output,
            timeout=TIMEOUT_S,
        ).returncode


Row = dict[str, Any]
Gates = dict[str, Gate]
NOT_MEASURED: Gate = ("not yet measured", None, None)


def measure(options: Options, console: Console) -> dict[str, Any]:
    options.check()
    with tempfile.TemporaryDirectory() as folder:
        jobs = Jobs(options, Path(folder), console)
        whole = jobs.rows("whole")
        gates = gate_losses(jobs, whole) | gate_resume(jobs, whole) | gate_memory(options, whole)
    card = torch.cuda.get_device_name() if options.device == "cuda" else "CPU, shrunk shapes"
    title = f"Training on {card}, {options.nproc} rank(s), torch {torch.__version__}"
    return {**verdict(gates), "title": title}


def gate_losses(jobs: Jobs, whole: list[Row]) -> Gates:
    """Compare chosen kernels with plain ones in bf16, and ranks, against plain float32."""
    exact = jobs.rows("plain-float32", *PLAIN, *FLOAT32)
    # how far bf16 may be from float32 in 20 losses is not guessed: the plain job shows it
    rounded = measure_distance(jobs.rows("plain-bf16", *PLAIN), exact)
    losses = {"losses of the chosen kernels": whole}
    nproc = jobs.options.nproc
    if nproc > 1:
        # shards of one are refused
        replicas = 2 if nproc > 2 else 1
        settings = {
            "parallelism.data_parallel_replicate_degree": replicas,
            "training.local_batch_size": jobs.options.global_batch // nproc,
        }
        more = job_flags(settings)
        if jobs.options.device == "cpu":
            # shards and replicas alone: there compiling is checked with one rank
            more.append("--compile.no-enable")
        name = f"losses of {replicas} x {nproc // replicas} ranks"
        losses[name] = jobs.rows("sharded", *more, ranks=nproc)
    gates: Gates = {
        name: at_most(measure_distance(rows, exact), MARGIN * rounded)
        for name, rows in losses.items()
    }
    gates["kernels replaced at the start"] = gate_kernels(jobs.folder / "whole")
    first, last = exact[0]["loss"], whole[-1]["loss"]
    gates["losses fall"] = (last, first, last < first)
    return gates | gate_float8(jobs, exact, rounded)


def gate_float8(jobs: Jobs, exact: list[Row], rounded: float) -> Gates:
    """Compare float8 products for w1, w2 and w3, by row; emulated but on a GPU."""
    name, on_gpu = "losses with float8 products", jobs.options.device == "cuda"
    if on_gpu and torch.cuda.get_device_capability() < CAPABILITY:
        return {name: NOT_MEASURED}
    # the plain job in float32 with emulated products shows what they cost; bf16's share comes on
    # top
    emulating = (*FLOAT8_FLAGS, f"--{FLOAT8}.emulate")
    emulated = jobs.rows("float8-emulated", *PLAIN, *FLOAT32, *emulating)
    rows = jobs.rows("float8", *(FLOAT8_FLAGS if on_gpu else emulating))
    allowed = MARGIN * (rounded + measure_distance(emulated, exact))
    return {
        name: at_most(measure_distance(rows, exact), allowed),
        "kernels replaced with float8 products": gate_kernels(jobs.folder / "float8"),
    }


def gate_kernels(run: Path) -> Gate:
    """Return what the check at the start has left out of this job."""
    events = read_lines(run / "events.jsonl")
    reasons = [event["reason"] for event in events if event["kind"] == "kernels_replaced"]
    return equal((*reasons, "none")[0], "none")


def measure_distance(rows: list[Row], exact: list[Row]) -> float:
    """Return the largest difference of a step's loss; infinite if any loss is missing."""
    if len(rows) != len(exact) or any(row["loss"] is None for row in rows):
        return math.inf
    return max(abs(row["loss"] - other["loss"]) for row, other in zip(rows, exact, strict=True))


def gate_resume(jobs: Jobs, whole: list[Row]) -> Gates:
    """Compare a job that was saved, killed and resumed with the one that ran through."""
    before = jobs.rows("resumed", killed=True)
    rows = jobs.rows("resumed")
    attempts = read_lines(jobs.folder / "resumed/attempts.jsonl")
    first = attempts[-1]["step"] if len(attempts) == 2 else None
    last = [row for row in rows if row["attempt"] == 2]
    validated = [row for row in whole if row.get("valid_loss") is not None]
    repeats = count_differing(before, whole[: KILLED_AT - 1])
    return {
        "a second run, steps that differ": equal(repeats, 0),
        "resumed after a save and a kill at step": equal(first, SAVES_EVERY),
        "after the resume, steps that differ": equal(count_differing(last, whole[SAVES_EVERY:]), 0),
        "validations": equal(len(validated), STEPS // SAVES_EVERY),
    }


def count_differing(rows: list[Row], others: list[Row]) -> int:
    """Return the number of steps that one side lacks or whose compared figures differ in a bit."""
    pairs = zip(rows, others, strict=False)
    differ = sum(any(row.get(key) != other.get(key) for key in COMPARED) for row, other in pairs)
    return abs(len(rows) - len(others)) + differ


def gate_memory(options: Options, whole: list[Row]) -> Gates:
    """Compare the allocator's peak with the plan and the GPU's unplanned share."""
    name = "peak memory, GiB, against the plan"
    if options.device == "cpu":
        return {name: NOT_MEASURED}
    job = sums.Job(
        config=options.config,
        seq_len=options.config.max_position_embeddings,
        steps=STEPS,
        global_batch=options.global_batch,
        local_batch=options.local_batch,
        shard=1,
    )
    # the plan leaves out CUDA's context and the allocator's gaps, which USABLE stands for
    planned = sums.memory(job)["total"] / sums.USABLE / 2**30
    peak = max(row["memory_gib"] for row in whole)
    return {name: at_most(peak, planned)}


def main(arguments: list[str] | None = None) -> None:
    run_check("train", Options, measure, arguments)


if __name__ == "__main__":
    main()
