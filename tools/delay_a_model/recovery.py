"""Recovery: the upper layers become late one group after the other, and are distilled against themselves at delay 0.

The shipped trainer does it (spec.py). Here are its job, the start of it, and the held-out losses of its
checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor

from laneformer import Laneformer
from laneformer.engine.folder import Checkpoint
from laneformer.hf.export import load_weights
from records.checkpoints import newest_saved_step, step_folders, write_checksums
from records.events import DONE, STOPPED
from records.files import read_lines, write_atomically
from tools.ablate import trainer
from tools.ablate.trainer import with_sections, write_job

from .damage import Row, keep, kept_rows
from .job_config import Late
from .lanes import ENDS, embedded, held_out_losses, late_model, shares


def check(late: Late, depth: int, steps: int) -> None:
    """ValueError for what cannot be trained."""
    needed = -(-(depth - late.first_late_layer) // late.layers_at_once) * late.anneal_steps
    first = max(1, late.delay)  # what a config can say (config.py): a layer before the delay is not late
    if late.end not in ENDS or late.delay < 1 or not first <= late.first_late_layer < depth or steps < needed:
        raise ValueError(
            f"[late] needs end in {ENDS}, delay >= 1, first_late_layer in {first} to {depth - 1}, "
            f"training.steps >= {needed} (groups x anneal_steps), "
            f"not {late.end!r}, {late.delay}, {late.first_late_layer}, {steps}"
        )


def job_of(tables: dict[str, Any], out: Path, lock: Path) -> dict[str, Any]:
    """The trainer's job: the config's tables with this run folder, data and dense model."""
    dense = str(out / "dense")
    added = {
        "job": {"dump_folder": str(out / "run")},
        "mixture": {"lock": str(lock)},
        "late": {"dense": dense},
        "checkpoint": {"initial_load_path": f"{dense}/checkpoint/step-0"},
    }
    return with_sections(tables, added)


def write_dense(model: Laneformer, checkpoint: Checkpoint, folder: Path) -> None:
    """The cut model as a run folder with its tokenizer, which text is prepared with; once."""
    if (folder / "model.json").exists():
        return
    assert checkpoint.tokenizer is not None, "the command refuses a model without one"
    step = folder / "checkpoint" / "step-0"
    dcp.save(dict(model.state_dict()), checkpoint_id=step, no_dist=True)
    write_checksums(step)
    checkpoint.tokenizer.save(str(folder / "tokenizer.json"))
    for name, values in (
        ("tokenizer_config.json", checkpoint.tokenizer_config),
        ("model.json", model.config.to_dict()),  # the last: it says that the rest is there
    ):
        write_atomically(folder / name, json.dumps(values, indent=2) + "\n")


def train(job: dict[str, Any], out: Path, steps: int, minutes: float) -> int:
    """Start or continue the run OUT/run until step `steps`, or for so many minutes; returns the last saved step.

    ValueError where OUT holds another recovery, or where the trainer fails.
    """
    path, last = out / "run" / "job.toml", min(steps, job["training"]["steps"])
    write_job(path, job)
    if newest_saved_step(out / "run" / "checkpoint") < last:
        trainer.train(path, "--training.steps", str(last), ends=(DONE, STOPPED), limit_s=60 * minutes)
    return newest_saved_step(out / "run" / "checkpoint")


def measure(model: Laneformer, parts: Sequence[Tensor], late: Late, out: Path, about: Row) -> list[Row]:
    """Held-out losses of the dense model made late, and of every checkpoint of OUT/run, all layers fully late.

    model: the cut one. parts: batches of token ids (b, S + 1). A line of OUT/recovery.jsonl each; those that it
    holds are kept.
    """
    path, depth = out / "recovery.jsonl", len(model.layers)
    rows = kept_rows(path, about)
    logged = {row["step"]: row for row in read_lines(out / "run" / "metrics.jsonl")}
    inputs, first = embedded(model, parts), late.first_late_layer
    dense = held_out_losses(model, inputs, parts, 0, [0.0] * depth, 1)["dropped"]
    saved = {0: out / "dense" / "checkpoint" / "step-0", **step_folders(out / "run" / "checkpoint")}
    all_late = [0.0] * first + [1.0] * (depth - first)
    for step in sorted(saved.keys() - {row["step"] for row in rows}):
        if not (saved[step] / ".metadata").exists():  # a save that was interrupted
            continue
        student = late_model(model.config, load_weights(saved[step], model.config)).to(parts[0].device)
        row = logged.get(step, {"gpu_hours": 0.0, "loss": None})
        trained = {
            "step": step, "seconds": round(3600 * row["gpu_hours"], 1), "kl": row["loss"],
            "late_layers": sum(shares(step, depth - first, late.anneal_steps, late.layers_at_once)),
        }  # fmt: skip
        found = held_out_losses(student, inputs, parts, 0, all_late, late.delay)
        keep(rows, {**trained, **found, "dense": dense, "about": about}, path)
    return rows
