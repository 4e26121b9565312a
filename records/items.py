"""The answer to each item of an evaluation: a compressed file next to the records, and differences of two.

Line 1 says what was asked of whom. Each further line is an item: task, item (its number in the task), right
(null where it was not asked; for code the share of samples that pass), losses (nats per token of every option),
and for CORE gold, nats and bytes of the right answer.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from records.files import JsonObject, json_lines, write_atomically

FOLDER = "items"  # next to evals.jsonl
Pair = tuple[JsonObject, JsonObject]  # an item in two files


def write_items(out: Path | None, head: JsonObject, items: Iterable[JsonObject]) -> str | None:
    """Write the file and return its path relative to the folder of `out`; None without `out`.

    Args:
        head: kind, step and data_sha256, which name the file, and all else that two files must share.
    """
    if out is None:
        return None
    lines = "".join(json.dumps(line) + "\n" for line in (head, *items))
    # mtime=0: the same items give the same bytes, and so the same name
    content = gzip.compress(lines.encode(), mtime=0)
    name = f"{head['kind']}-{head['step'] or 0}-{hashlib.sha256(content).hexdigest()[:12]}.jsonl.gz"
    write_atomically(out.parent / FOLDER / name, content)
    return f"{FOLDER}/{name}"


def read_items(path: Path) -> tuple[JsonObject, dict[tuple[str, int], JsonObject]]:
    """Read (head, {(task, item): line}); ValueError for a file that is none."""
    try:
        lines = gzip.decompress(path.read_bytes()).splitlines()
        (_, head), *rest = json_lines(lines, path)
        return head, {(line["task"], line["item"]): line for _, line in rest}
    except (OSError, EOFError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is no file of items ({error}); records name them, in their field items"
        ) from None


def compare_pairs(
    a: Sequence[float], b: Sequence[float], added: float = 0.0
) -> tuple[float, float]:
    """Return the mean of b - a over the same items and its standard error.

    Args:
        added: half an item more of each outcome, for answers that are right (1) or wrong (0).
    """
    differences = [y - x for x, y in zip(a, b, strict=True)]
    # as Agresti and Min (2005) recommend, so that few items without a difference do not look certain
    total = math.fsum(differences)
    count = len(differences) + 2 * added
    variance = (math.fsum(d * d for d in differences) + added) / count - (total / count) ** 2
    return total / len(differences), math.sqrt(max(0.0, variance) / count)


def gold_bits(lines: Iterable[JsonObject]) -> float | None:
    """Divide the bits of a task's right answers by their bytes; None without bytes."""
    listed = list(lines)
    # a ratio of sums: a mean of ratios would weigh short answers like long ones
    size = sum(line.get("bytes", 0) for line in listed)
    return math.fsum(line["nats"] for line in listed) / math.log(2) / size if size else None


def bits_change(pairs: Sequence[Pair]) -> JsonObject:
    """Compare the gold bits per byte of a task, later minus earlier; {} where it has none."""
    if not (size := sum(line.get("bytes", 0) for line, _ in pairs)):
        return {}
    # each item's part of the figure, so that their mean is the bits per byte of the task
    a, b = (
        [pair[side]["nats"] / math.log(2) * len(pairs) / size for pair in pairs] for side in (0, 1)
    )
    change, error = compare_pairs(a, b)
    return {"bits_difference": change, "bits_standard_error": error}


def mean_of_bits(tasks: Iterable[JsonObject]) -> JsonObject:
    """Average `bits_change` over the tasks that have one."""
    rows = [task for task in tasks if "bits_difference" in task]
    if not rows:
        return {}
    return {
        "bits_difference": math.fsum(row["bits_difference"] for row in rows) / len(rows),
        "bits_standard_error": error_of_mean(row["bits_standard_error"] for row in rows),
    }


def error_of_mean(errors: Iterable[float]) -> float:
    """Return the standard error of the mean of independent values with these errors."""
    listed = list(errors)
    return math.hypot(*listed) / len(listed)
