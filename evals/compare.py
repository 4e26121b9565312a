"""Two evaluations of the same items, with paired errors: what changed from one checkpoint to the next.

    python -m evals.compare runs/x/items/core-1000-0123456789ab.jsonl.gz
    runs/x/items/core-2000-ba9876543210.jsonl.gz

The files are those that records of `core` and `lm_eval` name in their field `items`. The error of a
difference of the same items is smaller than that of two scores, since what is hard for both models cancels.
"""

from __future__ import annotations

import json
import math
import operator
from pathlib import Path
from typing import Annotated

import tyro

from evals.intervals import paired
from evals.items import read_items
from evals.tables import show_table
from records.files import JsonObject

SHARED = (
    "kind",
    "protocol",
    "data_sha256",
    "limit",
)  # two files that differ in one of these asked other things


def compare(a: Path, b: Path) -> JsonObject:
    """By task: accuracies of both, b - a and its standard error, items that only one got right,
    gold bits per byte.

    Raises ValueError if the files are not about the same items.
    """
    (head_a, lines_a), (head_b, lines_b) = read_items(a), read_items(b)
    if other := [
        f"{key} {head_a.get(key)} and {head_b.get(key)}"
        for key in SHARED
        if head_a.get(key) != head_b.get(key)
    ]:
        raise ValueError(f"{a} and {b} were not asked the same: {'; '.join(other)}")
    if lines_a.keys() != lines_b.keys():
        raise ValueError(
            f"{a} holds {len(lines_a)} items and {b} {len(lines_b)}, which are not the same ones"
        )
    tasks: JsonObject = {}
    for task in dict.fromkeys(task for task, _ in lines_a):
        pairs = [
            (line, lines_b[key])
            for key, line in lines_a.items()
            if key[0] == task and line["right"] is not None
        ]
        if pairs:
            tasks[task] = differences(pairs)
    return {"a": str(a), "b": str(b), "tasks": tasks}


def differences(pairs: list[tuple[JsonObject, JsonObject]]) -> JsonObject:
    """The figures of one task."""
    a, b = ([float(pair[side]["right"]) for pair in pairs] for side in (0, 1))
    difference, error = paired(a, b, added=1)
    found = {
        "n": len(pairs), "a": math.fsum(a) / len(a), "b": math.fsum(b) / len(b),
        "difference": difference, "standard_error": error,
        "only_a": sum(map(operator.gt, a, b)), "only_b": sum(map(operator.lt, a, b)),
    }  # fmt: skip
    if size := sum(line.get("bytes", 0) for line, _ in pairs):
        a, b = ([pair[side]["nats"] / math.log(2) * len(pairs) / size for pair in pairs] for side in (0, 1))
        found["bits_difference"], found["bits_standard_error"] = paired(a, b)
    return found


def main(
    a: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="EARLIER")],
    b: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="LATER")],
) -> None:
    """Compare two evaluations of the same items, with paired errors. The last line on stdout
    is the result, JSON.

    Args:
        a: file of items (items/*.jsonl.gz) that the record of the earlier evaluation names
        b: that of the later evaluation
    """
    found = compare(a, b)
    columns = ("task", "n", "a", "b", "b - a", "only a right", "only b right", "gold bits/byte")
    rows = []
    for task, row in found["tasks"].items():
        bits = (
            f"{row['bits_difference']:+.4f} ± {row['bits_standard_error']:.4f}"
            if "bits_difference" in row
            else ""
        )
        change = f"{row['difference']:+.4f} ± {row['standard_error']:.4f}"
        counts = (str(row["only_a"]), str(row["only_b"]))
        rows.append([task, str(row["n"]), f"{row['a']:.4f}", f"{row['b']:.4f}", change, *counts, bits])
    show_table(f"{b.name} minus {a.name}; ± is a paired standard error", columns, rows)
    print(json.dumps(found))


if __name__ == "__main__":
    try:
        tyro.cli(main, prog="python -m evals.compare")
    except ValueError as problem:
        raise SystemExit(f"compare: {problem}") from None
