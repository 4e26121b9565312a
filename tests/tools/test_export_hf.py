"""The export's command line and the training progress that it reads."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data_mixtures.mixture import Mixture
from laneformer.hf.export import Progress
from tests.laneformer.hf.hf_assets import FLOAT32_TOLERANCE, random_model, write_run
from tools.export_hf import frequent_ids, training_progress

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


@pytest.mark.job
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


def test_draft_ids_are_the_most_frequent(
    prepared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first windows of the mixture; what else the command may be asked is refused."""
    monkeypatch.setattr("tools.export_hf.COUNTED_WINDOWS", 70)  # no multiple of what is read at a time
    lock = prepared_data / "phase1.lock.json"
    tokens = Mixture.open(lock).sequences(0, 70)[0]
    counts = np.bincount(tokens.ravel(), minlength=512)
    found = frequent_ids(tmp_path, lock, 64)
    assert len(set(found)) == 64
    assert counts[list(found)].min() >= np.delete(counts, found).max()
    with pytest.raises(
        ValueError, match=r"config\.toml does not say what data the run read; give its lock file"
    ):
        frequent_ids(tmp_path, None, 64)
    with pytest.raises(ValueError, match="draft_vocab_size = 520 is more than the 512 ids"):
        frequent_ids(tmp_path, lock, 520)


def test_what_cannot_be_exported_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--checkpoint", str(tmp_path / "step-1"), "--out", str(tmp_path / "hf")]
    monkeypatch.setattr(sys, "argv", ["tools.export_hf", *arguments])
    with pytest.raises(SystemExit, match=r"^tools\.export_hf: [^\n]+$"):
        runpy.run_module("tools.export_hf", run_name="__main__")
