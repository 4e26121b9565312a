"""The training benchmark at toy size: both models train, and the report holds what was measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from laneformer import LaneformerConfig

ROOT = Path(__file__).resolve().parents[3]


# both commands in one process, since TorchTitan is slow to import; not in this one, since it
# keeps global state
RUN = """
import sys
from tools.bench.__main__ import main
try: main(["train", "--flavor", "tiny", "--seq-len", "4096"])
except SystemExit as end: assert end.code == 2
else: raise AssertionError("a sequence longer than the model's positions has to be refused")
main(["train", *sys.argv[1:]])
"""


@pytest.mark.rotate
def test_toy_run(tmp_path: Path) -> None:
    out = tmp_path / "train.md"
    flags = ["--flavor", "tiny", "--seq-len", "32", "--local-batch", "2", "--steps", "3", "--warmup", "2", "--rounds",
             "1", "--dtype", "float32", "--no-compile", "--out", str(out)]  # fmt: skip
    command = [sys.executable, "-c", RUN, *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "exceeds the 512 positions of tiny" in done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    ours, llama = result["models"]["laneformer"], result["models"]["llama"]
    assert ours["parameters"] == LaneformerConfig.from_flavor("tiny").parameter_count()["total"]
    assert llama["parameters"] == ours["parameters"], "the baseline has the same parameter count, exactly"
    assert result["ratio"] == pytest.approx(ours["tokens_per_s_per_gpu"] / llama["tokens_per_s_per_gpu"])
    assert ours["step_s_p50"] <= ours["step_s_p90"]
    assert ours["mfu"] is None, "a CPU has no datasheet peak to compare with"
    assert ours["peak_memory_gib"] > 0
    assert ours["join_norm"] == "plain", "the kernels need a GPU"
    assert "joins and norms plain" in out.read_text()
    assert f"| laneformer | {ours['parameters']:,} |" in out.read_text()
