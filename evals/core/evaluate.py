"""CORE on a model: score every task of a bundle and print the table; or count the tokens that this would read.

In a multiple-choice or schema task the option with the lowest mean loss per token is chosen; a continuation is right if
each of its tokens is the argmax. CORE is the mean of the centered accuracies of all 22 tasks, else null.

    centered = (accuracy - baseline) / (1 - baseline)
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from evals.core.prompts import FEWSHOT_SEED, Item, Prompt, Protocol, Unscorable, items
from evals.core.tasks import CATEGORIES, NOT_CHOSEN, TASKS, WHERE_FROM, Bundle, Task
from evals.scorer import Scorer, TextEncoder, common_prefix
from records.files import write_atomically

VERSIONS = ("v1", "v2")
console = Console(stderr=True)
Tasks = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Settings:
    """What is asked."""

    protocol: Protocol = "nanochat"
    """prompt format and few-shot examples; scores of different protocols cannot be compared"""
    max_per_task: int | None = None
    """items to score per task; default: all"""
    tasks: tuple[str, ...] = ()
    """labels of the tasks to score; default: all, which CORE itself requires"""

    def __post_init__(self) -> None:
        if self.max_per_task is not None and self.max_per_task < 1:
            raise ValueError(f"--max-per-task {self.max_per_task} must be at least 1")


def is_right(scorer: Scorer, item: Item) -> bool:
    """Whether the model answers an item correctly."""
    if len(item.prompts) == 1:
        return bool(scorer.score(item.prompts[0].ids, item.prompts[0].start).greedy.all())
    losses = [mean_loss(scorer, prompt) for prompt in item.prompts]
    return min(range(len(losses)), key=losses.__getitem__) == item.gold


def mean_loss(scorer: Scorer, prompt: Prompt) -> float:
    """Nats per token of an option; NaN, as in nanochat, if it has no token of its own ("hot" before "hot air").

    Comparisons with NaN are false, so such an option is chosen if it is the first, and never otherwise.
    """
    if prompt.start == len(prompt.ids):
        return float("nan")
    return -float(scorer.score(prompt.ids, prompt.start).logprobs.mean())


def score_task(
    task: Task,
    bundle: Bundle,
    protocol: Protocol,
    scorer: Scorer,
    most: int | None,
    advance: Callable[..., None] = lambda **_: None,
) -> dict[str, Any]:
    """The figures of one task. Raises Unscorable if an item does not fit into the model's context."""
    rows = bundle.rows(task)
    total = len(rows) if most is None else min(most, len(rows))
    right: dict[str, list[bool]] = {}
    for done, item in enumerate(items(task, rows, protocol, scorer, scorer.max_length, most)):
        advance(completed=done, total=total)
        right.setdefault(item.group, []).append(is_right(scorer, item))
    return task_figures(task, right, len(rows))


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
    categories = {}
    for category in CATEGORIES:
        members = [task for task in TASKS if task.category == category]
        categories[category] = {"tasks": len(members), **means(tasks, members, "centered")}
    return {**means(tasks, TASKS, "core"), "categories": categories}


def means(tasks: Mapping[str, Mapping[str, Any]], members: Sequence[Task], name: str) -> dict[str, float | None]:
    """Mean centered accuracies of `members`, `name`_v1 and _v2, and their standard errors; None if one is missing."""
    found: dict[str, float | None] = {}
    for version in VERSIONS:
        mean = error = None
        if all(task.label in tasks for task in members):
            mean = math.fsum(tasks[task.label][f"centered_{version}"] for task in members) / len(members)
            errors = [tasks[task.label]["standard_error"] / (1 - baseline(task, version)) for task in members]
            error = math.sqrt(math.fsum(e**2 for e in errors)) / len(members)
        found |= {f"{name}_{version}": mean, f"{name}_{version}_se": error}
    return found


