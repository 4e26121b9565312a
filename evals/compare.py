"""Two evaluations of the same items, with paired errors: what changed between checkpoints, runs or phases.

    python -m evals.compare runs/x@1000 runs/x@2000
    python -m evals.compare runs/a runs/b --kind lm_eval
    python -m evals.compare runs/x@phase1 runs/x@phase2
    python -m evals.compare runs/x/items/core-1000-0123456789ab.jsonl.gz runs/y/items/core-9-ba9876543210.jsonl.gz

The error of a difference is smaller than that of two scores, since what is hard for both models cancels.
"""

from __future__ import annotations

import itertools
import math
import operator
from pathlib import Path
from typing import Annotated

import tyro

from evals.core.evaluate import compare_core
from evals.tables import show_table
from records.command import run_function
from records.evals import SETTINGS
from records.files import JsonObject, read_lines
from records.items import Pair, bits_change, compare_pairs, error_of_mean, read_items
from records.run import places_of

COLUMNS = ("task", "n", "a", "b", "b - a", "only a right", "only b right", "gold bits/byte")


def compare(a: Path, b: Path) -> JsonObject:
    """Compare two files of items, by task and in total.

    Raises:
        ValueError: the files are not about the same items.
    """
    (head_a, lines_a), (head_b, lines_b) = read_items(a), read_items(b)
    kind = head_a.get("kind")
    shared = ("kind", "protocol", "data_sha256", *SETTINGS.get(str(kind), ()))
    other = [key for key in dict.fromkeys(shared) if head_a.get(key) != head_b.get(key)]
    if other:
        reasons = "; ".join(f"{key} {head_a.get(key)} and {head_b.get(key)}" for key in other)
        raise ValueError(f"{a} and {b} were not asked the same: {reasons}")
    if lines_a.keys() != lines_b.keys():
        raise ValueError(
            f"{a} holds {len(lines_a)} items and {b} {len(lines_b)}, which are not the same ones"
        )
    pairs: dict[str, list[Pair]] = {}
    # null: the task scores no answer as right or wrong
    for (task, item), line in lines_a.items():
        if line["right"] is not None:
            pairs.setdefault(task, []).append((line, lines_b[task, item]))
    tasks = {task: compare_task(of_task) for task, of_task in pairs.items()}
    total = compare_core(tasks) if kind == "core" else {}
    return {"a": str(a), "b": str(b), "kind": kind, "tasks": tasks, **total}


def compare_task(pairs: list[Pair]) -> JsonObject:
    groups: dict[str, list[tuple[float, float]]] = {}
    for line_a, line_b in pairs:
        rights = (float(line_a["right"]), float(line_b["right"]))
        groups.setdefault(line_a.get("group", ""), []).append(rights)
    sides = [tuple(zip(*group, strict=True)) for group in groups.values()]
    changes = [compare_pairs(before, after, added=1) for before, after in sides]
    means = [
        math.fsum(math.fsum(group[side]) / len(group[side]) for group in sides) for side in (0, 1)
    ]
    a, b = zip(*itertools.chain(*groups.values()), strict=True)
    # groups of the items have equal weight
    return {
        "n": len(pairs),
        "a": means[0] / len(sides),
        "b": means[1] / len(sides),
        "difference": math.fsum(change for change, _ in changes) / len(sides),
        "standard_error": error_of_mean(error for _, error in changes),
        "only_a": sum(map(operator.gt, a, b)),
        "only_b": sum(map(operator.lt, a, b)),
        **bits_change(pairs),
    }


def locate_items(where: str, kind: str) -> Path:
    """Find the file of items of a path, RUN, RUN@STEP or RUN@PHASE."""
    if Path(where).is_file():
        return Path(where)
    run, _, at = where.partition("@")
    records = list[JsonObject]()
    for place in places_of(Path(run)):
        of_kind = [r for r in read_lines(place / "evals.jsonl") if r.get("kind") == kind]
        records += [{**r, "items": place / r["items"]} for r in of_kind if r.get("items")]
    chosen = [r for r in records if at in ("", str(r.get("step")), r.get("phase"))]
    if not chosen:
        steps = dict.fromkeys(f"{r.get('step')} ({r.get('phase')})" for r in records)
        raise ValueError(
            f"{where}: no record of {kind} with items; steps of {run}/evals.jsonl: "
            f"{', '.join(steps) or 'none'}"
        )
    # the latest record of the newest checkpoint
    return max(reversed(chosen), key=lambda record: record["step"] or 0)["items"]


def format_difference(row: JsonObject, value: str, error: str) -> str:
    return f"{row[value]:+.4f} ± {row[error]:.4f}" if row.get(value) is not None else ""


def format_row(name: str, row: JsonObject, change: str, error: str) -> list[str]:
    n, only_a, only_b = (str(row.get(key, "")) for key in ("n", "only_a", "only_b"))
    shares = [f"{row[side]:.4f}" if isinstance(row.get(side), float) else "" for side in "ab"]
    bits = format_difference(row, "bits_difference", "bits_standard_error")
    return [name, n, *shares, format_difference(row, change, error), only_a, only_b, bits]


def show(comparison: JsonObject) -> None:
    names = f"{Path(comparison['b']).name} minus {Path(comparison['a']).name}"
    total = "CORE v2" if comparison["kind"] == "core" else "mean"
    rows = []
    for task, row in comparison["tasks"].items():
        rows.append(format_row(task, row, "difference", "standard_error"))
    for name, row in comparison.get("categories", {}).items():
        rows.append(format_row(f"{name}, centered", row, "centered_v2", "centered_v2_se"))
    rows.append(format_row(total, comparison, "core_v2", "core_v2_se"))
    show_table(f"{names}; ± is a paired standard error", COLUMNS, rows)


def main(
    a: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="EARLIER")],
    b: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="LATER")],
    kind: str = "core",
) -> JsonObject:
    """Compare two evaluations of the same items, with paired errors. The last line on stdout
    is the result, JSON.

    Args:
        a: RUN, RUN@STEP, RUN@PHASE, or a file of items (items/*.jsonl.gz) of the earlier evaluation
        b: that of the later evaluation
        kind: of a run's records: core, lm_eval or code
    """
    comparison = compare(locate_items(a, kind), locate_items(b, kind))
    show(comparison)
    return comparison


if __name__ == "__main__":
    run_function("evals.compare", main)
