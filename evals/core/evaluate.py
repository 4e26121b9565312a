"""CORE on a model: the mean of the centered accuracies of all 22 tasks, else null.

    centered = (accuracy - baseline) / (1 - baseline)

The option with the lowest mean loss per token is chosen; a continuation is right if each of its tokens is the argmax.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from rich.progress import track

from evals.core.prompts import FEWSHOT_SEED, Item, Protocol, Unscorable, items
from evals.core.tasks import CATEGORIES, NOT_CHOSEN, TASKS, WHERE_FROM, Bundle, Task
from evals.intervals import Z95, wilson
from evals.items import Partial
from evals.scorer import Encoder, Scorer, Scores, score_each
from evals.tables import console, show_table
from records.command import check_ranges
from records.evals import Limit, optional
from records.files import JsonObject
from records.items import error_of_mean, gold_bits, mean_of_bits

VERSIONS = ("v1", "v2")
# one item: group, right, losses (nats per token of each option), gold, its nats and bytes
ItemAnswer = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """Which items are scored, and their prompts."""

    protocol: Protocol = "nanochat"
    """prompt format and few-shot examples; scores of different protocols cannot be compared"""
    limit: Limit = None
    """maximum number of items to score per task"""
    tasks: Annotated[str, optional("A,B", "all 22")] = ""
    """comma-separated labels of the tasks to score; CORE itself requires all"""

    def __post_init__(self) -> None:
        check_ranges(Settings, vars(self))
        self.labels()

    def labels(self) -> list[str]:
        """Return the labels in `tasks`, all if it is empty."""
        labels = [task.label for task in TASKS]
        chosen = [label.strip() for label in self.tasks.split(",")] if self.tasks else labels
        if unknown := sorted(set(chosen) - set(labels)):
            raise ValueError(f"--tasks: {unknown} are not in CORE; choose from {','.join(labels)}")
        return chosen


def judge_item(encoder: Encoder, item: Item, scores: Sequence[Scores]) -> ItemAnswer:
    """Judge an answer, and measure the nats of the right one."""
    # nats per token; NaN, as in nanochat, for an option without a token of its own ("hot" before
    # "hot air"): comparisons with NaN are false, so it is chosen if it is the first, and never
    # otherwise
    losses = [-float(s.logprobs.mean()) if len(s.logprobs) else math.nan for s in scores]
    if len(losses) == 1:
        right = bool(scores[0].greedy.all())
        gold = 0
    else:
        right = min(range(len(losses)), key=losses.__getitem__) == item.gold
        gold = item.gold
    ids, start = item.prompts[gold]
    return {
        "group": item.group,
        "right": right,
        "losses": [None if math.isnan(loss) else loss for loss in losses],
        "gold": gold,
        "nats": -float(scores[gold].logprobs.sum()),
        "bytes": len(encoder.text_after(ids[:start], ids[start:]).encode()),
    }


def score_task(
    task: Task, bundle: Bundle, settings: Settings, scorer: Scorer, partial: Partial
) -> list[ItemAnswer]:
    """Answer the items of one task, but those in `partial`.

    Raises:
        Unscorable: one does not fit into the context.
    """
    rows = bundle.rows(task)
    limit = settings.limit
    room = min(scorer.max_length, scorer.max_scored_ids)

    def answer(remaining: Iterator[Item]) -> Iterator[ItemAnswer]:
        scored = score_each(scorer, remaining, lambda item: item.prompts)
        total = len(rows[:limit])
        for item, scores in track(
            scored, f"{task.label:>32}", total, console=console, transient=True
        ):
            yield judge_item(scorer, item, scores)

    return partial.complete(
        task.label, items(task, rows, settings.protocol, scorer, room, limit), answer
    )


def baseline(task: Task, version: str) -> float:
    """Return the accuracy of guessing, 0 to 1."""
    return 0.01 * (task.baseline_v1 if version == "v1" else task.baseline_v2)


def center_accuracy(task: Task, accuracy: float, version: str) -> float:
    """Center an accuracy: 0 at the baseline, 1 if every answer is right."""
    return (accuracy - baseline(task, version)) / (1 - baseline(task, version))


def summarize_task(task: Task, answers: Sequence[ItemAnswer], n_total: int) -> JsonObject:
    """Compute the figures of a task (records.evals.FIELDS). n_total: rows in the file."""
    right: dict[str, list[bool]] = {}
    for answer in answers:
        right.setdefault(answer["group"], []).append(answer["right"])
    # groups have equal weight
    accuracy = math.fsum(sum(group) / len(group) for group in right.values()) / len(right)
    parts = [wilson(sum(group), len(group)) for group in right.values()]
    middle = math.fsum(center for center, _ in parts) / len(parts)
    half = math.sqrt(math.fsum(width**2 for _, width in parts)) / len(parts)
    return {
        "accuracy": accuracy,
        **{f"centered_{version}": center_accuracy(task, accuracy, version) for version in VERSIONS},
        "interval": [max(0.0, middle - half), min(1.0, middle + half)],
        "standard_error": half / Z95,
        "gold_bits_per_byte": gold_bits(answers),
        "n": len(answers),
        "n_total": n_total,
        "shots": task.shots,
        "baseline_v1": task.baseline_v1,
        "baseline_v2": task.baseline_v2,
        "type": task.type,
        "category": task.category,
    }


def aggregate(figures_by_task: Mapping[str, Mapping[str, Any]]) -> JsonObject:
    """Compute CORE, its standard errors and the means by category from the figures of the tasks."""
    # null unless all tasks are given: the mean of some is another number
    categories = {}
    for category in CATEGORIES:
        members = [task for task in TASKS if task.category == category]
        categories[category] = {
            "tasks": len(members),
            **average_centered(figures_by_task, members, "centered"),
        }
    return {**average_centered(figures_by_task, TASKS, "core"), "categories": categories}


def compare_core(figures_by_task: Mapping[str, JsonObject]) -> JsonObject:
    of_core = [task for task in TASKS if task.label in figures_by_task]
    centered = {}
    for task in of_core:
        row = figures_by_task[task.label]
        centered[task.label] = {"standard_error": row["standard_error"]}
        for version in VERSIONS:
            change = row["difference"] / (1 - baseline(task, version))
            centered[task.label][f"centered_{version}"] = change
    differences = aggregate(centered)
    for category, row in differences["categories"].items():
        row |= mean_of_bits(
            figures_by_task[task.label] for task in of_core if task.category == category
        )
    return differences | mean_of_bits(figures_by_task.values())


def average_centered(
    figures_by_task: Mapping[str, Mapping[str, Any]], members: Sequence[Task], name: str
) -> dict[str, float | None]:
    """Average centered accuracies as `name`_v1 and _v2, with standard errors; None if a task is missing."""
    figures: dict[str, float | None] = {}
    for version in VERSIONS:
        mean = error = None
        if all(task.label in figures_by_task for task in members):
            mean = math.fsum(
                figures_by_task[task.label][f"centered_{version}"] for task in members
            ) / len(members)
            errors = [
                figures_by_task[task.label]["standard_error"] / (1 - baseline(task, version))
                for task in members
            ]
            error = error_of_mean(errors)
        figures |= {f"{name}_{version}": mean, f"{name}_{version}_se": error}
    return figures


def evaluate(scorer: Scorer, bundle: Bundle, settings: Settings, partial: Partial) -> JsonObject:
    """Score the tasks; return the figures of a `core` record. Afterwards `partial` holds every answer."""
    chosen, missing = bundle.choose(settings.labels())
    figures_by_task: dict[str, JsonObject] = {}
    for task in chosen:
        try:
            answers = score_task(task, bundle, settings, scorer, partial)
            figures_by_task[task.label] = summarize_task(task, answers, len(bundle.rows(task)))
        except Unscorable as error:
            missing[task.label] = str(error)
    bits = [
        task["gold_bits_per_byte"]
        for task in figures_by_task.values()
        if task["gold_bits_per_byte"] is not None
    ]
    figures = {
        "protocol": settings.protocol,
        "seed": FEWSHOT_SEED,
        "limit": settings.limit,
        **aggregate(figures_by_task),
        "gold_bits_per_byte": math.fsum(bits) / len(bits) if bits else None,
        "tasks": figures_by_task,
        "missing": missing,
        "differs": bundle.differs,
    }
    return figures if bundle.not_core is None else {**figures, "not_core": bundle.not_core}


def show(figures: JsonObject, bundle: Bundle) -> None:
    title = "" if bundle.not_core is None else f"{bundle.not_core}\n"
    title += (
        f"CORE tasks, {figures['protocol']}: accuracy, centered on v1 and v2, gold bits per byte"
    )
    # with the longest task name a row is 80 columns wide
    rows = []
    for label, task in figures["tasks"].items():
        low, high = task["interval"]
        numbers = [f"{task['n']}", f"{task['accuracy']:.3f}", f"{low:.2f}–{high:.2f}"]
        numbers += [f"{task[f'centered_{version}']:.3f}" for version in VERSIONS]
        bits = task["gold_bits_per_byte"]
        rows.append([label, *numbers, "" if bits is None else f"{bits:.3f}"])
    show_table(title, ("task", "n", "accuracy", "95 %", "v1", "v2", "bits"), rows)
    for version in VERSIONS:
        value = figures[f"core_{version}"]
        error = figures[f"core_{version}_se"]
        if value is not None:
            console.print(f"CORE {version}  {value:.4f} ± {error:.4f}")
    for line in list_remarks(figures, bundle):
        console.print(line, highlight=False, markup=False)


def list_remarks(figures: JsonObject, bundle: Bundle) -> list[str]:
    absent = {task.label for task in bundle.tasks if bundle.missing(task)}
    not_chosen = {label for label, reason in figures["missing"].items() if reason == NOT_CHOSEN}
    lines = []
    for labels, remark in (
        (absent, "are not in this bundle"),
        (not_chosen, "were not chosen by --tasks"),
    ):
        if labels:
            lines.append(f"{len(labels)} of {len(TASKS)} tasks {remark}: CORE is not computed.")
    if absent and bundle.not_core is None:
        names = [task.label for task in TASKS if task.label in absent]
        lines.append(f"Missing: {', '.join(names)}; copy their files from {WHERE_FROM}.")
    for label in figures["missing"].keys() - absent - not_chosen:
        lines.append(f"{label} could not be scored: {figures['missing'][label]}")
    for label, values in figures["differs"].items():
        lines.append(f"{label}: core.yaml sets {values}, unlike CORE")
    return lines