class Partial:
    """Finished tasks of an interrupted evaluation: a JSON file next to `out`, or nothing if `out` is None.

    `key` identifies everything that determines the figures; a file with another key is ignored.
    """

    def __init__(self, out: Path | None, key: str):
        self.path = out and out.with_name(f".{out.name}.core-{key[:16]}.json")
        self.tasks: Tasks = json.loads(self.path.read_bytes()) if self.path and self.path.is_file() else {}

    def add(self, label: str, figures: dict[str, Any]) -> None:
        self.tasks[label] = figures
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, json.dumps(self.tasks))

    def remove(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def evaluate(scorer: Scorer, bundle: Bundle, settings: Settings, partial: Partial) -> dict[str, Any]:
    """Score the tasks; returns the figures of a `core` record."""
    chosen, missing = bundle.chosen(settings.tasks)
    protocol, most = settings.protocol, settings.max_per_task
    tasks: Tasks = {}
    columns = (TextColumn("{task.description:>32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        for task in chosen:
            bar = progress.add_task(task.label, total=None)
            try:
                if task.label not in partial.tasks:
                    advance = functools.partial(progress.update, bar)
                    partial.add(task.label, score_task(task, bundle, protocol, scorer, most, advance))
                tasks[task.label] = partial.tasks[task.label]
            except Unscorable as error:
                missing[task.label] = str(error)
            progress.remove_task(bar)
    asked = {"protocol": protocol, "seed": FEWSHOT_SEED, "max_per_task": most, "scorer": scorer.name}
    marks = {} if bundle.not_core is None else {"not_core": bundle.not_core}
    return asked | aggregate(tasks) | {"tasks": tasks, "missing": missing, "differs": bundle.differs} | marks


def show(figures: dict[str, Any], bundle: Bundle) -> None:
    """Print the tasks that were scored as a table on stderr, and in a line or two why others were not."""
    title = "" if bundle.not_core is None else f"{bundle.not_core}\n"
    table = Table(
        title=f"{title}CORE tasks, protocol {figures['protocol']}", box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for name in ("task", "shots", "n", "accuracy ± SE", "centered\nv1", "centered\nv2"):
        table.add_column(name, justify="left" if name == "task" else "right", overflow="fold")
    for label, task in figures["tasks"].items():
        accuracy = f"{task['accuracy']:.4f} ± {task['standard_error']:.4f}"
        centered = (f"{task[f'centered_{version}']:.4f}" for version in VERSIONS)
        table.add_row(label, str(task["shots"]), str(task["n"]), accuracy, *centered)
    table.add_section()
    for version in VERSIONS:
        value, error = figures[f"core_{version}"], figures[f"core_{version}_se"]
        if value is not None:
            text = f"{value:.4f} ± {error:.4f}"
            table.add_row(f"CORE {version}", "", "", "", *((text, "") if version == "v1" else ("", text)))
    console.print(table)
    for line in remarks(figures, bundle):
        console.print(line, highlight=False, markup=False)


def remarks(figures: dict[str, Any], bundle: Bundle) -> list[str]:
    """Lines under the table: why CORE is not computed, tasks that could not be scored, settings that are not CORE's."""
    absent = [task.label for task in bundle.tasks if bundle.missing(task)]
    failed = {label: why for label, why in figures["missing"].items() if label not in absent}
    skipped = [label for label, why in failed.items() if why == NOT_CHOSEN]
    lines = []
    if absent:
        lines.append(f"{len(absent)} of {len(TASKS)} tasks are not in this bundle: CORE is not computed.")
        if bundle.not_core is None:
            lines.append(f"Missing: {', '.join(absent)}; copy their files from {WHERE_FROM}.")
    if skipped:
        lines.append(f"{len(skipped)} tasks were not chosen by --tasks: CORE is not computed.")
    lines += [f"{label} could not be scored: {why}" for label, why in failed.items() if why != NOT_CHOSEN]
    return lines + [f"{label}: core.yaml sets {values}, unlike CORE" for label, values in figures["differs"].items()]


def plan(encoder: TextEncoder, max_length: int, bundle: Bundle, settings: Settings) -> dict[str, Any]:
    """Tokens that the model must read, per task and in total, with and without sharing the prefixes of an item."""
    chosen, missing = bundle.chosen(settings.tasks)
    counts: dict[str, dict[str, int]] = {}
    before: list[int] = []
    for task in chosen:
        asked = unshared = shared = 0
        rows = bundle.rows(task)
        for item in items(task, rows, settings.protocol, encoder, max_length, settings.max_per_task):
            asked += 1
            for prompt in (p for p in item.prompts if p.start < len(p.ids)):
                read = prompt.ids[:-1]  # the last token is only predicted
                unshared += len(read)
                shared += len(read) - min(common_prefix(before, read), prompt.start - 1)
                before = read
        counts[task.label] = {"items": asked, "tokens": unshared, "tokens_shared": shared}
    sums = {name: sum(task[name] for task in counts.values()) for name in ("items", "tokens", "tokens_shared")}
    head = {"protocol": settings.protocol, "max_per_task": settings.max_per_task}
    return {**head, **sums, "tasks": counts, "missing": missing}


def show_plan(counts: dict[str, Any], tokens_per_s: float | None) -> None:
    """Print the plan as a table on stderr."""
    most = "all" if counts["max_per_task"] is None else f"at most {counts['max_per_task']}"
    table = Table(title=f"Tokens to read, protocol {counts['protocol']}, {most} items per task")
    for name in ("task", "items", "tokens", "with shared prefixes"):
        table.add_column(name, justify="left" if name == "task" else "right")
    for label, row in (*counts["tasks"].items(), ("all", counts)):
        table.add_row(label, *(f"{row[name]:,}" for name in ("items", "tokens", "tokens_shared")))
    if tokens_per_s is not None:
        minutes = (f"{counts[name] / tokens_per_s / 60:.1f} min" for name in ("tokens", "tokens_shared"))
        table.add_row(f"at {tokens_per_s:,.0f} tokens/s", "", *minutes)
    console.print(table)
    if counts["missing"]:
        console.print(f"{len(counts['missing'])} of {len(TASKS)} tasks are not counted.", highlight=False)
