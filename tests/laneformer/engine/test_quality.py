"""Tests that tools.check.engine at tiny size passes the engine, also beside Transformers, and fails wrong ones."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from rich.console import Console

from tests.laneformer.engine.assets import random_model, small_config, write_folder
from tools.check import engine as check_engine
from tools.check.engine import Options, check
from tools.check.reference import random_weights

SILENT = Console(quiet=True)
CONFIG = small_config()


def options(**overrides) -> Options:
    return Options(
        "test", **{"prompts": 4, "new_tokens": 8, "runs": 5, "threads": (1, 2), **overrides}
    )


# The tool computes its tolerances from PyTorch's float32 (or bf16) error on the same weights.
@pytest.mark.parametrize(
    ("config", "dtype", "faults"),
    [
        (CONFIG, torch.bfloat16, 3),
        (small_config(broadcast_delay=0), torch.float16, 1),  # no delay that could be wrong
        (small_config(num_lanes=1), torch.float32, 0),
    ],
)
def test_the_engine_passes(config, dtype, faults):
    report = check(config, random_weights(config, dtype=dtype), options(), SILENT)
    assert report["ok"], report["failed"]
    assert report["greedy"]["same"] == 4
    planted = [
        "two lanes of one matrix swapped",
        "one module's remote partials dropped",
        "delay one more",
    ]
    assert set(report["faults"]) == set(planted[:faults])
    window = config.sliding_window
    # depths around the window's edge, where a wrong window shows first
    assert {window - 1, window, window + 1} <= {row["depth"] for row in report["relative_error"]}


def test_rounded_activations_are_held_to_bf16_and_no_closer():
    report = check(CONFIG, random_weights(CONFIG), options(math="bf16"), SILENT)
    assert report["ok"], report["failed"]
    worst = report["relative_error_max"]
    assert 10 * worst["hf_fp32"] < worst["engine"] < worst["hf_bf16"]


def test_a_wrong_engine_fails(monkeypatch):
    right = check_engine.engine_of

    def make_wrong(config, *arguments):
        # a window longer by one
        return right(dataclasses.replace(config, sliding_window=8), *arguments)

    monkeypatch.setattr(check_engine, "engine_of", make_wrong)
    report = check(CONFIG, random_weights(CONFIG), options(), SILENT)
    assert not report["ok"]
    assert {"relative error", "KL", "greedy tokens"} <= set(report["failed"])
    assert any("continuations that part" in title for title in report["tables"])


def test_one_bit_in_one_run_is_seen(monkeypatch):
    right = check_engine.engine_of

    def make_flipping(*arguments):
        engine, calls = right(*arguments), []
        logits_of = engine.logits

        def flip(ids):
            calls.append(logits := logits_of(ids))
            # one bit of the last logit in the fourth run
            if len(calls) == 4:
                logits.view(np.uint32)[-1, -1] ^= 1
            return logits

        engine.logits = flip
        return engine

    monkeypatch.setattr(check_engine, "engine_of", make_flipping)
    report = check(CONFIG, random_weights(CONFIG), options(), SILENT)
    assert report["failed"] == ["repeated runs"]
    (figure,) = (row["figure"] for row in report["gates"] if row["check"] == "repeated runs")
    assert figure == 2  # one for each number of threads


def test_a_folder_from_the_command_line(tmp_path, capsys):
    folder = write_folder(tmp_path, random_model(CONFIG, dtype="bf16"))
    few = ["--prompts", "2", "--new-tokens", "4", "--runs", "2", "--threads", "2"]
    with pytest.raises(SystemExit) as stop:
        check_engine.main([str(folder), *few, "--json"])
    printed = capsys.readouterr()
    report = json.loads(printed.out.splitlines()[-1])
    assert (stop.value.code, report["ok"], printed.err) == (0, True, "")
    with pytest.raises(SystemExit) as stop:
        check_engine.main(["300n"])
    assert stop.value.code == 2
    assert "neither a folder with config.json nor a flavor" in capsys.readouterr().err
