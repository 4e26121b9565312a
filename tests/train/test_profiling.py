"""The profiling flags of docs/profiling.md: every rank leaves a trace of the step that was asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.train.runs import succeed


@pytest.mark.rotate
def test_every_rank_leaves_a_trace(prepared_data: Path, tmp_path: Path) -> None:
    flags = [
        "--profiling.enable_profiling",
        "--profiling.profile_freq",
        "4",
        "--profiling.profiler_warmup",
        "1",
    ]
    off = ["--checkpoint.no-enable", "--validation.no-enable"]
    succeed(tmp_path / "run", prepared_data / "phase1.lock.json", *flags, *off)
    found = sorted((tmp_path / "run/profile_traces").rglob("*.json"))
    assert [str(path.relative_to(tmp_path / "run")) for path in found] == [
        f"profile_traces/iteration_4/rank{rank}_trace.json" for rank in range(2)
    ]
    for path in found:
        names = {event["name"] for event in json.loads(path.read_text())["traceEvents"]}
        assert {
            "gloo:all_gather",
            "FSDP::all_gather (layers.0)",
            "FSDP::post_backward_reduce (layers.3)",
        } <= names
