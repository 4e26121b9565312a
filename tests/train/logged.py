"""The run whose log the tests of metrics and validation compare with a plain model."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from laneformer import Laneformer
from tests.train.runs import ARCHITECTURE, SEQ_LEN, SMALL, run_job

GLOBAL_BATCH, STEPS, WINDOWS = 8, 6, 5
EPSILON = torch.finfo(torch.float32).eps


def train_logged(run: Path, lock: Path, *overrides: str, ranks: int = 2) -> list[dict]:
    architecture = [a for k, v in ARCHITECTURE.items() for a in (f"--architecture.{k}", str(v))]
    arguments = [
        "--job.config_file", "configs/debug_phase1.toml", "--job.dump_folder", str(run), "--mixture.lock", str(lock),
        "--training.seq_len", str(SEQ_LEN), "--training.global_batch_size", str(GLOBAL_BATCH),
        "--training.local_batch_size", "2", "--training.steps", str(STEPS), "--checkpoint.interval", "2",
        "--validation.freq", "3", "--validation.windows_per_source", str(WINDOWS), "--architecture.swa_layers",
        "0", "1", "2", *architecture, *overrides,
    ]  # fmt: skip
    job = run_job(run, arguments, ranks)
    assert job.returncode == 0, job.stdout[-2000:] + job.stderr[-4000:]
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def rows_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def checkpoint_model(run: Path, step: int) -> Laneformer:
    with tempfile.NamedTemporaryFile() as target:
        dcp_to_torch_save(run / f"checkpoint/step-{step}", target.name)
        state = torch.load(target.name, weights_only=False)
    model = Laneformer(SMALL)
    model.load_state_dict({k: v for k, v in state.items() if k in model.state_dict()})
    return model


@torch.no_grad()
def plain_loss(model: Laneformer, tokens: np.ndarray) -> float:
    """Mean loss of windows (n, S + 1) in nats per token: one process, float32 model, loss in float64."""
    batch = torch.from_numpy(tokens.astype(np.int64))
    logits = model(batch[:, :-1]).double()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).item()
