"""Tests of averaged checkpoints: the float64 mean, whole or not at all, and refusals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from laneformer.hf.export import load_weights
from records.attempts import steps_before
from records.checkpoints import check_complete, check_contents
from records.run import read_run
from tests.laneformer.hf.hf_assets import random_model, small_config, write_run
from tests.records.lines import write_lines
from tools.average import average

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
STEPS = (10, 20, 30)


@pytest.fixture(scope="module")
def run_of_three(tmp_path_factory):
    # with optimizer state beside the weights
    run = tmp_path_factory.mktemp("runs") / "trained"
    for seed, step in enumerate(STEPS):
        one = run.with_name(f"one-{step}")
        write_run(one, random_model(seed), step)
        shutil.copytree(one, run, dirs_exist_ok=True)
    rows = [
        {
            "step": s,
            "phase": "phase1",
            "attempt": 1,
            "tokens": s * 64,
            "tokens_total": 100 + s * 64,
            "loss": 3.0,
            "time": 1.0,
        }
        for s in STEPS
    ]
    write_lines(run / "metrics.jsonl", rows)
    (run / "lineage.json").write_text(
        '{"parent": "/x/runs/before/checkpoint/step-7", "tokens_before": 100}'
    )
    (run / "config.toml").write_text(
        '[phase]\nname = "phase1"\n[training]\nsteps = 40\n[evals]\nevery_steps = 7\n'
    )
    return run


def checkpoints(run: Path, steps: tuple[int, ...] = STEPS) -> tuple[Path, ...]:
    return tuple(run / f"checkpoint/step-{step}" for step in steps)


def mean(run: Path, weights: tuple[float, ...]) -> dict[str, torch.Tensor]:
    states = [load_weights(path, small_config()) for path in checkpoints(run)]
    total = {
        name: sum(w * s[name].double() for w, s in zip(weights, states, strict=True))
        for name in states[0]
    }
    return {name: (value / sum(weights)).float() for name, value in total.items()}


@pytest.mark.parametrize("weights", [(), (1.0, 2.0, 0.5)])
def test_it_is_the_mean_in_float64(run_of_three, tmp_path, weights):
    record = average(checkpoints(run_of_three), tmp_path / "mean", weights=weights)
    assert record["checkpoint"] == str(tmp_path / "mean/checkpoint/step-30")
    averaged = load_weights(tmp_path / "mean/checkpoint/step-30", small_config())
    expected = mean(run_of_three, weights or (1.0, 1.0, 1.0))
    assert all(torch.equal(averaged[name], expected[name]) for name in expected)
    assert averaged.keys() == expected.keys()
    states = [load_weights(path, small_config()) for path in checkpoints(run_of_three)]
    # a mean in float32 would pass a comparison with a tolerance
    in_float32 = {
        name: (states[0][name] + states[1][name] + states[2][name]) / 3 for name in expected
    }
    assert any(not torch.equal(averaged[name], in_float32[name]) for name in expected)


def test_the_run_folder_says_where_it_is_from(run_of_three, tmp_path):
    average((run_of_three,), tmp_path / "mean", last=2)
    lineage = json.loads((tmp_path / "mean/lineage.json").read_text())
    assert lineage["averaged"] == {
        str(run_of_three / f"checkpoint/step-{step}"): 1.0 for step in (30, 20)
    }
    assert (lineage["tokens_before"], steps_before(lineage)) == (100, 7), "where its own run begins"
    assert (tmp_path / "mean/model.json").read_text() == (run_of_three / "model.json").read_text()
    assert (tmp_path / "mean/tokenizer.model").read_bytes() == (
        run_of_three / "tokenizer.model"
    ).read_bytes()
    run = read_run(tmp_path / "mean")
    assert run.configs["phase1"]["training"]["steps"] == 30, (
        "the last step, which evals.watch always takes"
    )
    assert [(row["step"], row["tokens_total"]) for row in run.rows] == [(30, 100 + 30 * 64)]
    assert run.warnings == []
    index = (
        dcp.FileSystemReader(tmp_path / "mean/checkpoint/step-30")
        .read_metadata()
        .state_dict_metadata
    )
    assert set(index) == set(small_config().tensor_shapes()), "weights alone"


def test_what_is_refused(run_of_three, tmp_path):
    out, one = tmp_path / "out", checkpoints(run_of_three)[0]
    other = write_run(tmp_path / "other", random_model(5), 30)
    theta = write_run(tmp_path / "theta", random_model(6, rope_theta=5e5), 30)
    narrow = write_run(tmp_path / "narrow", random_model(7, intermediate_size=64), 30)
    damaged = tmp_path / "damaged"
    shutil.copytree(run_of_three, damaged)
    file = next((damaged / "checkpoint/step-20").glob("*.distcp"))
    os.truncate(file, file.stat().st_size // 2)
    cases: list[tuple[str, tuple[Path, ...], dict[str, Any]]] = [
        ("two or more different", (one, one), {}),
        ("one run folder, not 2", (one, one), {"last": 2}),
        ("--last 4: .* holds 3 complete", (run_of_three,), {"last": 4}),
        ("--last 1: it should be greater than or equal to 2", (run_of_three,), {"last": 1}),
        ("--last 3: .* holds 2 complete", (damaged,), {"last": 3}),
        ("give 2, one a checkpoint", (one, other), {"weights": (1.0,)}),
        ("--weights -1.0: it should be greater than 0", (one, other), {"weights": (1.0, -1.0)}),
        ("are two runs; --force", (one, other), {}),
        ("models that differ in rope_theta; --force", (one, theta), {}),
        ("is .*, but .*model.json says", (one, narrow), {"force": True}),
        ("holds .* bytes, but .metadata states", checkpoints(damaged), {}),
    ]
    for message, paths, options in cases:
        with pytest.raises(ValueError, match=message):
            average(paths, out, **options)
    assert not out.exists()
    average((one, other), out, force=True)
    check_complete(out / "checkpoint/step-30")
    assert "checksums.json" in {path.name for path in (out / "checkpoint/step-30").iterdir()}
    check_contents(out / "checkpoint/step-30")


def test_a_run_is_whole_behind_links_and_what_it_lacks_is_named(run_of_three, tmp_path, capsys):
    run = shutil.copytree(run_of_three, tmp_path / "run")
    average((run,), tmp_path / "plain", last=2)
    scratch = (run / "checkpoint").rename(tmp_path / "scratch")
    (run / "checkpoint").symlink_to(scratch)
    (scratch / "step-20").rename(tmp_path / "moved")
    (scratch / "step-20").symlink_to(tmp_path / "moved")
    average((run,), tmp_path / "linked", last=2)
    assert capsys.readouterr().err == ""
    for path in (tmp_path / "plain").iterdir():
        # lineage.json names the run
        if path.is_file() and path.name != "lineage.json":
            assert (tmp_path / "linked" / path.name).read_bytes() == path.read_bytes()
    lineages = [
        json.loads((tmp_path / name / "lineage.json").read_text()) for name in ("plain", "linked")
    ]
    assert lineages[0] == lineages[1]
    for name in ("lineage.json", "config.toml", "metrics.jsonl"):
        (run / name).unlink()
        average((run,), tmp_path / f"without-{name}", last=2)
        assert f"{run} has no {name}" in capsys.readouterr().err
    (run / "tokenizer.model").unlink()
    with pytest.raises(ValueError, match=r"run has no tokenizer\.model or tokenizer\.json"):
        average((run,), tmp_path / "out", last=2)
    assert not (tmp_path / "out").exists()


@pytest.mark.job
def test_interrupted_it_leaves_nothing(run_of_three, tmp_path):
    # waits after the first tensor, in the middle of the write
    program = (
        "import runpy, signal, sys; import torch.distributed.checkpoint as dcp; load = dcp.load;"
        "dcp.load = lambda *a, **k: (load(*a, **k), print('loaded', flush=True), signal.pause());"
        "sys.argv[0] = 'average'; runpy.run_module('tools.average', run_name='__main__')"
    )
    words = (str(run_of_three), "--last", "3", "--out", str(tmp_path / "mean"))
    command = [sys.executable, "-c", program, *words]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "loaded\n"
    assert [path.name for path in tmp_path.iterdir()] == ["mean.part"]
    process.send_signal(signal.SIGTERM)
    errors = process.communicate(timeout=30)[1]
    assert process.returncode == 1
    assert errors.splitlines()[-1].endswith("/mean: KeyboardInterrupt; nothing was written")
    assert list(tmp_path.iterdir()) == []
