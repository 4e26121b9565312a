"""Recovery: the upper layers become late one group after the other, and are distilled against
themselves at delay 0.

Layers below `first_late_layer` stay as they are, so their output is computed once for teacher and student.
The teacher is the dense model's upper layers, the student starts as a copy of them. A group's share that
comes late grows from 0 to 1 over `anneal_steps`, from the last layers down; the loss is KL(teacher ||
student) of each next token. Embedding, final norm and head are shared and frozen.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional as F

from laneformer import Laneformer
from laneformer.engine.folder import Checkpoint
from records.files import append_line, read_lines, write_atomically

from .damage import Row, same_run
from .lanes import ENDS, Streams, dense_layers, logits_of, losses, run_late
from .text import Text

MOMENTS = ("exp_avg", "exp_avg_sq")
console = Console(stderr=True, highlight=False)


@dataclass(frozen=True)
class Recovery:
    """The training: AdamW without decay, warmup, flat, linear cooldown."""

    delay: int
    first_late_layer: int
    end: str  # what becomes of outputs under way after the last layer: dropped or flushed (lanes.py)
    steps: int
    anneal_steps: int
    layers_at_once: int
    learning_rate: float
    batch_sequences: int = 2
    warmup_steps: int = 10
    cooldown_ratio: float = 0.2
    clip_norm: float = 1.0
    seed: int = 0
    checkpoint_steps: int = 50  # between checkpoints, each with a held-out loss
    bfloat16: bool = False  # autocast; weights and optimizer stay float32

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

    def late(self, step: int, depth: int) -> list[float]:
        """The share that comes late, of every layer from first_late_layer on."""
        groups = [(depth - 1 - i) // self.layers_at_once for i in range(self.first_late_layer, depth)]
        return [min(1.0, max(0.0, (step + 1) / self.anneal_steps - group)) for group in groups]

    def rate(self, step: int) -> float:
        cooldown = max(1, round(self.steps * self.cooldown_ratio))
        return self.learning_rate * min(1.0, (step + 1) / self.warmup_steps, (self.steps - step) / cooldown)


class Student:
    """The layers that become late, their optimizer, and all that a resumed run needs."""

    def __init__(self, model: Laneformer, settings: Recovery, held_out: Tensor):
        """held_out: windows (n, S + 1), whose frozen part is computed once."""
        self.model, self.settings, self.depth = model, settings, len(model.layers)
        settings.check(self.depth)
        self.first, self.step, self.seconds = settings.first_late_layer, 0, 0.0
        self.layers = copy.deepcopy(model.layers[self.first :]).requires_grad_()
        self.optimizer = torch.optim.AdamW(self.layers.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
        self.windows = held_out.split(settings.batch_sequences)
        pairs = [self.dense(part[:, :-1]) for part in self.windows]
        self.inputs, self.dense_losses = (
            [h for h, _ in pairs],
            losses(model, [s for _, s in pairs], self.windows, "dropped"),
        )

    @torch.no_grad()
    def dense(self, ids: Tensor) -> tuple[Tensor, Streams]:
        """What the first late layer reads, (B, S, 1, D), and the dense model's last streams."""
        h = dense_layers(self.model, self.model.tok_embeddings(ids)[:, :, None], 0, self.first)
        return h, (dense_layers(self.model, h, self.first, self.depth), None)

    def train_step(self, windows: Tensor) -> float:
        """One optimizer step on windows (n, S + 1); returns the mean KL(teacher || student) before
        it, nats a token.
        """
        s = self.settings
        for group in self.optimizer.param_groups:
            group["lr"] = s.rate(self.step)
        with torch.autocast(windows.device.type, torch.bfloat16, enabled=s.bfloat16):
            h, dense = self.dense(windows[:, :-1])
            truth = logits_of(self.model, dense, "dropped").log_softmax(-1).flatten(0, 1)
            streams = run_late(self.model, self.layers, h, self.first, s.late(self.step, self.depth), s.delay)
            guess = logits_of(self.model, streams, s.end).log_softmax(-1).flatten(0, 1)
        loss = F.kl_div(guess, truth, reduction="batchmean", log_target=True)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.layers.parameters(), s.clip_norm)
        self.optimizer.step()
        self.step += 1
        return loss.item()

    @torch.no_grad()
    def log(self, path: Path, kl: float | None, about: Row) -> None:
        """Append held-out losses with all layers late, unless a run that was stopped before it saved did so."""
        if any(row["step"] == self.step for row in read_lines(path)):
            return
        s, ones = self.settings, [1.0] * len(self.layers)
        streams = [run_late(self.model, self.layers, h, self.first, ones, s.delay) for h in self.inputs]
        found = {end: losses(self.model, streams, self.windows, end) for end in ENDS}
        late = sum(s.late(self.step - 1, self.depth))
        row = {"step": self.step, "seconds": round(self.seconds, 1), "late_layers": late, "kl": kl}
        append_line(path, json.dumps({**row, **found, "dense": self.dense_losses, "about": about}))

    def tensors(self) -> dict[str, Tensor]:
        """Weights and what the optimizer holds of them."""
        state = self.optimizer.state
        kept = {
            f"{key}/{name}": state[p][key] for name, p in self.layers.named_parameters() for key in MOMENTS
        }
        return {**self.layers.state_dict(), **kept}

    def save(self, path: Path, about: Row) -> None:
        """One safetensors file, with what is no tensor as JSON in its header."""
        kept = {"step": self.step, "seconds": self.seconds, "about": about}
        write_atomically(path, save(self.tensors(), {"recovery": json.dumps(kept)}))

    @torch.no_grad()
    def load(self, path: Path, about: Row) -> None:
        """What `save` wrote; ValueError where it is of another run."""
        with safe_open(path, framework="pt") as stored:
            kept = json.loads(stored.metadata()["recovery"])
            same_run([kept], about, path)
            self.step, self.seconds = kept["step"], kept["seconds"]
            self.restore(stored.get_tensor)

    def restore(self, stored: Callable[[str], Tensor]) -> None:
        for p in self.layers.parameters():
            self.optimizer.state[p] = {key: torch.zeros_like(p) for key in MOMENTS}
            self.optimizer.state[p]["step"] = torch.tensor(float(self.step))
        for name, tensor in self.tensors().items():
            tensor.copy_(stored(name))


