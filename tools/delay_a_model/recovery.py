"""Recovery: the upper layers become late one group after the other, and are distilled against themselves at delay 0.

The shipped trainer does it (spec.py). Here are its job, the start of it, and the held-out losses of its
checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from laneformer import Laneformer, LaneformerConfig
from laneformer.engine.folder import Checkpoint
from laneformer.hf.export import load_weights
from records.checkpoints import newest_saved_step, step_folders, write_checksums
from records.events import DONE, STOPPED
from records.files import read_lines, write_atomically
from tools.ablate import trainer
from tools.ablate.trainer import with_sections, write_job

from .adapter import first_adapter, merged, scales
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

    if late.lora_rank < 0 or not late.first_late_layer <= late.first_adapted < depth:
        raise ValueError(
            f"[late] needs lora_rank >= 0 and lora_first_layer 0 or in {late.first_late_layer} to {depth - 1}, "
            f"not {late.lora_rank}, {late.lora_first_layer}"
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


def write_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    """The dense model's, which text is prepared with."""
    assert checkpoint.tokenizer is not None, "the command refuses a model without one"
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint.tokenizer.save(str(folder / "tokenizer.json"))
    values = json.dumps(checkpoint.tokenizer_config, indent=2)
    write_atomically(folder / "tokenizer_config.json", values + "\n")


def write_dense(model: Laneformer, late: Late, folder: Path) -> None:
    """The cut model as a run folder, once, with the adapter that training begins with."""
    own = json.dumps([late.lora_rank, late.first_adapted] if late.lora_rank else [])
    done = folder / "model.json", folder / "adapter.json"
    if all(path.exists() for path in done) and done[1].read_text() == own:
        return
    step = folder / "checkpoint" / "step-0"
    adapter = first_adapter(model.config, late) if late.lora_rank else {}
    dcp.save({**model.state_dict(), **adapter}, checkpoint_id=step, no_dist=True)
    write_checksums(step)
    values = json.dumps(model.config.to_dict(), indent=2)
    write_atomically(folder / "model.json", values + "\n")
    write_atomically(folder / "adapter.json", own)  # the last: it says that the rest is there


def trained_weights(step: Path, config: LaneformerConfig, late: Late) -> dict[str, Tensor]:
    """The late model's weights of a checkpoint, its adapter merged."""
    weights = load_weights(step, config)
    return merged(weights, load_adapter(step, config, late)) if late.lora_rank else weights


def load_adapter(step: Path, config: LaneformerConfig, late: Late) -> dict[str, Tensor]:
    shapes = config.tensor_shapes()
    adapter = first_adapter(config, late) | {name: torch.empty(shapes[name]) for name in scales(config, late)}
    dcp.load(adapter, checkpoint_id=step, no_dist=True)
    return adapter


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
        student = late_model(model.config, trained_weights(saved[step], model.config, late)).to(
            parts[0].device
        )
        row = logged.get(step, {"gpu_hours": 0.0, "loss": None})
        trained = {
            "step": step, "seconds": round(3600 * row["gpu_hours"], 1), "kl": row["loss"],
            "late_layers": sum(shares(step, depth - first, late.anneal_steps, late.layers_at_once)),
        }  # fmt: skip
        found = held_out_losses(student, inputs, parts, 0, all_late, late.delay)
        keep(rows, {**trained, **found, "dense": dense, "about": about}, path)
    return rows
