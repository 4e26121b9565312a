"""Recover quality: upper layers become late one by one, distilled against themselves at delay 0.

The shipped trainer does it (spec.py); this prepares its start and runs it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import tomli_w
import torch
import torch.distributed.checkpoint as dcp
from rich.console import Console
from torch import Tensor

from data_mixtures.prepare import prepare
from data_mixtures.stages.run import Options
from laneformer import Laneformer, LaneformerConfig
from laneformer.engine.folder import Checkpoint
from records.checkpoints import write_checksums
from records.files import write_atomically, write_json
from records.workers import usable_cpus

from .adapter import SCALES, first_adapter, names_in_late_layers
from .export import write_text_files
from .job_config import Late
from .lanes import shares


def check(late: Late, depth: int, steps: int) -> None:
    """Raise ValueError for what cannot be trained in a model of `depth` layers."""
    if not 1 <= late.delay <= late.first_late_layer < depth:
        raise ValueError(
            f"[late] needs 1 <= delay <= first_late_layer < {depth}, not {late.delay} and {late.first_late_layer}"
        )
    upper = depth - late.first_late_layer
    if min(shares(steps, upper, late.anneal_steps)) < 1:
        raise ValueError(
            f"training.steps = {steps} ends before all {upper} layers are late; take more, or less of "
            f"anneal_steps = {late.anneal_steps}"
        )


def prepare_text(late: Late, seq_len: int, checkpoint: Checkpoint, out: Path) -> Path:
    """Return the lock of OUT/data: the recipe's text in the dense model's tokens."""
    lock = out / "data" / "phase1.lock.json"
    if not lock.exists():
        # in the dense model's own tokens, without which nothing could be distilled
        write_text_files(checkpoint, out / "tokenizer")
        tokenizer = (out / "tokenizer" / "tokenizer.json").resolve()
        recipe = {
            "base": str(Path(late.recipe).resolve()),
            "tokenizer": str(tokenizer),
            "seq_len": seq_len,
        }
        write_atomically(out / "recipe.toml", tomli_w.dumps(recipe))
        prepare(out / "recipe.toml", lock.parent, Options(usable_cpus()), Console(stderr=True))
    return lock


def write_dense(model: Laneformer, late: Late, folder: Path) -> None:
    """Write the cut model as a run folder, with the initial adapter."""
    # written last: with it the checkpoint is complete
    marker = folder / "model.json"
    if marker.exists():
        return
    step = folder / "checkpoint" / "step-0"
    adapter = first_adapter(model.config, late) if late.lora_rank else {}
    dcp.save({**model.state_dict(), **adapter}, checkpoint_id=step, no_dist=True)
    write_checksums(step)
    write_json(marker, model.config.to_dict())


def train(flags: Sequence[str]) -> None:
    """Start or continue the run on one device; ValueError if it misses its last step."""
    command = [sys.executable, "-m", "train.supervise", "--nproc-per-node", "1", *flags]
    # in a session of its own, so that it gets one signal for a Ctrl-C: a second one kills it
    with subprocess.Popen(command, start_new_session=True) as supervisor:
        try:
            status = supervisor.wait()
        except KeyboardInterrupt:
            # it saves a checkpoint first
            supervisor.terminate()
            supervisor.wait()
            raise
    if status:
        raise ValueError(f"the trainer ended with exit status {status}; the same command goes on")


def load_adapter(step: Path, config: LaneformerConfig, late: Late) -> dict[str, Tensor]:
    shapes, scales = config.tensor_shapes(), names_in_late_layers(config, late, SCALES)
    adapter = first_adapter(config, late) | {name: torch.empty(shapes[name]) for name in scales}
    dcp.load(adapter, checkpoint_id=step, no_dist=True)
    return adapter
