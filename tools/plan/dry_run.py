"""One step of the real trainer as rank 0 of the whole world: TorchTitan's fake network, on this machine's CPU.

Checked: the job file and its overrides, the mesh of all ranks, batch divisibility and the micro-batches that follow,
how every parameter is cut (rank 0's shard), the dataloader's slice, optimizer, schedule of the whole length, one step
forward and backward through FSDP. Not checked: that the collectives work and what they cost (a fake one moves nothing,
so the loss means nothing), the GPU's memory, mixed precision, compile, and the layers left out: to stay within a CPU's
memory and minutes, widths and lanes are the job's own, but there is one layer and a sequence is short.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from laneformer.config import LaneformerConfig
from records.files import read_lines
from tools.bench.synthetic_data import write_synthetic_lock

ROOT = Path(__file__).resolve().parents[2]
LAYERS, SEQ_LEN = 1, 16
TIMEOUT_S = 900


def dry_run(config: Path, overrides: tuple[str, ...], titan_job: Any, world_size: int) -> dict[str, Any]:
    """Run it in a process of its own. Returns what was seen. Raises ValueError with the end of its output."""
    training = titan_job.training
    vocab_size = titan_job.architecture.vocab_size or LaneformerConfig.from_flavor(titan_job.model.flavor).vocab_size
    with tempfile.TemporaryDirectory() as folder:
        lock = write_synthetic_lock(Path(folder) / "data", 2 * training.global_batch_size, SEQ_LEN, vocab_size)
        run = Path(folder) / "run"
        command = [
            sys.executable, "-m", "train", "--job.config_file", str(config), *overrides,
            "--comm.mode", "fake_backend", "--job.dump_folder", str(run), "--mixture.lock", str(lock),
            "--architecture.num_hidden_layers", str(LAYERS), "--architecture.swa_layers", "0",
            "--architecture.sliding_window", str(SEQ_LEN // 2), "--training.seq_len", str(SEQ_LEN),
            "--training.steps", "1", "--lr_scheduler.total_steps", str(training.steps),
            "--training.mixed_precision_param", "float32", "--compile.no-enable", "--checkpoint.no-enable",
            "--checkpoint.allow_fresh_start", "--metrics.no-enable_tensorboard", "--metrics.no-enable_wandb",
            "--metrics.log_freq", "1",
        ]  # fmt: skip
        env = {**os.environ, "NGPU": str(world_size), "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size), "RANK": "0"}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
        if done.returncode != 0:
            raise ValueError(f"the dry run of {config} failed: {(done.stdout + done.stderr)[-3000:]}")
        row = read_lines(run / "metrics.jsonl")[-1]
        attempt = read_lines(run / "attempts.jsonl")[-1]
    return {
        "world_size": attempt["world_size"],
        "step": row["step"],
        "lr": row["lr"],
        "layers": LAYERS,
        "seq_len": SEQ_LEN,
        "said": f"one step as rank 0 of {attempt['world_size']}, {LAYERS} layer, {SEQ_LEN} tokens",
    }
