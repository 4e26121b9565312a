"""Recovery: the upper layers become late one group after the other, and are distilled against themselves at delay 0.

The shipped trainer does it (spec.py). Here are its job, the start of it, and the held-out losses of its checkpoints.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import tomli_w
import torch.distributed.checkpoint as dcp
from torch import Tensor

from laneformer import Laneformer
from laneformer.engine.folder import Checkpoint
from laneformer.hf.export import load_weights
from records.checkpoints import newest_saved_step, step_folders, write_checksums
from records.events import STOPPED, read_outcome
from records.files import append_line, read_lines, write_atomically

from .damage import Row, same_run
from .job_config import Late
from .lanes import ENDS, dense_layers, late_model, losses, run_late, shares


@dataclass(kw_only=True)
class Recovery(Late):
    """The table [recover]: AdamW without decay, warmup, flat, linear cooldown."""

    steps: int
    learning_rate: float
    batch_sequences: int = 2
    warmup_steps: int = 10
    cooldown_ratio: float = 0.2
    clip_norm: float = 1.0
    checkpoint_steps: int = 50  # between checkpoints, all of which are kept and get a held-out loss
    bfloat16: bool = False  # weights in the products, and streams; master weights and optimizer stay float32

    def check(self, depth: int) -> None:
        """ValueError for what cannot be trained."""
        needed = -(-(depth - self.first_late_layer) // self.layers_at_once) * self.anneal_steps
        if (
            self.end not in ENDS
            or self.delay < 1
            or not 0 <= self.first_late_layer < depth
            or self.steps < needed
        ):
            raise ValueError(
                f"[recover] needs end in {ENDS}, delay >= 1, first_late_layer in 0 to {depth - 1}, steps >= {needed} "
                f"(groups x anneal_steps), not {self.end!r}, {self.delay}, {self.first_late_layer}, {self.steps}"
            )

    def job(self, out: Path, lock: Path, seq_len: int) -> dict[str, Any]:
        """The trainer's job, whose run folder is OUT/run."""
        dense = str(out / "dense")
        of_late = {each.name: getattr(self, each.name) for each in fields(Late)}
        return {
            "job": {"dump_folder": str(out / "run"), "custom_config_module": "tools.delay_a_model.job_config"},
            "experimental": {"custom_import": "tools.delay_a_model.spec"},
            "phase": {"name": "recovery"},
            "model": {"name": "laneformer", "flavor": "tiny"},  # the architecture is that of late.dense
            "late": {**of_late, "dense": dense},
            "mixture": {"lock": str(lock)},
            "training": {
                "steps": self.steps, "seq_len": seq_len, "local_batch_size": self.batch_sequences,
                "global_batch_size": self.batch_sequences, "max_norm": self.clip_norm,
                "mixed_precision_param": "bfloat16" if self.bfloat16 else "float32",
            },
            "optimizer": {"lr": self.learning_rate, "weight_decay": 0.0},
            "lr_scheduler": {
                "total_steps": self.steps, "warmup_steps": self.warmup_steps, "decay_ratio": self.cooldown_ratio,
            },
            "activation_checkpoint": {"mode": "none"},
            "checkpoint": {
                "enable": True, "interval": self.checkpoint_steps, "keep_latest_k": 0,
                "initial_load_path": f"{dense}/checkpoint/step-0",
            },
            "metrics": {"log_freq": 1},
        }  # fmt: skip


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


def train(settings: Recovery, out: Path, lock: Path, seq_len: int, steps: int, minutes: float) -> int:
    """Start or continue the run OUT/run until step `steps`, or for so many minutes; returns the last saved step.

    ValueError where OUT holds a recovery with other settings, or where the trainer fails.
    """
    path, run, last = out / "recovery.toml", out / "run", min(steps, settings.steps)
    job = tomli_w.dumps(settings.job(out, lock, seq_len))
    if path.exists() and path.read_text(encoding="utf-8") != job:
        raise ValueError(f"{path} is another recovery; choose another --out")
    write_atomically(path, job)
    if newest_saved_step(run / "checkpoint") >= last:
        return last
    run.mkdir(exist_ok=True)
    (run / "outcome.json").unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=1",
        "-m",
        "train",
    ]
    command += ["--job.config_file", str(path), "--training.steps", str(last)]
    with subprocess.Popen(command, stdout=sys.stderr) as process:
        try:
            process.wait(None if minutes == math.inf else 60 * minutes)
        except subprocess.TimeoutExpired:
            (run / "stop").touch()
            process.wait()
    outcome = read_outcome(run) or {"code": process.returncode, "reason": "see its messages"}
    if process.returncode and outcome["code"] != STOPPED:
        raise ValueError(f"the recovery failed: {outcome['reason']}")
    return newest_saved_step(run / "checkpoint")


def measure(model: Laneformer, windows: Tensor, settings: Recovery, out: Path, about: Row) -> list[Row]:
    """Held-out losses of the dense model made late, and of every checkpoint of OUT/run, all layers fully late.

    model: the cut one. windows: token ids (n, S + 1). A line of OUT/recovery.jsonl each; those it holds are kept.
    """
    path, first, depth = out / "recovery.jsonl", settings.first_late_layer, len(model.layers)
    rows = same_run(read_lines(path), about, path)
    logged = {row["step"]: row for row in read_lines(out / "run" / "metrics.jsonl")}
    parts = windows.split(settings.batch_sequences)
    inputs = [dense_layers(model, model.tok_embeddings(part[:, :-1])[:, :, None], 0, first) for part in parts]
    dense = losses(model, [(dense_layers(model, h, first, depth), None) for h in inputs], parts, "dropped")
    saved = {0: out / "dense" / "checkpoint" / "step-0", **step_folders(out / "run" / "checkpoint")}
    for step in sorted(saved.keys() - {row["step"] for row in rows}):
        if not (saved[step] / ".metadata").exists():  # a save that was interrupted
            continue
        student = late_model(model.config, load_weights(saved[step], model.config)).to(windows.device)
        streams = [run_late(student, h, first, [1.0] * (depth - first), settings.delay) for h in inputs]
        found = {end: losses(student, streams, parts, end) for end in ENDS}
        late = sum(shares(step, depth - first, settings.anneal_steps, settings.layers_at_once))
        row = logged.get(step, {"gpu_hours": 0.0, "loss": None})
        facts = {
            "step": step,
            "seconds": round(3600 * row["gpu_hours"], 1),
            "late_layers": late,
            "kl": row["loss"],
        }
        rows.append({**facts, **found, "dense": dense, "about": about})
        append_line(path, json.dumps(rows[-1]))
    return rows


def export(settings: Recovery, checkpoint: Checkpoint, out: Path) -> str:
    """The command that makes a Hugging Face folder of the last checkpoint, if a config can say what it is.

    A head that was tied before is so again: it was frozen.
    """
    if (settings.first_late_layer, settings.end) != (settings.delay, "dropped"):
        return (
            f"{out}/run is all: a folder needs end = 'dropped' and first_late_layer = delay, since a config has one "
            "delay for all layers but the first `delay` ones, and no sum after the last"
        )
    config = replace(checkpoint.config, broadcast_delay=settings.delay)
    write_atomically(out / "model.json", json.dumps(config.to_dict(), indent=2) + "\n")
    step = out / "run" / "checkpoint" / f"step-{settings.steps}"
    return f"python -m tools.export_hf --checkpoint {step} --config {out}/model.json --out HF"
