"""The export's command line and the training progress that it reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from laneformer.hf.export import Progress
from tests.laneformer.hf.hf_assets import FLOAT32_TOLERANCE, random_model, write_run
from tools.export_hf import training_progress

REPOSITORY = Path(__file__).parents[2]


def test_progress_survives_a_cut_line(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint" / "step-30"
    checkpoint.mkdir(parents=True)
    assert training_progress(checkpoint) == Progress(step=30)
    row = {"step": 30, "phase": "phase2", "tokens_total": 5, "loss": 4.25}
    (tmp_path / "metrics.jsonl").write_text(
        json.dumps({**row, "loss": 9.0}) + "\n" + json.dumps(row) + '\n{"step": 3'
    )
    assert training_progress(checkpoint) == Progress(step=30, phase="phase2", tokens_total=5, loss=4.25)
    assert training_progress(tmp_path) == Progress()


def test_command_line(tmp_path: Path) -> None:
    out, checkpoint = tmp_path / "hf", write_run(tmp_path / "run", random_model())
    command = [sys.executable, "-m", "tools.export_hf", "--checkpoint", checkpoint, "--out", out]
    paths = {"PYTHONPATH": str(REPOSITORY / "models"), "HF_HOME": str(tmp_path / "hf_home")}
    done = subprocess.run(
        list(map(str, command)), cwd=REPOSITORY, env={**os.environ, **paths}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["dtype"] == "bfloat16"
    assert report["hf_max_logit_diff"] <= FLOAT32_TOLERANCE
    assert "phase2" in (out / "README.md").read_text()


def test_what_cannot_be_exported_is_one_line(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tools.export_hf",
        "--checkpoint",
        str(tmp_path / "step-1"),
        "--out",
        "hf",
    ]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("tools.export_hf: ")
    assert "Traceback" not in done.stderr
