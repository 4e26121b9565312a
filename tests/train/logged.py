"""Train the run whose log the tests of metrics and validation compare with a plain model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from laneformer import Laneformer
from tests.train.runs import SMALL, load_saved, metrics, run_job, toy

GLOBAL_BATCH, STEPS, WINDOWS = 8, 6, 5
EPSILON = torch.finfo(torch.float32).eps


def train_logged(run: Path, lock: Path, *overrides: str, ranks: int = 2) -> list[dict]:
    settings = {
        "training.global_batch_size": GLOBAL_BATCH,
        "training.steps": STEPS,
        "checkpoint.interval": 2,
        "validation.freq": 3,
        "validation.windows_per_source": WINDOWS,
    }
    run_job(run, [*toy(run, lock, settings), *overrides], ranks)
    return metrics(run)


def checkpoint_model(run: Path, step: int) -> Laneformer:
    model, state = Laneformer(SMALL), load_saved(run, step)
    model.load_state_dict({name: state[name] for name in model.state_dict()})
    return model


@torch.no_grad()
def plain_loss(model: Laneformer, tokens: np.ndarray) -> float:
    """Return the mean loss of windows (n, S + 1) in nats per token, of a float32 model."""
    batch = torch.from_numpy(tokens.astype(np.int64))
    logits = model(batch[:, :-1]).double()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).item()
