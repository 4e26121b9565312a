"""Gold bits of the training loop, and clean scores, on the page: every figure and its paired error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evals.compare import compare_named
from evals.intervals import Z95
from records.items import write_items
from records.run import Run, read_run
from tests.tools.dashboard import made_up_run
from tools.dashboard.__main__ import FIGURE, page
from tools.dashboard.comparison import paired_card
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


def test_runs_are_compared_with_paired_errors(tmp_path: Path) -> None:
    """Every figure is that of evals.compare; what was asked otherwise is refused with the reason."""

    def run(name: str, right: list[bool], nats: list[float], limit: int = 4) -> Run:
        lines = [
            {"task": "copa", "item": i, "right": r, "losses": [n, None], "nats": n, "bytes": 4}
            for i, (r, n) in enumerate(zip(right, nats, strict=True))
        ]
        head = {"kind": "core", "step": 60, "protocol": "nanochat", "data_sha256": "ab", "limit": limit}
        folder = tmp_path / name
        folder.mkdir()
        items = write_items(folder / "evals.jsonl", head, lines)
        return run_with(folder, {"kind": "core", "step": 60, "phase": "phase1", "items": items, "tasks": {}})

    a = run("a", [True, False] * 20, [1.0] * 40)
    b = run("b", [True, True] * 20, [0.5] * 40)
    text = paired_card([a, b])
    found = compare_named(str(a.folder), str(b.folder), "core")["tasks"]["copa"]
    assert found["difference"] == 0.5
    score = f"<b>+0.5000 ± {Z95 * found['standard_error']:.4f}</b>"
    assert f"<tr><td>copa</td><td>{score}</td><td><b>-0.1803 ± 0.0000</b></td></tr>" in text
    assert "b minus a: CORE" in text
    same = paired_card([a, run("same", [True, False] * 20, [1.0] * 40)])
    assert "<td>+0.0000 ± " in same, "a change within chance is not bold"
    other = paired_card([a, run("other", [True, False], [1.0] * 2, limit=2)])
    assert "not compared" in other
    assert "limit 4 and 2" in other
    assert paired_card([a, run_with(tmp_path / "none")]) == ""
