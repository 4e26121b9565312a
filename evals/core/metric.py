"""CORE: accuracies centered on the guessing baseline, their mean over 22 tasks, and its standard error.

    centered = (accuracy - baseline) / (1 - baseline)      CORE = mean of the centered accuracies

CORE is null if a task is missing: the mean of the others is not comparable with anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from evals.core.tasks import CATEGORIES, TASKS, Task

VERSIONS = ("v1", "v2")


def baseline(task: Task, version: str) -> float:
    """Accuracy of guessing, 0 to 1."""
    return 0.01 * (task.baseline_v1 if version == "v1" else task.baseline_v2)


def centered(task: Task, accuracy: float, version: str) -> float:
    """Centered accuracy: 0 at the baseline, 1 if every answer is right, negative below the baseline."""
    return (accuracy - baseline(task, version)) / (1 - baseline(task, version))


def task_figures(task: Task, right: Mapping[str, Sequence[bool]], n_total: int) -> dict[str, Any]:
    """The figures of a task. right: by group, whether each item was answered correctly; groups have equal weight.

    standard_error: binomial, of the accuracy. n: items asked. n_total: rows in the file.
    """
    shares = {group: sum(answers) / len(answers) for group, answers in right.items()}
    accuracy = math.fsum(shares.values()) / len(shares)
    variance = math.fsum(share * (1 - share) / len(right[group]) for group, share in shares.items())
    return {
        "accuracy": accuracy,
        **{f"centered_{version}": centered(task, accuracy, version) for version in VERSIONS},
        "standard_error": math.sqrt(variance) / len(shares),
        "n": sum(len(answers) for answers in right.values()),
        "n_total": n_total,
        "shots": task.shots,
        "baseline_v1": task.baseline_v1,
        "baseline_v2": task.baseline_v2,
        "type": task.type,
        "category": task.category,
    }


def aggregate(tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """core_v1, core_v2, their standard errors and the means of each category, from the figures of the tasks.

    CORE is null unless all 22 tasks are given, a category's means unless all of its tasks are.
    """
    result: dict[str, Any] = {}
    for version in VERSIONS:
        whole = means(tasks, TASKS, version)
        result |= {f"core_{version}": whole and whole[0], f"core_{version}_se": whole and whole[1]}
    result["categories"] = {}
    for category in CATEGORIES:
        members = [task for task in TASKS if task.category == category]
        figures: dict[str, Any] = {"tasks": len(members)}
        for version in VERSIONS:
            found = means(tasks, members, version)
            figures |= {f"centered_{version}": found and found[0], f"centered_{version}_se": found and found[1]}
        result["categories"][category] = figures
    return result


def means(tasks: Mapping[str, Mapping[str, Any]], members: Sequence[Task], version: str) -> tuple[float, float] | None:
    """Mean centered accuracy of `members` and its standard error; None if one of them is missing."""
    if any(task.label not in tasks for task in members):
        return None
    mean = math.fsum(tasks[task.label][f"centered_{version}"] for task in members) / len(members)
    errors = [tasks[task.label]["standard_error"] / (1 - baseline(task, version)) for task in members]
    return mean, math.sqrt(math.fsum(error**2 for error in errors)) / len(members)
