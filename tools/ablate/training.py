"""One training run of the ablation: a function of its job alone, on one thread.

Paired by design: a seed gives every variant of a size the same batches, since batch N of a mixture is a
function, and the same initial weights, since a tensor's numbers depend on its name and the seed (where the
number of lanes differs, the same numbers in another arrangement). What differs is the joins.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from data_mixtures.mixture import Mixture, valid_windows
from laneformer import Laneformer, LaneformerConfig
from laneformer.config import hf_name
from records.files import write_atomically

from .variants import build

Model = Callable[[torch.Tensor], torch.Tensor]  # token ids (b, S) -> logits (b, S, V)


@dataclass(frozen=True)
class Training:
    """What all runs share: AdamW, a warmup and a linear cooldown (WSD), as in the shipped jobs."""

    lock: str
    steps: int
    batch_sequences: int
    seq_len: int
    warmup_ratio: float = 0.05
    cooldown_ratio: float = 0.2
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip_norm: float = 1.0
    valid_windows: int = 64  # of each source
    device: str = "cpu"
    bf16: bool = False  # products under autocast; weights, streams and optimizer stay float32
    compile: str | None = None  # a backend of torch.compile

    @classmethod
    def of_result(cls, values: Mapping[str, Any]) -> Training:
        """As a line of results.jsonl has it; lines older than a field have the
        default, which changes nothing.
        """
        return cls(**{**values, "betas": tuple(values["betas"])})

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


def run_job(job: Job, training: Training, weights: Path | None = None) -> dict[str, Any]:
    """Train and validate; the result as JSON values. ValueError for a job that the mixture
    or the config refuses.

    weights: folder that receives a model folder of every run whose joins a config describes.
    """
    torch.set_num_threads(1)
    began, mixture = time.perf_counter(), Mixture.open(training.lock)
    if training.seq_len > mixture.seq_len:
        raise ValueError(f"seq_len = {training.seq_len} exceeds the mixture's {mixture.seq_len}")
    config = LaneformerConfig(
        vocab_size=mixture.vocab_size, max_position_embeddings=training.seq_len, **job.model
    )
    model = build(config, job.joins, job.seed + job.seed_offset).to(training.device)
    run = compiled(model, training)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [
        {"params": decayed, "weight_decay": training.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=job.learning_rate, betas=training.betas, fused=training.device == "cuda"
    )
    first_sequence = job.seed * training.steps * training.batch_sequences  # a seed has batches of its own
    loss = torch.tensor(math.nan)
    for step in range(training.steps):
        for group in optimizer.param_groups:
            group["lr"] = job.learning_rate * schedule(step, training)
        tokens, _ = mixture.sequences(
            first_sequence + step * training.batch_sequences, training.batch_sequences
        )
        loss = loss_of(run, tokens[:, : training.seq_len + 1], training)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip_norm)
        optimizer.step()
    if weights and job.joins is None:
        save(model, weights / "-".join(map(str, job.key)))
    return {
        **asdict(job), "tokens": training.tokens, "parameters": config.parameter_count()["total"],
        "train_loss": loss.item(), "valid_loss": validate(run, mixture, training),
        "seconds": time.perf_counter() - began,
    }  # fmt: skip


def compiled(model: Laneformer, training: Training) -> Model:
    """The model as `training.compile` asks; a graph break, or a graph too many, is an error and
    not a slow run.
    """
    if training.compile is None:
        return model
    torch.compiler.reset()  # this worker's earlier runs: their graphs would count against the limit
    return torch.compile(model, backend=training.compile, fullgraph=True)


def save(model: Laneformer, folder: Path) -> None:
    """config.json and model.safetensors, which the engine and tools.ablate.diagnose
    read; without a tokenizer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {hf_name(name): w.detach().cpu() for name, w in model.state_dict().items()},
        folder / "model.safetensors",
    )
    write_atomically(
        folder / "config.json", json.dumps({"model_type": "laneformer", **model.config.to_dict()}) + "\n"
    )


def schedule(step: int, training: Training) -> float:
    """The learning rate's factor: up over the warmup, flat, down to zero over the cooldown."""
    warmup = max(1, round(training.steps * training.warmup_ratio))
    cooldown = max(1, round(training.steps * training.cooldown_ratio))
    return min(1.0, (step + 1) / warmup, (training.steps - step) / cooldown)


def loss_of(model: Model, tokens: np.ndarray, training: Training) -> torch.Tensor:
    """Mean cross-entropy, nats a token, of windows (b, S + 1)."""
    ids = torch.from_numpy(tokens.astype(np.int64)).to(training.device)
    with torch.autocast(training.device, torch.bfloat16, enabled=training.bf16):
        logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


@torch.no_grad()
def validate(model: Model, mixture: Mixture, training: Training) -> float:
    """Mean loss over the first held-out windows of every source; a loss that is not
    finite counts as infinite.
    """
    losses = []
    for source in mixture.source_names:
        windows = valid_windows(Path(training.lock).parent, source, training.valid_windows)[
            :, : training.seq_len + 1
        ]
        for first in range(0, len(windows), training.batch_sequences):
            part = windows[first : first + training.batch_sequences]
            losses += [loss_of(model, part, training).item()] * len(part)
    mean = float(np.mean(losses))
    return mean if math.isfinite(mean) else math.inf
