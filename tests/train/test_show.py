"""Tests of `show` of a run folder: what was read, with skips, phases, refused batches."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import tyro
from rich.console import Console

pytest.importorskip("torchtitan")
from data_mixtures import show
from records.skips import SkipList, append_skips
from tests.records.lines import write_lines
from tests.train.supervised import GLOBAL_BATCH
from train.data import LoaderState, MixtureLoader


def show_batches(capsys: pytest.CaptureFixture[str], *words: Any) -> list[dict[str, Any]]:
    capsys.readouterr()
    show.run(tyro.cli(show.Question, args=[*(str(word) for word in words), "--json"]), Console())
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_run_is_shown_as_it_read_with_skips_and_phases(data_folder, tmp_path, capsys):
    # Attempts as the trainer records them; the batches are those of its loader.
    lock, skips = data_folder / "phase2.lock.json", [(5, 9)]
    offsets = {"web": 40, "code": 170}
    loader = MixtureLoader(lock, 0, 1, GLOBAL_BATCH, 1, SkipList(skips))
    loader.restore(LoaderState(offsets=offsets))
    batches = [
        torch.cat([inputs["input"], labels[:, -1:]], 1).tolist()
        for (inputs, labels), _ in zip(loader, range(9), strict=False)
    ]
    data = {"lock": str(lock), "position": 0, "global_batch_size": GLOBAL_BATCH, "offsets": offsets}
    attempts = [
        {"attempt": 1, "step": 0, "data": data, "skip_sequences": []},
        {"attempt": 2, "step": 3, "data": {**data, "position": 12}, "skip_sequences": []},
        {
            "attempt": 3,
            "step": 6,
            "data": {**data, "position": 24, "global_batch_size": 2},
            "skip_sequences": [],
        },
    ]
    write_lines(tmp_path / "attempts.jsonl", attempts)
    append_skips(tmp_path, skips, "step 2: the loss is nan")
    for step in range(1, 7):
        assert [
            window["tokens"] for window in show_batches(capsys, tmp_path, "--step", step)
        ] == batches[step - 1]
    assert [window["tokens"] for window in show_batches(capsys, tmp_path, "--step", 8)] == batches[
        6
    ][2:]
    with pytest.raises(ValueError, match="no refused batch at step 3"):
        show_batches(capsys, tmp_path, "--bad-step", 3)
