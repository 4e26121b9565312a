"""Test of a drafting head to its acceptance: the demo's text, a tiny model, then configs/mtp.toml."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.runs import ROOT, metrics, run_job

# what its commands run, which the imports of this file do not show
PROGRAMS = (
    "train/**/*.py",
    "data_mixtures/**/*.py",
    "records/*.py",
    "models/laneformer/titan/**/*.py",
)
pytestmark = [
    # 3 minutes of one core, beside whatever else runs
    pytest.mark.timeout(2700),
    pytest.mark.proof(
        "configs/debug_phase1.toml", "configs/mtp.toml", "data_mixtures/demo.toml", *PROGRAMS
    ),
]
BASE_STEPS, HEAD_STEPS, SEQ_LEN = 200, 160, 256
# acceptance of the first draft
MIN_ACCEPTANCE = 0.6


def command(*words: object) -> None:
    process = subprocess.run(
        [sys.executable, "-m", *map(str, words)], cwd=ROOT, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]


def job(run: Path, config: str, lock: Path, steps: int, overrides: str = "") -> Path:
    # on one rank; returns the last checkpoint
    words = f"""--job.config_file configs/{config}.toml --job.dump_folder {run} --mixture.lock {lock}
        --training.steps {steps} --validation.freq {steps} --checkpoint.interval {steps}
        --metrics.no-enable_wandb {overrides}""".split()
    run_job(run, words, ranks=1, limit_s=2400)
    return run / f"checkpoint/step-{steps}"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("proof")
    command(
        "data_mixtures.prepare", "data_mixtures/demo.toml", "--out", folder / "data", "--workers", 1
    )
    return job(folder / "base", "debug_phase1", folder / "data/phase1.lock.json", BASE_STEPS)


def test_first_drafts_are_accepted(base):
    folder = base.parents[2]
    shapes = f"""--model.flavor tiny --training.seq_len {SEQ_LEN} --training.local_batch_size 8
        --training.global_batch_size 8 --training.mixed_precision_param float32 --compile.no-enable
        --optimizer.lr 3e-3 --lr_scheduler.warmup_steps 10 --checkpoint.async_mode disabled
        --checkpoint.initial_load_path {base} --validation.windows_per_source 8 --mtp.steps 1"""
    head = job(folder / "head", "mtp", folder / "data/phase1.lock.json", HEAD_STEPS, shapes)
    # on held-out text: the model's own greedy outputs are loops at this size, which any head continues
    last = metrics(head.parents[1])[-1]
    print(f"accepted by place {last['valid_acceptance']}, losses {last['valid_draft_loss']}")
    assert last["valid_acceptance"][0] >= MIN_ACCEPTANCE
