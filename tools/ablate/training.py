"""One run of the ablation: a job of the shipped trainer, in a process of its own.

Paired by design: a seed gives every variant of a size the same batches, those after the ones that smaller seeds
use, and the same initial weights, since a tensor's numbers depend on its name and the seed (where the number of
lanes differs, the same numbers in another arrangement). What differs is the joins. With `branch_at` the baseline
alone is trained whole, and the others, paired more closely and in a part of the time, leave its run there with all
that it has: weights, moments, place in the data.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_mixtures.mixture import read_lock
from laneformer import LaneformerConfig
from records.events import BAD_STEP, DONE, read_outcome
from records.files import read_lines

from .job_config import JOINS
from .trainer import train, with_sections, write_job

ENDS = (DONE, BAD_STEP)  # a run that has diverged is over, too
EXPORTING = threading.Lock()  # an import of Transformers fails where two threads begin it at once


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
    branch_at: float = 0.0  # share of the steps after which others leave the baseline's run; 0: they do not

    @property
    def branch_step(self) -> int:
        return round(self.steps * self.branch_at)

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
    trunk: str = ""  # name of the run that it leaves

    @property
    def key(self) -> list[Any]:
        """What a result is found by."""
        return [self.size, self.variant, self.seed, self.learning_rate]

    @property
    def name(self) -> str:
        return "-".join(map(str, self.key))


def job_file(job: Job, training: Training, run: Path) -> dict[str, dict[str, Any]]:
    """The sections of the trainer's job file of one run."""
    first = job.seed * training.steps * training.batch_sequences
    checkpoint: dict[str, Any] = {"interval": training.branch_step} if training.branch_at else {}
    if job.trunk:
        start = {"initial_load_path": str(kept(run.parent / job.trunk)), "initial_load_all_states": True}
        checkpoint = {**start, "allow_changes": list(JOINS), "allow_fresh_start": False}
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
        "resilience": {
            "skip_sequences": [[0, first]] if first else [],
            "keep_every_steps": training.branch_step,
        },
        "debug": {"seed": job.seed + job.seed_offset},
        "checkpoint": checkpoint,
    }
    return with_sections(training.job, own)


def kept(trunk: Path) -> Path:
    """The checkpoint of a run at which branches leave it."""
    return trunk / "branches-from"


def run_job(job: Job, training: Training, out: Path, keep_weights: bool) -> dict[str, Any]:
    """Train OUT/runs/NAME to its end, from its newest checkpoint if it has one; the result as JSON values.

    A run that has ended already is not trained again: its result is read. keep_weights: whether a run whose joins
    a config describes leaves a model folder OUT/weights/NAME. Raises ValueError for a run that fails.
    """
    run = out / "runs" / job.name
    path, checkpoints = run / "job.toml", run / "checkpoint"
    if job.trunk and not kept(run.parent / job.trunk).exists():
        raise ValueError(
            f"{run} cannot leave {job.trunk}, which has diverged or was trained elsewhere: leave its rate and "
            "seed out, or remove its line from results.jsonl to train it here"
        )
    write_job(path, job_file(job, training, run))
    code = (read_outcome(run) or {}).get("code")
    if code not in ENDS:
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if training.device == "cpu" else {}
        code = train(path, ends=ENDS, log=run / "train.log", environment={"OMP_NUM_THREADS": "1", **hidden})
    last = (read_lines(run / "metrics.jsonl") or [{}])[-1]
    if code == DONE and keep_weights and job.joins is None and checkpoints.exists():
        from laneformer.hf.export import export  # imports Transformers

        with EXPORTING:
            export(
                checkpoints / f"step-{training.steps}", out / "weights" / job.name, "float32", overwrite=True
            )
    if code == DONE and training.branch_at and not job.trunk and checkpoints.exists():
        os.replace(checkpoints / f"step-{training.branch_step}", kept(run))
    shutil.rmtree(checkpoints, ignore_errors=True)
    config = LaneformerConfig.from_dict(json.loads((run / "model.json").read_text(encoding="utf-8")))
    return {
        **asdict(job), "tokens": training.tokens, "parameters": config.parameter_count()["total"],
        "train_loss": last.get("loss"), "valid_loss": last["valid_loss"] if code == DONE else None,
        "seconds": 3600 * last.get("gpu_hours", 0.0),
    }  # fmt: skip
