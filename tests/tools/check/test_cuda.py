"""Tests of the GPU engine's verdict without a GPU: a sound decoder passes, faulty ones do not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from laneformer import LaneformerConfig
from laneformer.engine.cuda.structures import Column
from tests.laneformer.engine.assets import small_config
from tools.check import cuda
from tools.check.cuda import check, compare, greedy_prompts, reference
from tools.check.reference import plain_model, random_weights, weights_of

CONFIG = small_config(num_lanes=2, broadcast_delay=1)


class PlainDecoder:
    """PassRunner's interface over model.py in float64, of one sequence."""

    devices, columns, extra_passes, unread, version = (torch.device("cpu"),), 3, 15, 64, "passes"

    def __init__(self, config: LaneformerConfig, weights: dict[str, torch.Tensor], warps: int = 16):
        self.config, self.model, self.noise = config, plain_model(config, weights), 0.0
        self.geometry: Any = SimpleNamespace(warps=warps)
        self.scores_by_text = dict[tuple[int, ...], torch.Tensor]()
        self.ids = list[int]()

    def run(
        self, columns: list[Column], extra_passes: int = 0, logits: torch.Tensor | None = None
    ) -> list[list[int]]:
        position = columns[0].position
        self.ids[position:] = [column.token for column in columns]
        scores = self.scores(tuple(self.ids))[position:]
        if logits is not None:
            logits.copy_(scores + self.noise * torch.randn(scores.shape))
        rows = [scores.argmax(1).tolist()]
        for _ in range(extra_passes):
            self.ids.append(rows[-1][-1])
            rows.append([int(self.scores(tuple(self.ids))[-1].argmax())])
        return rows

    def read(
        self, ids: list[int], cache: int, position: int, first_row: int
    ) -> Iterator[torch.Tensor]:
        self.ids = list(ids)
        yield from ()

    @torch.no_grad()
    def scores(self, text: tuple[int, ...]) -> torch.Tensor:
        if text not in self.scores_by_text:
            self.scores_by_text[text] = self.model(torch.tensor([text]))[0].float()
        return self.scores_by_text[text]


class Unsteady(PlainDecoder):
    """Right within every tolerance, but never twice the same."""

    def __init__(self, config: LaneformerConfig, weights: dict[str, torch.Tensor]):
        super().__init__(config, weights)
        self.noise = 1e-6


class Hanging(PlainDecoder):
    def run(self, *_: Any, **__: Any) -> list[list[int]]:
        raise RuntimeError("waited in vain")


def test_the_verdict_holds_for_a_sound_engine_and_for_no_other():
    weights = random_weights(CONFIG)
    truth = reference(CONFIG, weights, 12, prompts=greedy_prompts(CONFIG, 2))
    sound = PlainDecoder(CONFIG, weights)
    passed = dict(check({"passes": lambda: sound, "graph": lambda: sound}, truth, 2, 3))
    assert len(passed) == 12
    assert False not in passed.values()
    # another number of warps adds up in another order: the versions need not have the same bits
    fewer = PlainDecoder(CONFIG, weights, warps=8)
    passed = dict(check({"passes": lambda: sound, "graph": lambda: fewer}, truth, 1, 1))
    assert False not in passed.values()
    assert not any(name.startswith("both") for name in passed), "sums of other warps are other sums"

    # one that hangs does not keep the other from being judged
    broken = {
        "passes": lambda: Hanging(CONFIG, weights),
        "graph": lambda: Unsteady(CONFIG, weights),
    }
    passed = dict(check(broken, truth, 1, 3))
    failed = {name for name, value in passed.items() if value is False}
    assert failed == {"passes: runs", "graph: 3 equal runs"}
    assert passed["passes ended"] == "waited in vain"
    assert not any(name.startswith("both") for name in passed)


@pytest.mark.parametrize("deaf", [False, True])
def test_planted_faults_are_refused_and_a_deaf_gate_is_noticed(monkeypatch, deaf):
    # deaf: the first model again, whatever is asked for
    weights = random_weights(CONFIG)

    def make(config: LaneformerConfig, tensors: Any, version: str = "") -> PlainDecoder:
        return PlainDecoder(CONFIG, weights) if deaf else PlainDecoder(config, weights_of(tensors))

    for name, value in {"DEVICE": "cpu", "PROMPTS": 1, "RUNS": 2, "make_decoder": make}.items():
        monkeypatch.setattr(cuda, name, value)
    monkeypatch.setattr(LaneformerConfig, "from_flavor", lambda flavor: CONFIG)
    figures = dict(cuda.check_flavor("tiny"))
    failed = [name for name, value in figures.items() if value is False]
    assert failed == ["planted faults are refused"] * deaf
    assert len(figures) == 14


def test_logits_that_are_no_numbers_are_refused():
    truth = reference(CONFIG, random_weights(CONFIG), 4)
    wrong = truth.logits.copy()
    # a comparison with NaN is False: a gate that asks for "greater" would pass it
    wrong[2, 5] = np.nan
    assert compare(truth.logits, truth)["holds"]
    assert not compare(wrong, truth)["holds"]


@pytest.mark.parametrize(
    ("no_gpu", "figures", "status"),
    [
        ("there is no NVIDIA driver", None, 2),
        ("", {"equal runs": True, "error": 0.0}, 0),
        ("", {"equal runs": False}, 1),
    ],
)
def test_the_command_fails_without_a_gpu_and_where_one_check_does(
    monkeypatch, capsys, no_gpu, figures, status
):
    monkeypatch.setattr(cuda, "why_no_cuda", lambda: no_gpu)
    monkeypatch.setattr(cuda, "check_flavor", lambda flavor: iter(figures.items()))
    monkeypatch.setattr("sys.argv", ["cuda", "tiny"])
    with pytest.raises(SystemExit) as ended:
        cuda.main()
    assert ended.value.code == status
    printed = capsys.readouterr()
    if no_gpu:
        assert f"{no_gpu}. On a CPU, python -m tools.check engine" in printed.err
    else:
        assert json.loads(printed.out) == figures
