"""Held-out documents that stand in training are counted by their runs of tokens."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from data_mixtures import shards
from tools.check import contained

BOS = 1


def write(folder: Path, train: list[np.ndarray], valid: list[np.ndarray]) -> None:
    folder.mkdir()

    def windows(name: str, documents: list[np.ndarray]) -> dict:
        tokens = np.concatenate([part for each in documents for part in ([BOS], each)]).astype(np.uint16)
        return shards.write_windows(folder / name, tokens, 1)

    facts = dict(zip(shards.TOKENIZER_FACTS, ("t", 1000, 2, BOS, 2), strict=True))
    files = {"shards": [windows("shard-00000.bin", train)], "valid": windows(shards.VALID, valid)}
    shards.write_manifest(folder, {**facts, "seq_len": 1, "windows": files["shards"][0]["windows"], **files})


def test_half_of_the_runs_in_training_of_any_source_is_contained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = np.random.default_rng(1)
    inside, spread, little, alone = (draw.integers(3, 1000, 200) for _ in range(4))
    other = draw.integers(3, 1000, 300)
    train = [np.concatenate([other, inside, other]), spread[:90], little[:80]]
    write(tmp_path / "web", train, [inside, spread, other[:9]])
    write(tmp_path / "book", [other, spread[90:]], [little, alone])
    contained.main(contained.Options(tmp_path))
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert rows["web"] == {"documents": 2, "contained": 2, "share": 1.0}, "9 tokens have no run"
    assert rows["book"] == {"documents": 2, "contained": 0, "share": 0.0}


def test_runs_of_different_tokens_have_different_hashes() -> None:
    tokens = np.random.default_rng(2).integers(0, 7, 500)
    hashes = contained.run_hashes(tokens, 6)
    runs = [tuple(tokens[at : at + 6]) for at in range(495)]
    assert len(set(hashes.tolist())) == len(set(runs)) < len(runs)
    assert not len(contained.run_hashes(tokens[:5], 6))
