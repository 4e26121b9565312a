"""One run of the ablation: a job of the shipped trainer, in a process of its own.

Paired by design: a seed gives every variant of a size the same batches, those after the ones that smaller seeds
use, and the same initial weights, since a tensor's numbers depend on its name and the seed (where the number of
lanes differs, the same numbers in another arrangement). What differs is the joins.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomli_w

from data_mixtures.mixture import read_lock
from laneformer import LaneformerConfig
from records.events import BAD_STEP, DONE, read_outcome
from records.files import read_lines, write_atomically
from train.supervise.attempt import exit_words, free_port, last_text

ERROR_BYTES = 2000  # of a log whose run has failed


@dataclass(frozen=True)
class Training:
    """What all runs share. `job` holds the sections of the job file on which they are based."""

    lock: str
    steps: int
    batch_sequences: int
    seq_len: int
    job: dict[str, Any]
    warmup_ratio: float = 0.05
    device: str = "cpu"
    bf16: bool = False  # weights and products of the forward pass; master weights and optimizer stay float32
    compile: str | None = None  # a backend of torch.compile

    @property
    def tokens(self) -> int:
        return self.steps * self.batch_sequences * self.seq_len


@dataclass(frozen=True)
class Job:
    """One run. `model` holds fields of LaneformerConfig; `joins` names a neighbour (variants.py), or is None."""

    size: str
    variant: str
    seed: int
    learning_rate: float
    model: dict[str, Any]
    joins: str | None = None
    seed_offset: int = 0  # added to the seed of the initial weights

    @property
    def key(self) -> list[Any]:
        """What a result is found by."""
        return [self.size, self.variant, self.seed, self.learning_rate]

    @property
    def name(self) -> str:
        return "-".join(map(str, self.key))


def job_file(job: Job, training: Training, run: Path) -> str:
    """The trainer's job file of one run, TOML."""
    first = job.seed * training.steps * training.batch_sequences
    own: dict[str, dict[str, Any]] = {
        "job": {"dump_folder": str(run)},
        "variant": {"joins": job.joins or ""},
        "architecture": {
            "vocab_size": read_lock(Path(training.lock))["vocab_size"],
            "max_position_embeddings": training.seq_len,
            **job.model,
        },
        "mixture": {"lock": training.lock},
        "training": {
            "steps": training.steps,
            "seq_len": training.seq_len,
            "global_batch_size": training.batch_sequences,
            "local_batch_size": training.batch_sequences,
            "mixed_precision_param": "bfloat16" if training.bf16 else "float32",
        },
        "optimizer": {"lr": job.learning_rate},
        "lr_scheduler": {"warmup_steps": max(1, round(training.steps * training.warmup_ratio))},
        "compile": {"enable": True, "backend": training.compile} if training.compile else {"enable": False},
        "resilience": {"skip_sequences": [[0, first]] if first else []},
        "debug": {"seed": job.seed + job.seed_offset},
    }
    names = dict.fromkeys([*training.job, *own])
    return tomli_w.dumps({name: {**training.job.get(name, {}), **own.get(name, {})} for name in names})


def run_job(job: Job, training: Training, out: Path, keep_weights: bool) -> dict[str, Any]:
    """Train OUT/runs/NAME to its end, from its newest checkpoint if it has one; the result as JSON values.

    A run that has ended already is not trained again: its result is read. keep_weights: whether a run whose joins
    a config describes leaves a model folder OUT/weights/NAME. Raises ValueError for a run that fails.
    """
    run = out / "runs" / job.name
    path, text = run / "job.toml", job_file(job, training, run)
    if path.exists() and path.read_text(encoding="utf-8") != text:
        raise ValueError(f"{run} was trained with other settings; choose another --out")
    run.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)
    if (code := ended(run)) is None:
        (run / "outcome.json").unlink(missing_ok=True)
        train(path, run / "train.log", training.device)
        code = ended(run)
    rows = read_lines(run / "metrics.jsonl")
    last = rows[-1] if rows else {}
    checkpoints = run / "checkpoint"
    if code == DONE and keep_weights and job.joins is None and checkpoints.exists():
        from laneformer.hf.export import export  # imports Transformers

        export(checkpoints / f"step-{training.steps}", out / "weights" / job.name, "float32", overwrite=True)
    shutil.rmtree(checkpoints, ignore_errors=True)
    config = LaneformerConfig.from_dict(json.loads((run / "model.json").read_text(encoding="utf-8")))
    return {
        **asdict(job), "tokens": training.tokens, "parameters": config.parameter_count()["total"],
        "train_loss": last.get("loss"), "valid_loss": last["valid_loss"] if code == DONE else None,
        "seconds": 3600 * last.get("gpu_hours", 0.0),
    }  # fmt: skip


def ended(run: Path) -> int | None:
    """DONE, or BAD_STEP for a run that has diverged; None for one that is not over."""
    outcome = read_outcome(run)
    return outcome["code"] if outcome and outcome["code"] in (DONE, BAD_STEP) else None


def train(path: Path, log: Path, device: str) -> None:
    """`python -m train` as the only rank of a job. Raises ValueError, with the end of the log, unless it ends well."""
    place: dict[str, Any] = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    place |= {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port(), "OMP_NUM_THREADS": 1}
    environment = {**os.environ, **{name: str(value) for name, value in place.items()}}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with open(log, "ab") as output:
        status = subprocess.call(
            [sys.executable, "-m", "train", "--job.config_file", str(path)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C is ours to pass on
        )
    if status not in (DONE, BAD_STEP):
        raise ValueError(
            f"a run has failed ({exit_words(status)}); its log is {log}, which ends:\n{last_text(log, ERROR_BYTES)}"
        )
