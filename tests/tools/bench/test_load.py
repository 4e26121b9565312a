"""The start benchmark on a tiny folder: its ratio is that of its own figures, and its section says them."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import save_file

from laneformer import Laneformer, LaneformerConfig
from tools.bench import load


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    config = LaneformerConfig.from_flavor("tiny")
    model = Laneformer(config)
    model.init_weights()
    state = model.state_dict()
    named = {n if n == "lm_head.weight" else f"model.{n}": p.contiguous() for n, p in state.items()}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "laneformer", **config.to_dict()}))
    save_file(named, tmp_path / "model.safetensors")
    return tmp_path


def test_a_start_is_compared_with_a_read_of_the_same_file(folder, tmp_path, capsys):
    out = tmp_path / "load.md"
    load.main([str(folder), "--rounds", "3", "--out", str(out)])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["file_bytes"] == next((folder / ".packed").glob("*.bin")).stat().st_size
    ratios = [(r["load_s"] + r["first_token_s"]) / r["read_s"] for r in report["rounds"]]
    assert report["start_over_read"] == sorted(ratios)[1]
    assert report["start_over_read_worst"] == max(ratios)
    assert f"{report['start_over_read']:.2f} (worst {max(ratios):.2f})" in out.read_text()


def test_without_a_packed_file_it_says_so(folder, monkeypatch, capsys):
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 0}))
    with pytest.raises(SystemExit) as stopped:
        load.main([str(folder)])
    assert stopped.value.code == 2
    assert f"load: {folder} keeps no packed weights" in capsys.readouterr().err
