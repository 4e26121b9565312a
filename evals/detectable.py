"""The smallest change of a setting that each figure of an evaluation tells from no change, from runs of one's own.

    python -m evals.detectable runs/lr-a=0 runs/lr-b=0 runs/lr-c=1 runs/lr-d=1 runs/lr-e=2

RUN=VALUE: the setting of a run, such as log2 of its learning rate, its delay, or 0 and 1 for two mixtures; runs with
the same value, another seed, are what shows the noise. Of every run the last checkpoint counts. A figure is fitted by
a line over the setting; two single runs whose settings are `change` apart then differ by as much as 95% of the
differences of two equal runs stay below (so one in two such pairs is told apart):

    change = t(0.975, runs - 2) * sqrt(2) * residual / |slope|

Figures that read the same items share their noise. At equal cost: of CORE's items every k-th is used, until they took
as long as bits per byte, where CORE took longer.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import tyro
from scipy.stats import t as student_t

from evals.compare import files_of
from evals.core.evaluate import aggregate, task_figures
from evals.core.tasks import TASKS
from evals.tables import show_table
from records.files import JsonObject, read_lines
from records.items import read_items


def smallest_change(settings: Sequence[float], values: Sequence[float]) -> JsonObject:
    """Of one figure: slope, its standard error, residual, and change; null where the slope is not known to differ
    from 0. Raises ValueError for fewer than three runs, or with one setting.
    """
    if len(values) < 3 or len(set(settings)) < 2:
        raise ValueError(
            f"{len(values)} runs with settings {sorted(set(settings))}: 3 runs and 2 settings are needed"
        )
    slope, intercept = statistics.linear_regression(settings, values)
    freedom = len(values) - 2
    squares = (value - intercept - slope * x for x, value in zip(settings, values, strict=True))
    residual = math.sqrt(math.fsum(each**2 for each in squares) / freedom)
    error = residual / math.sqrt(len(values)) / statistics.pstdev(settings)
    quantile = float(student_t.ppf(0.975, freedom))
    known = abs(slope) > quantile * error
    change = quantile * math.sqrt(2) * residual / abs(slope) if known else None
    return {"slope": slope, "slope_standard_error": error, "residual": residual, "change": change}


def last(run: Path, kind: str) -> JsonObject:
    """The record of a run's last checkpoint. Raises ValueError if it has none."""
    found = [record for record in read_lines(run / "evals.jsonl") if record.get("kind") == kind]
    if not found:
        raise ValueError(
            f"{run}/evals.jsonl has no record of {kind}: run evals.{kind} on its last checkpoint"
        )
    return max(found, key=lambda record: record["step"] or 0)


def figures_of(run: Path, share: float) -> dict[str, float]:
    """The figures of a run's last checkpoint, those of CORE from a share of its items."""
    _, lines = read_items(files_of(str(run), "core")[0])
    answers: dict[str, list[JsonObject]] = {}
    for (label, i), line in lines.items():
        if math.floor((i + 1) * share) > math.floor(i * share):
            answers.setdefault(label, []).append(line)
    tasks = {
        task.label: task_figures(task, answers[task.label], 0) for task in TASKS if task.label in answers
    }
    found = {
        "CORE v2": aggregate(tasks)["core_v2"],
        "accuracy": statistics.fmean(task["accuracy"] for task in tasks.values()),
        "gold bits per byte": statistics.fmean(task["gold_bits_per_byte"] for task in tasks.values()),
        "bits per byte": last(run, "bits_per_byte")["bits_per_byte"],
    }
    return {name: value for name, value in found.items() if value is not None}


def detectable(runs: Sequence[tuple[Path, float]]) -> JsonObject:
    """By figure: `smallest_change`. Also the seconds of both evaluations, and the share of CORE's items in use."""
    seconds = {
        kind: statistics.median(last(run, kind)["seconds"] for run, _ in runs)
        for kind in ("core", "bits_per_byte")
    }
    share = min(1.0, seconds["bits_per_byte"] / seconds["core"])
    each = [figures_of(run, share) for run, _ in runs]
    if any(one.keys() != each[0].keys() for one in each):
        raise ValueError("some runs were asked all 22 tasks of CORE and others not: ask all of them the same")
    settings = [value for _, value in runs]
    figures = {name: smallest_change(settings, [one[name] for one in each]) for name in each[0]}
    return {"runs": len(runs), "seconds": seconds, "share_of_items": share, "figures": figures}


def read_runs(words: Iterable[str]) -> list[tuple[Path, float]]:
    """(run folder, setting) of each RUN=VALUE."""
    found = []
    for word in words:
        run, _, value = word.rpartition("=")
        try:
            found.append((Path(run), float(value)))
        except ValueError:
            raise ValueError(f"{word} is not RUN=VALUE with a number, such as runs/a=0.5") from None
    return found


def main(runs: Annotated[list[str], tyro.conf.Positional, tyro.conf.arg(metavar="RUN=VALUE")]) -> None:
    """The smallest change of a setting that each figure tells from no change at 95%. The last line on stdout is the
    result, JSON.

    Args:
        runs: run folders, each with its setting as a number; some with equal settings
    """
    found = detectable(read_runs(runs))
    rows = []
    for name, figure in found["figures"].items():
        numbers = [f"{figure[key]:.3g}" for key in ("slope", "slope_standard_error", "residual")]
        change = figure["change"]
        rows.append([name, *numbers, "slope not known" if change is None else f"{change:.3g}"])
    title = f"Of {found['runs']} runs; {100 * found['share_of_items']:.0f}% of CORE's items, to cost no more than text"
    show_table(title, ("figure", "slope", "±", "noise of a run", "smallest change"), rows)
    print(json.dumps(found))


if __name__ == "__main__":
    try:
        tyro.cli(main, prog="python -m evals.detectable")
    except ValueError as problem:
        raise SystemExit(f"detectable: {problem}") from None
