"""The export's command line and the training progress that it reads."""

from __future__ import annotations

import json
import runpy
import sys

import numpy as np
import pytest

from data_mixtures.mixture import Mixture
from laneformer.hf.export import Progress
from tools.export_hf import frequent_ids, training_progress


def test_progress_survives_a_cut_line(tmp_path):
    checkpoint = tmp_path / "checkpoint" / "step-30"
    checkpoint.mkdir(parents=True)
    assert training_progress(checkpoint) == Progress(step=30)
    row = {"step": 30, "phase": "phase2", "tokens_total": 5, "loss": 4.25}
    (tmp_path / "metrics.jsonl").write_text(
        json.dumps({**row, "loss": 9.0}) + "\n" + json.dumps(row) + '\n{"step": 3'
    )
    assert training_progress(checkpoint) == Progress(
        step=30, phase="phase2", tokens_total=5, loss=4.25
    )
    assert training_progress(tmp_path) == Progress()


def test_draft_ids_are_the_most_frequent(prepared_data, tmp_path, monkeypatch):
    """Of the first windows of the mixture; what else the command may be asked is refused."""
    monkeypatch.setattr(
        "tools.export_hf.COUNTED_WINDOWS", 70
    )  # no multiple of what is read at a time
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


def test_what_cannot_be_exported_is_one_line(tmp_path, monkeypatch):
    arguments = ["--checkpoint", str(tmp_path / "step-1"), "--out", str(tmp_path / "hf")]
    monkeypatch.setattr(sys, "argv", ["tools.export_hf", *arguments])
    with pytest.raises(SystemExit, match=r"^tools\.export_hf: .*/step-1 is no folder; [^\n]+$"):
        runpy.run_module("tools.export_hf", run_name="__main__")
