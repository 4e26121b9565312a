"""What fewer bits cost: figures of known logits, and every type on a made-up model and its GGUF file."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from laneformer import LaneformerConfig
from tools.bench import llamacpp
from tools.check import quality
from tools.check.reference import random_weights


def test_figures_of_known_logits():
    even, sure = np.zeros((2, 2), np.float32), np.log(np.array([[3.0, 1.0]] * 2, np.float32))
    same = quality.compare(even, even, [1, 0], text_bytes=2)
    expected = {"kl": 0, "same_best": 1, "bits_per_byte": 1, "more_bits_per_byte": 0}
    assert same == pytest.approx(expected), "two ids of one bit, two bytes"
    other = quality.compare(sure, -sure, [0, 0], text_bytes=2)
    assert other["kl"] == pytest.approx(0.5 * math.log(3))
    assert other["same_best"] == 0.0
    assert other["bits_per_byte"] == pytest.approx(2.0), "each id has a quarter"
    assert other["more_bits_per_byte"] == pytest.approx(2 - math.log2(4 / 3))


def test_every_type_is_measured_and_int8_is_what_it_means(tmp_path, monkeypatch, capsys):
    pytest.importorskip("gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = LaneformerConfig.from_flavor("tiny", num_hidden_layers=3, swa_layers=(), vocab_size=512)
    path = llamacpp.random_gguf(config, tmp_path)
    few = ["--windows", "2", "--window-tokens", "64"]
    with pytest.raises(SystemExit) as ended:
        quality.main([str(path), "--files", str(path), *few])
    printed = capsys.readouterr()
    report = json.loads(printed.out.splitlines()[-1])
    assert (ended.value.code, report["failed"]) == (0, [])
    assert report["passed"].keys() == {"relative error", "refuses: one scale doubled"}
    types = report["types"]
    assert types["bf16, math exact"]["kl"] < types["int8, math exact"]["kl"] < types["int4, math int8"]["kl"]
    assert types["bf16, math exact"]["bits"] == pytest.approx(16, rel=0.02)
    assert 4.5 < types["int4, math int8"]["bits"] < types["int8, math int8"]["bits"] < 9
    assert types[f"{path.stem} in fp32"]["kl"] == pytest.approx(0, abs=1e-15)
    assert types[path.stem]["kl"] == types[path.stem]["kl_of_file"], "the file is the model itself"
    assert "int4, math int8" in printed.err


def test_a_tied_head_is_rounded_too():
    config = LaneformerConfig.from_flavor(
        "tiny", num_hidden_layers=2, swa_layers=(), vocab_size=512, tie_word_embeddings=True
    )
    assert quality.check(config, random_weights(config), list(range(5, 25)))["failed"] == []


def test_what_cannot_be_measured_ends_with_a_message(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        quality.main([str(tmp_path / "no.gguf")])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("quality: ")
