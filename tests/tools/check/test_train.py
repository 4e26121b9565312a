"""Tests that the CPU form of the training check accepts this machine and refuses what is wrong."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.records.lines import write_lines
from tests.train.runs import ask
from tools.check import train as check

# the least with which a job can be sharded
NPROC = 2


def start_warm(module: list[str], log: Path, env: Mapping[str, str]) -> int:
    # by the fork server, which has torch imported
    places = {"log": str(log), "pid": str(log.with_suffix(".pid"))}
    return ask({"command": [sys.executable, "-m", *module], "environment": dict(env), **places})


@pytest.mark.rotate
def test_a_cpu_is_accepted(monkeypatch, capsys, tmp_path):
    # real jobs: chosen and plain kernels, sharded with replicas, killed and resumed, packed
    monkeypatch.setattr(check, "start", start_warm)
    out = tmp_path / "page.md"
    with pytest.raises(SystemExit) as ended:
        check.main(["--device", "cpu", "--nproc", str(NPROC), "--out", str(out)])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert not ended.value.code, report["gates"]
    text = out.read_text()
    assert text.startswith("# Training on CPU, shrunk shapes, 2 rank(s), torch ")
    assert "all checks hold" in text.splitlines()[0]
    assert "losses of 1 x 2 ranks" in text
    assert "| peak memory, GiB, against the plan | not yet measured | - | - |" in text
    by_name = {row["check"]: row for row in report["gates"]}
    assert by_name["losses of the chosen kernels"]["allowed"] < 0.01, "a bound that means something"
    assert by_name["losses with float8 products"]["allowed"] < 0.05


def rows(*losses: float | None, attempt: int = 1) -> list[dict[str, Any]]:
    return [
        {
            "loss": loss,
            "grad_norm": 1.0,
            "tokens": 1,
            "lr": 1.0,
            "attempt": attempt,
            "valid_loss": None,
        }
        for loss in losses
    ]


def test_losses_outside_of_the_bound_are_refused(tmp_path):
    # four times plain bf16's error; also missing or diverged losses, and replaced kernels
    write_lines(
        tmp_path / "whole/events.jsonl", [{"kind": "kernels_replaced", "reason": "flex is wrong"}]
    )
    plain = {
        "plain-float32": rows(3.0, 2.0),
        "plain-bf16": rows(3.01, 2.0),
        "sharded": rows(3.0, 2.2),
        "float8-emulated": rows(3.02, 2.0),
        "float8": rows(3.11, 1.9),
    }
    jobs: Any = SimpleNamespace(
        rows=lambda name, *flags, **more: plain[name],
        folder=tmp_path,
        options=check.Options(device="cpu", nproc=2),
    )
    gates = check.gate_losses(jobs, rows(3.03, 2.03))
    assert {name: gate[2] for name, gate in gates.items()} == {
        "losses of the chosen kernels": True,
        "losses of 1 x 2 ranks": False,
        "kernels replaced at the start": False,
        "losses fall": True,
        "losses with float8 products": True,
        "kernels replaced with float8 products": True,
    }
    # just beyond the bound that 3.11 keeps
    plain["float8"] = rows(3.13, 2.0)
    assert not check.gate_losses(jobs, rows(3.0, 2.0))["losses with float8 products"][2]
    write_lines(
        tmp_path / "float8/events.jsonl",
        [{"kind": "kernels_replaced", "reason": "float8 is wrong"}],
    )
    gate = check.gate_losses(jobs, rows(3.0, 2.0))["kernels replaced with float8 products"]
    assert gate == ("float8 is wrong", "none", False)
    for wrong in (rows(3.05, 2.0), rows(3.0), rows(3.0, None), rows()):
        assert check.measure_distance(wrong, plain["plain-float32"]) > 0.04
    assert check.measure_distance(rows(None), rows(1.0)) == math.inf


def test_a_resume_that_differs_or_starts_again_is_refused(tmp_path):
    # every loss is another one, so that rows in the wrong place differ
    whole = rows(*map(float, range(check.STEPS)))
    killed, saved = whole[: check.KILLED_AT - 1], check.SAVES_EVERY

    def list_gates(
        after: list[dict[str, Any]], step: int, before: list[dict[str, Any]] = killed
    ) -> list[bool]:
        write_lines(tmp_path / "resumed/attempts.jsonl", [{"step": 0}, {"step": step}])
        answers = iter((before, [*killed, *({**row, "attempt": 2} for row in after)]))
        jobs: Any = SimpleNamespace(rows=lambda *_, **__: next(answers), folder=tmp_path)
        return [gate[2] for gate in check.gate_resume(jobs, whole).values()][:3]

    assert list_gates(whole[saved:], saved) == [True, True, True]
    assert list_gates(whole, 0) == [True, False, False], "nothing was loaded"
    wrong = [*whole[saved:-1], {**whole[-1], "grad_norm": 1.0000001}]
    assert list_gates(wrong, saved) == [True, True, False]
    assert list_gates(whole[saved:], saved, rows(*range(1, check.KILLED_AT))) == [False, True, True]


def test_what_cannot_run_here_is_refused():
    with pytest.raises(ValueError, match="--nproc 3 is not a power of two"):
        check.Options(device="cpu", nproc=3).check()
    with pytest.raises(
        ValueError, match=r"--nproc 1 on 0 GPU\(s\); lower it, or take --device cpu"
    ):
        check.Options().check()


def test_one_layer_of_each_kind():
    # 2B widths; no two layers read the same kinds of streams through the same mask
    config, flavor = check.Options().config, check.LaneformerConfig.from_flavor("2b")
    assert (config.hidden_size, config.num_lanes, config.head_dim) == (
        flavor.hidden_size,
        8,
        flavor.head_dim,
    )
    kinds = {
        (config.window(i), config.equal_streams(i + 1), config.adds_delayed(i, "mlp"))
        for i in range(config.num_hidden_layers)
    }
    assert len(kinds) == config.num_hidden_layers == 4
