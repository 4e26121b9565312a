"""The results as Markdown: loss by position, questions answered with Wilson's 95% intervals, and each factor's."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from evals.intervals import wilson
from tools.ablate.page import heading
from tools.ablate.report import interval
from tools.markdown import table

from .plan import Plan
from .tasks import CHANCE, KINDS

Result = dict[str, Any]
ROUNDING = 0.02  # nats by which a mean of eight texts may rise without a cause
FACTORS = ("delay", "layout", "rope")


def ends(right: int, asked: int) -> tuple[float, float]:
    """Of Wilson's 95% interval of a share."""
    if not asked:
        return 0.0, 1.0
    middle, half = wilson(right, asked)
    return middle - half, middle + half


def counts(
    results: Iterable[Result], kind: str, length: int, hops: Iterable[int], where: str = "answered"
) -> tuple[int, int]:
    """Questions of these results together: answered, asked."""
    found = [r[where][f"{kind}-{length}"].get(str(h), [0, 0]) for r in results for h in hops]
    return sum(right for right, _ in found), sum(asked for _, asked in found)


def percent(right: int, asked: int) -> str:
    if not asked:
        return "-"
    low, high = ends(right, asked)
    return f"{100 * right / asked:.0f} ({100 * low:.0f}-{100 * high:.0f})"


def columns(length: int) -> list[tuple[str, str, tuple[int, ...], int]]:
    own = [("recall", "recall", (1,)), ("keys", "keys", (1,))]
    return [(*each, length) for each in [*own, *((f"{h} hops", "hops", (h,)) for h in (2, 3, 4))]]


def section(results: Sequence[Result], plan: Plan) -> str:
    """Everything that the results say, also of an experiment that is not over."""
    measured = [r for r in results if "answered" in r]
    last, lengths = len(plan.stages) - 1, [stage.seq_len for stage in plan.stages]
    planned = sum(len(group) for group in plan.groups())
    parts = [
        heading("Delay, layout and rope at long context", "python -m tools.long_context"),
        f"{len(results)} of {planned} runs; {len(results) - len(measured)} have diverged. Chance answers "
        f"{100 * CHANCE:.0f}% of the questions.",
    ]
    for stage in range(last + 1):
        if own := [r for r in measured if r["stage"] == stage]:
            name = f"after windows of {lengths[stage]}"
            parts += [f"### {name[0].upper()}{name[1:]}", losses(own), accuracies(own, lengths[: stage + 1])]
    if final := [r for r in measured if r["stage"] == last]:
        parts += ["### Each factor, all else paired", *effects(final, lengths[-1]), *rises(final, lengths)]
    return "\n\n".join([*parts, "### The planted fault", control(measured, lengths[0])])


def arm(r: Result) -> list[str]:
    return [str(r["delay"]), r["layout"], r["rope"] or "-", str(r["seed"])]


def losses(results: Sequence[Result]) -> str:
    head = [
        "delay",
        "full layers",
        "rope",
        "seed",
        *(f"nats at {name}" for name in results[0]["loss_by_position"]),
    ]
    return table(head, [[*arm(r), *(f"{x:.3f}" for x in r["loss_by_position"].values())] for r in results])


def accuracies(results: Sequence[Result], lengths: Sequence[int]) -> str:
    """Percent of questions answered, with intervals, at each length."""
    asked = [each for length in lengths for each in columns(length)]
    head = ["delay", "full layers", "rope", "seed", *(f"{name} @ {length}" for name, *_, length in asked)]
    rows = [
        [*arm(r), *(percent(*counts([r], kind, length, hops)) for _, kind, hops, length in asked)]
        for r in results
    ]
    return table(head, rows)


def effects(results: Sequence[Result], length: int) -> list[str]:
    """Of every factor, each value against the first: mean difference over runs that are equal in all else."""
    lines = []
    for factor in FACTORS:
        by_rest: dict[tuple[Any, ...], dict[Any, Result]] = defaultdict(dict)
        for r in results:
            by_rest[tuple(r[name] for name in (*FACTORS, "seed") if name != factor)][r[factor]] = r
        first, *others = dict.fromkeys(r[factor] for r in results)
        for other, (name, kind, hops, _) in itertools.product(others, columns(length)):
            pairs = [(own[other], own[first]) for own in by_rest.values() if {first, other} <= own.keys()]
            differences = [share(a, kind, length, hops) - share(b, kind, length, hops) for a, b in pairs]
            if len(differences) > 1:
                mean, half, _ = interval(differences)
                lines.append(
                    (factor, f"{other} - {first}", name, len(pairs), f"{100 * mean:+.1f} ± {100 * half:.1f}")
                )
    head = ["factor", "difference", f"questions at {length}", "pairs", "points, 95% t interval"]
    return [table(head, lines)] if lines else []


def share(r: Result, kind: str, length: int, hops: tuple[int, ...]) -> float:
    right, asked = counts([r], kind, length, hops)
    return right / asked if asked else math.nan


def rises(results: Sequence[Result], lengths: Sequence[int]) -> list[str]:
    """Whether the loss rises beyond the trunk's length, by arm."""
    rising = []
    for r in results:
        inside, beyond = (
            [x for name, x in r["loss_by_position"].items() if (int(name.split("-")[1]) > lengths[0]) == far]
            for far in (False, True)
        )
        if max(beyond) > inside[-1] + ROUNDING:
            rising.append(f"{r['name']} ({inside[-1]:.3f} to {max(beyond):.3f})")
    said = "; ".join(rising) or "none"
    return [f"Loss by position that rises beyond {lengths[0]} by more than {ROUNDING} nats: {said}."]


def control(results: Sequence[Result], length: int) -> str:
    """What a lane whose keys are lost answers less, over all runs."""
    lines = []
    for kind in KINDS:
        hops = (1,) if kind != "hops" else (1, 2, 3, 4)
        whole, without = (counts(results, kind, length, hops, where) for where in ("answered", "control"))
        found = ends(*without)[1] < ends(*whole)[0]
        lines.append((kind, percent(*whole), percent(*without), "found" if found else "NOT FOUND"))
    head = ["questions", "answered, %", "one lane's keys lost, %", "the fault is"]
    return table(head, lines)
