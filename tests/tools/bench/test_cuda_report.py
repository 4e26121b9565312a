"""The page of the GPU benchmark: every recorded figure is on it, and what is missing is listed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tools.bench import cuda_report

HEAD = {"date": "2026-01-01 00:00 UTC", "command": "x", "commit": "abc", "flavor": "2b", "dtype": "bf16"}
DEPTH = {
    "depth": 0, "tokens_per_s": 900.0, "first_tokens_per_s": 910.0, "last_tokens_per_s": 890.0,
    "bytes_per_token": 4_443_340_800, "percent_of_probe": 91.0, "percent_of_datasheet": 83.3,
    "exposed_us_per_layer": 7.1, "prefill_tokens_per_s": 50_000.0, "ttft_s": 0.04, "version": "persistent",
}  # fmt: skip
GREEDY = {"prompts": 8, "same": 7, "diverged": [{"prompt": 3, "token": 9, "lead": 1e-4, "tie": 2e-3}]}
VERSION = {"relative_error": 1e-3, "kl": 1e-6, "worst": 1e-3, "holds": True, "greedy": GREEDY, "differing_runs": 0}
RECORDED: dict[str, Any] = {
    "machine": {"gpu": "NVIDIA H200", "multiprocessors": 132, "l2_bytes": 50 << 20, "memory_bytes": 141 << 30},
    "probe": {
        "stream_bytes_per_s": 4.4e12, "loads_bytes_per_s": 4.3e12, "torch_copy_bytes_per_s": 4.2e12,
        "bytes_per_s": 4.4e12, "weight_bytes": 4_443_340_800, "tape_bytes": 4_445_437_952, "layers": 15,
    },
    "correctness": {
        "hf_bf16": {"relative_error": 0.02, "kl": 1e-4}, "persistent": VERSION, "graph": VERSION, "holds": True,
        "failed": [], "passed": {"greedy": True},
        "faults": {"none": VERSION, "delay one more": {**VERSION, "holds": False}},
    },
    "decode": {"depths": {"0": DEPTH}},
    "baselines": {
        "tokens": 128, "tokens_per_s": {"persistent": [900.0, 920.0, 910.0], "graph": [800.0, 820.0, 810.0]},
        "failed": {"hf_generate": "OutOfMemoryError"},
    },
    "lane_alone": {
        "rows": [{"blocks": 128, "tokens_per_s": 4000.0}], "lanes": 8, "layers": 15, "bytes_per_token": 555e6,
        "blocking_exchanges": 5,
    },
}  # fmt: skip


def page(**steps: Any) -> str:
    return cuda_report.markdown({**HEAD, "steps": {name: {"result": step} for name, step in steps.items()}})


def test_the_report_shows_every_figure_and_names_what_is_missing() -> None:
    text = page(**RECORDED)
    for column in cuda_report.DECODE_COLUMNS.values():
        assert f"| {column} |" in text
    assert "| 0 | 900 | 910 | 890 | 4443 | 91 | 83.3 | 7.1 | 50000 | 0.04 | persistent |" in text
    assert "| our ring of bulk copies | 4400 | 91.7 |" in text
    assert "4.443 GB per token; 4.445 GB with" in text
    assert "**Correctness: all checks hold.**" in text
    assert text.index("**Correctness") < text.index("tokens/s")
    assert "prompt 3 diverges at token 9 where the lead is 1.00e-04" in text
    assert "| graph | 810 | 800 | 820 | 81.8 | 75 | 15 | 1.12 |" in text  # 910/810; (1/810 - 1009.85 us)/15
    assert "hf_generate: not measured, OutOfMemoryError" in text
    assert "**A projection, not a measurement**: 8 GPUs" in text
    assert "| delay one more | 0.001 | 1e-06 | NO |" in text
    for title in ("fp16", "compute-sanitizer", "Transformers, compiled"):
        assert f"### {title}\n\nnot measured: the run has not reached it" in text


def test_no_speed_without_a_verdict() -> None:
    """Whatever became of the check stands above the speeds."""
    unproven = page(decode=RECORDED["decode"])
    assert "**Correctness: not proven (not measured).**" in unproven
    wrong = {**RECORDED["correctness"], "holds": False, "failed": ["graph: greedy tokens"]}
    assert "**Correctness: FAILED: graph: greedy tokens.**" in page(correctness=wrong, decode=RECORDED["decode"])
    steps = {"correctness": {"error": "its process ended with status -11"}, "decode": {"not_measured": "0 s were left"}}
    text = cuda_report.markdown({**HEAD, "steps": steps})
    assert "not proven (its process ended with status -11)" in text
    assert "### Decode\n\nnot measured: 0 s were left" in text


def test_the_recorded_report_is_json() -> None:
    steps = {name: {"result": step} for name, step in RECORDED.items()}
    again = json.loads(json.dumps({**HEAD, "steps": steps}))
    assert cuda_report.markdown(again) == page(**RECORDED)


def test_projection_of_known_times() -> None:
    """500 us alone (480 of them the stream), and five trips of 2 us."""
    result = {"rows": [{"tokens_per_s": 1900.0}, {"tokens_per_s": 2000.0}], "blocking_exchanges": 5,
              "bytes_per_token": 480e6, "layers": 10}  # fmt: skip
    found = cuda_report.projection(result, 1e12)
    assert found["tokens_per_s"] == pytest.approx(1e6 / 510)
    assert found["exposed_us_per_layer"] == pytest.approx(2)
