"""The quality benchmark: its figures on known logits, and every type of ours on a made-up GGUF file."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from laneformer import LaneformerConfig
from tools.bench import llamacpp, quality
from tools.bench.__main__ import main


def test_figures_of_known_logits():
    even, sure = np.zeros((3, 2), np.float32), np.log(np.array([[3.0, 1.0]] * 3, np.float32))
    same = quality.compared([even], [even], [[0, 1, 0]], text_bytes=2)
    assert same == {"kl": 0.0, "same_best": 1.0, "bits_per_byte": pytest.approx(1.0)}, (
        "two ids of one bit, two bytes"
    )
    other = quality.compared([sure], [-sure], [[0, 0, 0]], text_bytes=2)
    assert other["kl"] == pytest.approx(0.5 * math.log(3))
    assert other["same_best"] == 0.0
    assert other["bits_per_byte"] == pytest.approx(2.0)  # each id has a quarter


def test_every_type_of_ours(tmp_path, monkeypatch, capsys):
    pytest.importorskip("gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = LaneformerConfig.from_flavor("tiny", num_hidden_layers=3, swa_layers=(), vocab_size=512)
    path = llamacpp.random_gguf(config, "bf16", tmp_path)
    out = tmp_path / "quality.md"
    arguments = [
        "--no-llamacpp",
        "--windows",
        "2",
        "--window-tokens",
        "64",
        "--threads",
        "1",
        "--out",
        str(out),
    ]
    main(["quality", str(path), *arguments])
    types = json.loads(capsys.readouterr().out.splitlines()[-1])["types"]
    assert types["fp32"]["kl"] == 0.0
    assert types["bf16, math exact"]["kl"] < types["int8, math exact"]["kl"] < types["int4, math int8"]["kl"]
    assert types["bf16, math exact"]["bits"] == pytest.approx(16, rel=0.02)
    assert 4.5 < types["int4, math int8"]["bits"] < types["int8, math int8"]["bits"] < 9
    assert "| int4, math int8 |" in out.read_text()


def test_bad_input(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["quality", str(tmp_path / "no.gguf")])
    assert "is not a file; give a GGUF file" in capsys.readouterr().err
