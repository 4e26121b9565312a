"""Tests of two checkpoints on the same items: paired differences by hand, bad files."""

import json
import math
import random
from pathlib import Path

import pytest

from evals.compare import compare, locate_items, main
from evals.core.evaluate import aggregate, summarize_task
from evals.core.tasks import TASKS
from records.files import append_line
from records.items import compare_pairs, read_items, write_items

HEAD = {"kind": "core", "step": 1, "protocol": "nanochat", "data_sha256": "ab", "limit": 4}


def write(folder: Path, right: list[bool], nats: list[float], **head) -> Path:
    answers = [
        {"task": "copa", "item": i, "right": r, "losses": [n, None], "nats": n, "bytes": 4}
        for i, (r, n) in enumerate(zip(right, nats, strict=True))
    ]
    return folder / str(write_items(folder / "evals.jsonl", HEAD | head, answers))


def test_a_paired_difference_by_hand(tmp_path):
    a = write(tmp_path, [True, False, False, True], [1.0, 2.0, 3.0, 2.0], step=1)
    b = write(tmp_path, [True, True, True, False], [1.0, 1.0, 2.0, 2.0], step=2)
    (row,) = compare(a, b)["tasks"].values()
    assert (row["n"], row["a"], row["b"], row["difference"]) == (4, 0.5, 0.75, 0.25)
    assert (row["only_a"], row["only_b"]) == (1, 2)
    # 3 items differ, +1 +1 -1, and 0; half an item more of each outcome: sums of 1 and 4 over 6
    assert row["standard_error"] == pytest.approx(math.sqrt((4 / 6 - (1 / 6) ** 2) / 6), rel=1e-12)
    assert row["bits_difference"] == pytest.approx(-2 / math.log(2) / 16, rel=1e-12)
    # differences of 0, -1, -1, 0 nats: their standard deviation is 1/2, of 4 items
    assert row["bits_standard_error"] == pytest.approx(0.5 / 2 / math.log(2) / 4, rel=1e-12)
    assert main(str(a), str(b)) == compare(a, b)
    assert read_items(a)[1]["copa", 2]["losses"] == [3.0, None]
    # two items without a difference are not certain
    assert compare_pairs([1.0, 0.0], [1.0, 0.0], added=1)[1] > 0.2


def test_other_items_are_refused(tmp_path):
    a = write(tmp_path, [True], [1.0])
    for head in (
        {"data_sha256": "cd"},
        {"protocol": "dclm"},
        {"limit": 5},
        {"kind": "code"},
    ):
        with pytest.raises(ValueError, match=f"were not asked the same: {next(iter(head))} "):
            compare(a, write(tmp_path, [True], [1.0], **head))
    for kind, key in (("lm_eval", "add_bos"), ("code", "problems")):
        sides = [write(tmp_path, [True], [1.0], kind=kind, **{key: value}) for value in (1, 2)]
        with pytest.raises(ValueError, match=f"were not asked the same: {key} 1 and 2"):
            compare(*sides)
    with pytest.raises(ValueError, match="which are not the same ones"):
        compare(a, write(tmp_path, [True, False], [1.0, 1.0]))
    (tmp_path / "x").write_text("no")
    with pytest.raises(ValueError, match="is no file of items"):
        compare(a, tmp_path / "x")


def draw_answers(seed: int, better: float = 0.0):
    draw = random.Random(seed)
    return [
        {
            "task": task.label,
            "item": i,
            "group": str(i // 4) if task.by_category else "",
            "right": draw.random() < 0.5 + better,
            "losses": [],
            "nats": 5 - better + draw.random(),
            "bytes": 4,
        }
        for task in TASKS
        for i in range(6)
    ]


def test_core_categories_and_gold_bits_are_the_differences_of_the_records(tmp_path):
    sides = [draw_answers(1), draw_answers(2, better=0.3)]
    a, b = (
        tmp_path / str(write_items(tmp_path / "evals.jsonl", HEAD | {"step": step}, side))
        for step, side in enumerate(sides)
    )
    comparison = compare(a, b)
    records = []
    for side in sides:
        tasks = {
            task.label: summarize_task(task, [x for x in side if x["task"] == task.label], 6)
            for task in TASKS
        }
        records.append(tasks | {"": aggregate(tasks)})
    for label, row in comparison["tasks"].items():
        assert [row["a"], row["b"]] == pytest.approx(
            [figures[label]["accuracy"] for figures in records]
        )
        assert row["difference"] == pytest.approx(row["b"] - row["a"])
    before, after = (record[""] for record in records)
    pairs = [(comparison, before, after, "core_v1"), (comparison, before, after, "core_v2")]
    for name, category in comparison["categories"].items():
        pairs.append(
            (category, before["categories"][name], after["categories"][name], "centered_v2")
        )
    for change, old, new, figure in pairs:
        assert change[figure] == pytest.approx(new[figure] - old[figure], abs=1e-12)
    errors = [
        comparison["tasks"][t.label]["standard_error"] / (1 - t.baseline_v2 / 100) for t in TASKS
    ]
    assert comparison["core_v2_se"] == pytest.approx(math.hypot(*errors) / 22)
    bits = [
        sum(record[task.label]["gold_bits_per_byte"] for task in TASKS) / 22 for record in records
    ]
    assert comparison["bits_difference"] == pytest.approx(bits[1] - bits[0])
    copa = write(tmp_path, [True], [1.0])
    assert (compare(copa, copa)["core_v2"], compare(copa, copa)["bits_difference"]) == (None, 0)


def test_runs_checkpoints_and_phases_are_compared_by_name(tmp_path):
    def record(run, step, phase, right, **head):
        folder = tmp_path / run
        items = write(folder, right, [1.0] * len(right), step=step, **head).relative_to(folder)
        line = {"kind": "core", "step": step, "phase": phase, "items": str(items)}
        append_line(folder / "evals.jsonl", json.dumps(line))
        return str(folder)

    run = record("x", 10, "phase1", [True, False])
    record("x", 20, "phase1", [False, False])
    # the same checkpoint again: the latest record counts
    record("x", 20, "phase1", [True, True])
    record("x", 30, "phase2", [False, False])
    other = record("y", 7, "phase1", [True, True])

    def change(a, b):
        return compare(locate_items(a, "core"), locate_items(b, "core"))["tasks"]["copa"][
            "difference"
        ]

    assert change(f"{run}@10", f"{run}@20") == 0.5
    # the last checkpoint of each
    assert change(f"{run}@phase1", f"{run}@phase2") == -1
    assert change(run, other) == 1
    (tmp_path / "w").mkdir()
    # a run whose records lie in a folder of its phase
    (tmp_path / "w" / "phase1").symlink_to(tmp_path / "y")
    # records of a phase's folder
    assert change(run, str(tmp_path / "w")) == 1
    record("z", 7, "phase1", [True, True, True], limit=9)
    with pytest.raises(ValueError, match=r"were not asked the same: limit 4 and 9"):
        change(run, str(tmp_path / "z"))
    with pytest.raises(
        ValueError, match=r"no record of core with items; steps of .*: 7 \(phase1\)"
    ):
        change(run, f"{other}@8")
