"""Test of the training benchmark at toy size: both models train and are reported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from laneformer import LaneformerConfig
from records.job import job_flags
from tools.markdown import cell

ROOT = Path(__file__).resolve().parents[3]


STEP = "step: {0}  loss: 8.0  memory: {1:5.2f}GiB(4%)  tps: {2:,}  tflops: 1.00  mfu: {3:.2f}%\n"
LOG = "Model llama size: 1,234 total parameters\n" + "".join(
    STEP.format(step, memory, speed, 10 * step)
    for step, memory, speed in ((1, 9.5, 10), (2, 1.0, 900), (3, 1.0, 1000), (4, 1.0, 1400))
)


def test_figures_of_a_log_are_those_of_the_timed_steps(monkeypatch):
    from tools.bench import train

    options = train.Options(steps=3, warmup=1)
    figures = train.summarize([LOG], options)
    expected = {
        "parameters": 1234,
        "mfu_percent": None,
        "peak_memory_gib": 9.5,
        "joins_and_norms": None,
    }
    assert {name: figures[name] for name in expected} == expected
    speeds = [figures[name] for name in ("tokens_per_s_per_gpu", "p10", "p90")]
    assert speeds == pytest.approx([1000, 920, 1320])
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert train.summarize([LOG, LOG], options)["mfu_percent"] == 30


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
def test_toy_run(tmp_path):
    out = tmp_path / "train.md"
    sizes = {"seq-len": 32, "local-batch": 2, "steps": 3, "warmup": 2, "rounds": 1}
    flags = job_flags({"flavor": "tiny", **sizes, "out": out})
    both = "--both=--training.mixed_precision_param float32 --compile.no-enable"
    command = [sys.executable, "-c", RUN, *flags, both]
    outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert outcome.returncode == 0, outcome.stderr[-3000:]
    assert "exceeds the 512 positions of tiny" in outcome.stderr
    result = json.loads(outcome.stdout.splitlines()[-1])
    ours, llama = result["models"]["laneformer"], result["models"]["llama"]
    assert ours["parameters"] == LaneformerConfig.from_flavor("tiny").parameter_count()["total"]
    assert llama["parameters"] == ours["parameters"], (
        "the baseline has the same parameter count, exactly"
    )
    speeds = [each["tokens_per_s_per_gpu"] for each in (ours, llama)]
    assert result["ratios"] == [pytest.approx(speeds[0] / speeds[1])]
    assert ours["mfu_percent"] is None, "a CPU has no datasheet peak to compare with"
    assert ours["peak_memory_gib"] > 0
    assert ours["joins_and_norms"] == "plain", "the kernels need a GPU"
    assert f"| laneformer | {cell(ours['parameters'])} |" in out.read_text()
