"""The loader benchmark at toy size: its section shows the figures of the loaders."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("torchtitan")
from tools.bench import loader
from tools.bench.loader_baselines import worst_deviation


def test_ours_and_a_baseline_on_the_same_windows(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(loader, "MOSAIC_FOLDER", tmp_path / "none")
    out = tmp_path / "loader.md"
    only = ("MixtureLoader", "interleave_datasets", "mosaicml-streaming")
    toy = "--windows 1200 --seq-len 64 --rounds 1 --seconds 0.1 --steps 5 --sequences 1000 --resume-at 80 1000000"
    loader.main([*toy.split(), "--only", *only, "--out", str(out)])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    ours, baseline = report["loaders"]["MixtureLoader"], report["loaders"]["interleave_datasets"]
    assert ours["deviation"][0]["1000"] < 1 < baseline["deviation"][0]["1000"], "drawn sources are off by many"
    assert isinstance(ours["resume_s"][0]["1000000"], float)
    assert "impossible beyond its" in baseline["resume_s"][0]["1000000"]
    text = out.read_text()
    assert f"| MixtureLoader | {ours['tokens_per_s'][0] / 1e6:.1f} |" in text
    assert f"{ours['deviation'][0]['1000']:.2f} at 1,000" in text
    assert "mosaicml-streaming: not installed: " in text
    assert "--no-deps --target" in text


def test_the_worst_prefix_counts():
    sources = np.array([0, 0, 1, 1] * 500)
    assert worst_deviation(sources, [0.5, 0.5]) == {"1000": 1.0}
    assert worst_deviation(np.zeros(1000, int), [0.5, 0.5]) == {"1000": 500.0}
