"""tools.check.engine at tiny size: it passes the engine as it is, on several kinds of model, and
fails a wrong one.

The tolerances are the tool's own, computed from PyTorch's float32 (or bf16) error on the same weights.
"""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from rich.console import Console

from laneformer import LaneformerConfig
from tests.laneformer.engine.assets import random_model, small_config, write_folder
from tools.check import engine as check_engine
from tools.check.engine import check
from tools.check.gates import Options
from tools.check.reference import random_weights

SILENT = Console(quiet=True)
# the demo's shape with a window shorter than the prompts
DEMO_LIKE = LaneformerConfig.from_flavor(
    "tiny", sliding_window=16, vocab_size=512, max_position_embeddings=96
)
MODELS = {
    "odd sizes, bf16": (small_config(), torch.bfloat16),
    "as the demo, fp32": (DEMO_LIKE, torch.float32),
    "tensor parallel, fp16": (small_config(broadcast_delay=0), torch.float16),
    "one lane": (small_config(num_lanes=1), torch.bfloat16),
}


def options(**overrides: object) -> Options:
    return Options("test", **{"prompts": 4, "new_tokens": 8, "runs": 5, "threads": (1, 2), **overrides})


@pytest.mark.parametrize(("config", "dtype"), MODELS.values(), ids=MODELS.keys())
def test_the_engine_passes(config, dtype):
    report = check(config, random_weights(config, dtype=dtype), options(), SILENT)
    assert report["ok"], report["failed"]
    assert report["greedy"]["same"] == 4
    faults = {"two lanes of one matrix swapped", "one module's remote partials dropped", "delay one more"}
    expected = (
        faults if config.broadcast_delay and config.num_lanes > 1 else {"two lanes of one matrix swapped"}
    )
    assert set(report["faults"]) == (expected if config.num_lanes > 1 else set())
    windows = {config.window(i) for i in range(config.num_hidden_layers)} - {None}
    shown = report["relative_error"]
    assert all({window - 1, window, window + 1} <= shown.keys() for window in windows)


def test_a_hundred_runs_on_every_number_of_threads_are_the_same():
    config = small_config()
    report = check(config, random_weights(config), options(runs=100, threads=(1, 2, 3, 4)), SILENT)
    assert (report["differing_runs"], report["ok"]) == (0, True)


def test_rounded_activations_are_held_to_bf16_and_no_closer():
    config = small_config()
    report = check(config, random_weights(config), options(math="bf16"), SILENT)
    assert report["ok"], report["failed"]
    worst = report["relative_error_max"]
    assert 10 * worst["hf_fp32"] < worst["engine"] < worst["hf_bf16"]


WRONG = {
    "delay one less": {"broadcast_delay": 1},
    "window one longer": {"sliding_window": 8},
    "early partials added twice": {"rebroadcast_early": True},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_engine_fails(monkeypatch, wrong):
    config, right = small_config(), check_engine.engine_of

    def wrong_engine(config, weights, options, threads=None):
        return right(dataclasses.replace(config, **wrong), weights, options, threads)

    monkeypatch.setattr(check_engine, "engine_of", wrong_engine)
    report = check(config, random_weights(config), options(), SILENT)
    assert not report["ok"]
    assert {"relative error", "KL", "greedy tokens"} <= set(report["failed"])
    assert any("continuations that part" in title for title in report["tables"])


def test_one_bit_in_one_run_is_seen(monkeypatch):
    config, right = small_config(), check_engine.engine_of

    class Flipping:
        def __init__(self, *arguments):
            self.engine, self.calls = right(*arguments), 0

        def __enter__(self):
            return self

        def __exit__(self, *exception):
            self.engine.close()

        def __getattr__(self, name):
            return getattr(self.engine, name)

        def logits(self, ids):
            self.calls += 1
            logits = self.engine.logits(ids)
            if self.calls == 4:
                logits.view(np.uint32)[-1, -1] ^= 1
            return logits

    monkeypatch.setattr(check_engine, "engine_of", Flipping)
    report = check(config, random_weights(config), options(), SILENT)
    assert report["differing_runs"] == 2  # one for each number of threads
    assert report["failed"] == ["repeated runs"]


def test_a_folder_from_the_command_line(tmp_path, capsys):
    folder = write_folder(tmp_path, random_model(small_config(), dtype="bf16"))
    with pytest.raises(SystemExit) as ended:
        check_engine.main(
            [str(folder), "--prompts", "2", "--new-tokens", "4", "--runs", "2", "--threads", "2", "--json"]
        )
    printed = capsys.readouterr()
    report = json.loads(printed.out.splitlines()[-1])
    assert (ended.value.code, report["ok"], report["threads"], printed.err) == (0, True, [2], "")


def test_a_name_that_is_nothing_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        check_engine.main(["300n"])
    assert ended.value.code == 2
    assert "neither a folder with config.json nor a flavor" in capsys.readouterr().err
