"""Tests of the export's command line and the training progress that it reads."""

from __future__ import annotations

import json
import resource
import runpy
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from data_mixtures.mixture import Mixture
from laneformer.hf.export import Progress, stage_folder
from tests.laneformer.hf.hf_assets import random_model, write_run
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


def test_draft_ids_are_the_most_frequent(data_folder, tmp_path, monkeypatch):
    # 70 is no multiple of the 64 windows that are read at a time
    monkeypatch.setattr("tools.export_hf.COUNTED_WINDOWS", 70)
    lock = data_folder / "phase1.lock.json"
    tokens = Mixture.open(lock).sequences(0, 70)[0]
    counts = np.bincount(tokens.ravel(), minlength=512)
    draft_ids = frequent_ids(tmp_path, lock, 64)
    assert len(set(draft_ids)) == 64
    # any choice among equal counts is right
    assert counts[list(draft_ids)].min() >= np.delete(counts, draft_ids).max()
    with pytest.raises(
        ValueError, match=r"config\.toml does not say what data the run read; give its lock file"
    ):
        frequent_ids(tmp_path, None, 64)
    with pytest.raises(ValueError, match="draft_vocab_size = 520 is more than the 512 ids"):
        frequent_ids(tmp_path, lock, 520)


@pytest.fixture
def checkpoint(tmp_path):
    return write_run(tmp_path / "run", random_model(), step=30)


def call_export(monkeypatch: pytest.MonkeyPatch, checkpoint: Path, out: Path) -> None:
    words = ["--checkpoint", str(checkpoint), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["tools.export_hf", *words])
    runpy.run_module("tools.export_hf", run_name="__main__")


@pytest.mark.parametrize("place", ["", "checkpoint", "checkpoint/step-31"])
def test_a_run_or_a_step_that_is_not_there_lists_the_steps(
    checkpoint, tmp_path, monkeypatch, place
):
    sentence = rf"is no checkpoint; give RUN/checkpoint/step-N; there are {checkpoint}$"
    with pytest.raises(SystemExit, match=sentence):
        call_export(monkeypatch, tmp_path / "run" / place, tmp_path / "hf")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_full_disk_is_one_line_and_leaves_nothing(checkpoint, tmp_path, monkeypatch):
    # a limit on the size of a file acts like a disk without room
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
        with pytest.raises(SystemExit, match=r"^tools\.export_hf: .*/hf: .*File too large[^\n]*$"):
            call_export(monkeypatch, checkpoint, tmp_path / "hf")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_two_exports_do_not_write_one_folder(tmp_path):
    out, part = tmp_path / "hf", tmp_path / "hf.part"
    part.mkdir()
    (part / "of a killed one").touch()
    with stage_folder(out) as folder:
        assert not list(folder.iterdir())
        (folder / "ours").touch()
        with pytest.raises(ValueError, match=r"another process writes .*/hf; wait for it"):
            stage_folder(out).__enter__()
    assert [path.name for path in out.iterdir()] == ["ours"]
