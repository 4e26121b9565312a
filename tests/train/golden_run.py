"""Train the run behind the golden losses, and renew them:

python -m tests.train.golden_run    (from the checkout; writes tests/train/golden/DEVICE.json)
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import torch

from tests.train.runs import ROOT, SEQ_LEN, SMALL, fork_server, metrics, run_job, toy
from tools.synthetic import write_synthetic_lock

STEPS, GLOBAL_BATCH = 20, 8
# one part in a thousand off, which the test must see
PLANTED = ("--optimizer.lr", "3.003e-3")
NARROW_VECTORS = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
}


def device_kind() -> str:
    """Return the golden file's stem: cpu, or the GPU's name."""
    return (
        torch.cuda.get_device_name().lower().replace(" ", "-")
        if torch.cuda.is_available()
        else "cpu"
    )


def golden_path() -> Path:
    return ROOT / f"tests/train/golden/{device_kind()}.json"


def golden_losses(folder: Path, *overrides: str, ranks: int = 1) -> list[float]:
    """Return the losses of the run in a fresh `folder`."""
    lock = write_synthetic_lock(folder / "data", STEPS * GLOBAL_BATCH, SEQ_LEN, SMALL.vocab_size)
    run = folder / "run"
    settings = {
        "training.steps": STEPS,
        "training.global_batch_size": GLOBAL_BATCH,
        "training.local_batch_size": 4,
        "lr_scheduler.warmup_steps": 2,
    }
    off = ("--checkpoint.no-enable", "--metrics.no-enable_tensorboard")
    run_job(run, [*toy(run, lock, settings), *off, *overrides], ranks)
    return [row["loss"] for row in metrics(run)]


def main() -> None:
    """Write losses and, for each step, the largest difference by rounding so far."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        losses = golden_losses(folder / "one")
        # Other machines agree only to rounding, as other vector widths and libraries sum in another
        # order and each step builds on the one before. It is measured: two ranks, a compiled loss and
        # layers, and the narrowest vector instructions that PyTorch and MKL have
        others = [
            golden_losses(folder / "two", ranks=2),
            golden_losses(folder / "compiled", "--compile.enable"),
        ]
        os.environ.update(NARROW_VECTORS)
        # a server that starts anew reads them
        fork_server.cache_clear()
        others.append(golden_losses(folder / "narrow"))
    spread = [max(at) - min(at) for at in zip(losses, *others, strict=True)]
    rounding = [max(spread[: step + 1]) for step in range(STEPS)]
    golden = {"losses": losses, "rounding": rounding}
    golden_path().write_text(json.dumps(golden, indent=1) + "\n")
    print(f"wrote {golden_path()}; largest difference by rounding {rounding[-1]:.2e}")


if __name__ == "__main__":
    main()
