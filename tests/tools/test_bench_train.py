"""The training benchmark at toy size: both models train, and the report holds what was measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from laneformer import LaneformerConfig

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tools.bench_train", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_toy_run(tmp_path: Path) -> None:
    out = tmp_path / "train.md"
    done = run("--flavor", "tiny", "--seq-len", "32", "--local-batch", "2", "--steps", "3", "--warmup", "2", "--rounds",
               "1", "--dtype", "float32", "--no-compile", "--out", str(out))  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    ours, llama = result["models"]["laneformer"], result["models"]["llama"]
    assert ours["parameters"] == LaneformerConfig.from_flavor("tiny").parameter_count()["total"]
    assert llama["parameters"] == ours["parameters"], "the rival has the same parameter count, exactly"
    assert result["ratio"] == pytest.approx(ours["tokens_per_s_per_gpu"] / llama["tokens_per_s_per_gpu"])
    assert ours["step_s_p50"] <= ours["step_s_p90"]
    assert ours["mfu"] is None, "a CPU has no datasheet peak to compare with"
    assert ours["peak_memory_gib"] > 0
    assert f"| laneformer | {ours['parameters']:,} |" in out.read_text()


def test_bad_options_are_refused() -> None:
    done = run("--flavor", "tiny", "--seq-len", "4096")
    assert done.returncode == 2
    assert "exceeds the 512 positions of tiny" in done.stderr