def recover(student: Student, train: Text, out: Path, about: Row, stop: int, minutes: float) -> list[Row]:
    """Train until step `stop`, or for so many minutes; OUT/recovery.jsonl, whose rows
    it returns, and .safetensors.
    """
    settings, path, state = student.settings, out / "recovery.jsonl", out / "recovery.safetensors"
    about = {**about, "recover": asdict(settings), "train_sha256": train.sha256}
    same_run(read_lines(path), about, path)
    if state.exists():
        student.load(state, about)
    kl, begun, stop = None, time.monotonic() - student.seconds, min(stop, settings.steps)
    ends, length = student.seconds + 60 * minutes, student.windows[0].shape[1] - 1
    while True:
        student.seconds = time.monotonic() - begun
        last = student.step >= stop or student.seconds >= ends
        if last or student.step % settings.checkpoint_steps == 0:
            student.log(path, kl, about)
            if kl is not None:
                student.save(state, about)
        if last:
            return read_lines(path)
        windows = train.drawn(settings.seed, student.step, settings.batch_sequences, length)
        kl = student.train_step(windows.to(student.windows[0].device))
        console.print(f"step {student.step}/{settings.steps} of {path}: KL {kl:.4f}")


def export(student: Student, checkpoint: Checkpoint, out: Path) -> str:
    """The run folder OUT/run, of which tools.export_hf makes a Hugging Face folder, if a config can
    say what it is.
    """
    s, folder = student.settings, out / "run"
    if (s.first_late_layer, s.end) != (s.delay, "dropped"):
        return (
            f"{out}/recovery.safetensors is all: a folder needs end = 'dropped' and first_late_layer = delay, since a "
            "config has one delay for all layers but the first `delay` ones, and no sum after the last"
        )
    weights: Row = dict(student.model.state_dict())
    for name, tensor in student.layers.state_dict().items():
        layer, _, rest = name.partition(".")
        weights[f"layers.{student.first + int(layer)}.{rest}"] = tensor
    dcp.save(weights, checkpoint_id=folder / "checkpoint" / f"step-{student.step}", no_dist=True)
    config = replace(student.model.config, broadcast_delay=s.delay).to_dict()
    for name, values in (("model.json", config), ("tokenizer_config.json", checkpoint.tokenizer_config)):
        write_atomically(folder / name, json.dumps(values, indent=2) + "\n")
    checkpoint.tokenizer.save(str(folder / "tokenizer.json"))  # type: ignore[union-attr]
    return f"written: {folder}; python -m tools.export_hf --checkpoint {folder}/checkpoint/step-{student.step} --out HF"
