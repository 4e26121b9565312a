"""The loader benchmark at toy size: its section shows the figures of the loaders."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

pytest.importorskip("torchtitan")
from tools.bench import loader, loader_baselines
from tools.bench.__main__ import main
from tools.bench.loader_baselines import LOADERS
from tools.bench.loader_process import worst_deviation


@pytest.mark.rotate
def test_ours_and_a_baseline_on_the_same_windows(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(loader_baselines, "FOLDER", tmp_path)
    out = tmp_path / "loader.md"
    only = ("MixtureLoader", "interleave_datasets", "mosaicml-streaming")
    toy = "--windows 1200 --seq-len 64 --rounds 1 --seconds 0.1 --steps 5 --sequences 1000 --resume-at 80 1000000"
    main(["loader", *toy.split(), "--only", *only, "--out", str(out)])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    ours, baseline = report["loaders"]["MixtureLoader"], report["loaders"]["interleave_datasets"]
    assert ours["deviation"][0]["1000"] < 1 < baseline["deviation"][0]["1000"], (
        "drawn sources are off by many"
    )
    assert isinstance(ours["resume_s"][0]["1000000"], float)
    assert "impossible beyond its" in baseline["resume_s"][0]["1000000"]
    text = out.read_text()
    assert f"| MixtureLoader | {ours['tokens_per_s'][0] / 1e6:.1f} |" in text
    assert f"{ours['deviation'][0]['1000']:.2f} at 1,000" in text
    assert "mosaicml-streaming: not installed: " in text
    assert "--no-deps --target" in text


@pytest.mark.rotate
@pytest.mark.parametrize("name", [*loader_baselines.PACKAGES])
def test_a_baseline_reads_the_same_windows(name, tmp_path):
    if line := loader_baselines.install(name):
        pytest.skip(line)
    options = loader.Options(windows=1200, seq_len=64)
    loader.write_data(tmp_path, options)
    commands = {"start": 0, "speed": 0.1, "stalls": 5, "deviation": 1000, "resume": [80, 10**9]}
    figures = loader.figures_of(name, tmp_path, commands)
    assert figures["tokens_per_s"] > 0
    assert figures["memory_bytes"] > 1e7
    assert figures["deviation"]["1000"] < 500
    assert figures["resume_s"]["80"] > 0
    loaded = LOADERS[name](tmp_path)
    text = {}
    for source in loaded.names:
        rows = pq.read_table(tmp_path / f"{source}.parquet")["tokens"].to_pylist()
        text[source] = np.array(rows, "<u2")[:, :-1].tobytes()
    tokens, sources = next(loaded.batches())
    assert tokens.shape[0] == 8
    for row, source in zip(tokens.tolist(), sources.tolist(), strict=True):
        assert np.array(row[:8], "<u2").tobytes() in text[loaded.names[source]]
    again, _ = next(loaded.batches(80))
    batches = loaded.batches()
    for _ in range(11):
        later, _ = next(batches)
    assert torch.equal(again, later), "resuming gives what reading on gives"


def test_the_worst_prefix_counts():
    sources = np.array([0, 0, 1, 1] * 500)
    assert worst_deviation(sources, [0.5, 0.5]) == {"1000": 1.0}
    assert worst_deviation(np.zeros(1000, int), [0.5, 0.5]) == {"1000": 500.0}
