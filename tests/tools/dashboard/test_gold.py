"""Gold bits of the training loop, and clean scores, on the page: every figure and its paired error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evals.intervals import Z95
from records.run import Run, read_run
from tests.tools.dashboard import made_up_run
from tools.dashboard.__main__ import FIGURE, page
from tools.dashboard.listings import contamination_card
from tools.dashboard.rows import prepare
from tools.dashboard.tasks import gold_card


def measured(step: int, bits: float, **change: Any) -> dict[str, Any]:
    tasks = {
        "copa": {"gold_bits_per_byte": bits + 0.5, "n": 4},
        "arc_easy": {"gold_bits_per_byte": bits - 0.5, "n": 4},
    }
    return {
        "kind": "gold", "phase": "phase1", "step": step, "tokens_total": step * made_up_run.TOKENS_A_STEP,
        "gold_bits_per_byte": bits, "tasks": tasks, "data_sha256": "ab", "change": change or None,
    }  # fmt: skip


def run_with(folder: Path, *lines: dict[str, Any]) -> Run:
    made_up_run.write_run(folder, steps=60, every=1)
    with open(folder / "evals.jsonl", "a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run(folder)
    prepare(run)
    return run


def test_gold_bits_begin_at_step_0_with_paired_bars(tmp_path: Path) -> None:
    moved = {"bits_difference": -0.25, "bits_standard_error": 0.01}
    again = measured(20, 3.5, since=0, **moved | {"bits_difference": -0.5})
    lines = (
        measured(0, 4.0),
        measured(20, 9.9, since=0, **moved),
        again,
        measured(40, 3.25, since=20, **moved),
    )
    text = gold_card(run_with(tmp_path / "run", *lines))
    ((_, drawn),) = FIGURE.findall(text)
    mean, copa, arc = json.loads(drawn)["data"]
    assert mean["name"] == "mean of 2 tasks"
    assert mean["x"][0] == 0
    assert mean["y"] == [4.0, 3.5, 3.25], "of a step measured again, after a roll-back, the last"
    assert mean["error_y"]["array"] == pytest.approx([0, Z95 * 0.01, Z95 * 0.01])
    assert (copa["y"], arc["y"]) == ([4.5, 4.0, 3.75], [3.5, 3.0, 2.75])
    assert "phase1 step 40: <b>3.2500</b>, -0.2500 ± 0.0100 since step 20" in text
    assert gold_card(run_with(tmp_path / "none")) == ""


def test_scores_stand_beside_those_of_clean_items(tmp_path: Path) -> None:
    task = {"n": 90, "score": 0.5, "difference": -0.0125, "standard_error": 0.004}
    same = {"n": 100, "score": 0.5, "difference": 0.0, "standard_error": 0.0}
    of_core = {"core_v2": 0.2, "core_v2_difference": -0.01, "core_v2_difference_se": 0.003}
    clean = {"contaminated": 10, "tasks": {"copa": task, "piqa": same}, **of_core}
    run = run_with(
        tmp_path / "run", {"kind": "core", "step": 60, "phase": "phase1", "tasks": {}, "clean": clean}
    )
    text = contamination_card(run)
    assert all(
        told in text for told in ("0.5125", "0.5000", "-0.0125 ± 0.0040", "0.2100", "-0.0100 ± 0.0030")
    )
    assert "piqa" not in text.partition("All and clean")[2], "no contaminated item"
    assert "All and clean" in page([run], 1.79e9)
    run.evals = [record for record in run.evals if record["kind"] == "core"]
    assert "All and clean" in contamination_card(run), "without a record of contamination"
