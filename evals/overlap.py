"""Which items of an evaluation the training text held, and the scores of the others.

The pipeline's search for benchmark items (data_mixtures.stages.decontaminate) left its index and its
receipts, which count the items that the text held, in the data folder. An item of an evaluation is
contaminated if it is one of them, or has the passages of one. Documents that held one were dropped, so
the training text has near copies at most. Items without a passage of eight words cannot be found, and
count as clean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from data_mixtures.shards import read_manifests
from data_mixtures.stages import decontaminate, stage
from evals.intervals import Z95, wilson
from records.files import JsonObject
from records.items import error_of_mean

OverlapFlag = Annotated[
    Path | None,
    tyro.conf.arg(
        metavar="DIR",
        help_behavior_hint="(default: no item is marked)",
        help="data folder (data_mixtures.prepare): its search tells clean items from contaminated ones",
    ),
]


class Overlap:
    """The search of a data folder. Raises ValueError if it has none, or its receipts are gone."""

    def __init__(self, data: Path):
        index = decontaminate.load(data, [each.name for each in decontaminate.known_benchmarks(data)])
        if index is None:
            raise ValueError(f"--overlap {data} was not searched for benchmarks, so which items it held is unknown; "
                             "name them in [filter.benchmarks] of its recipe and prepare it again")  # fmt: skip
        self.index = index
        self.held = {
            (name, int(number))
            for source in read_manifests(data)
            for counts in stage.counts(data, "filter", source)
            for name, found in counts["contamination"].items()
            for number in found["items"]
        }

    def contaminated(self, rows: Sequence[Any]) -> list[bool]:
        """rows: of a benchmark, JSON values; of each all texts are searched."""
        texts = ["\n".join(decontaminate.strings(row)) for row in rows]
        return [not self.held.isdisjoint(found) for found in self.index.find(texts)]


def clean_figures(
    overlap: Overlap | None, lines: Sequence[JsonObject], rows: Mapping[tuple[str, int], Any]
) -> JsonObject | None:
    """`contaminated`, a number of items, and by task `clean_score`; None without a search. Marks the lines.

    lines: of a file of items. rows: of each (task, item) what was asked.
    """
    if overlap is None:
        return None
    marks = overlap.contaminated([rows[line["task"], line["item"]] for line in lines])
    tasks: dict[str, list[JsonObject]] = {}
    for line, mark in zip(lines, marks, strict=True):
        line["contaminated"] = mark
        if line["right"] is not None:
            tasks.setdefault(line["task"], []).append(line)
    return {"contaminated": sum(marks), "tasks": {task: clean_score(of) for task, of in tasks.items()}}


def clean_score(lines: Sequence[JsonObject]) -> JsonObject:
    """n, the clean items; their score; difference, from the score of all, and its standard error. The
    items that both have cancel: what remains is the share of contaminated items times clean minus
    contaminated. null if all are.

    Groups have equal weight, as in the accuracy.
    """
    groups: dict[str, tuple[list[float], list[float]]] = {}
    for line in lines:
        groups.setdefault(line.get("group", ""), ([], []))[line["contaminated"]].append(float(line["right"]))
    count = sum(len(clean) for clean, _ in groups.values())
    if not all(clean for clean, _ in groups.values()):
        return {"n": count, "score": None, "difference": None, "standard_error": None}
    scores, changes, errors = list[float](), list[float](), list[float]()
    for clean, found in groups.values():
        share = len(found) / (len(clean) + len(found))
        score = sum(clean) / len(clean)
        scores.append(score)
        changes.append(share * (score - sum(found) / len(found)) if found else 0.0)
        halves = [wilson(sum(side), len(side))[1] if side else 0.0 for side in (clean, found)]
        errors.append(share / Z95 * (halves[0] ** 2 + halves[1] ** 2) ** 0.5)
    mean, change = (sum(values) / len(values) for values in (scores, changes))
    return {"n": count, "score": mean, "difference": change, "standard_error": error_of_mean(errors)}
