"""The results as Markdown: loss by position, questions answered with Wilson's 95% intervals, and each factor's."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from evals.intervals import wilson
from tools.ablate.page import heading
from tools.ablate.report import interval
from tools.markdown import table

from .plan import Plan
from .tasks import CHANCE, HOPS, KINDS

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
    results: Iterable[Result], kind: str, length: int, hops: int = 1, where: str = "answered"
) -> list[float]:
    """Questions of these results together: answered, asked, and the loss of all answers."""
    found = [r[where][f"{kind}-{length}"].get(str(hops), [0, 0, 0.0]) for r in results]
    return [sum(each) for each in zip(*found, strict=True)]


def said(right: float, asked: float, nats: float) -> str:
    if not asked:
        return "-"
    low, high = ends(int(right), int(asked))
    return f"{100 * right / asked:.0f} ({100 * low:.0f}-{100 * high:.0f}), {nats / asked:.2f}"


def columns(length: int) -> list[tuple[str, str, int, int]]:
    hops = [(f"{h} hops", "hops", h) for h in range(2, HOPS + 1)]
    return [(*each, length) for each in [("recall", "recall", 1), ("keys", "keys", 1), *hops]]


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
            tables = [losses(own), rises(own, lengths[0]), accuracies(own, lengths[: stage + 2])]
            parts += [f"### {name[0].upper()}{name[1:]}", *tables]
    if final := [r for r in measured if r["stage"] == last]:
        parts += ["### Each factor, all else paired", *effects(final, lengths[-1])]
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
    """Percent of questions answered, with intervals, and nats an answer, at each length."""
    asked = [each for length in lengths for each in columns(length)]
    head = ["delay", "full layers", "rope", "seed", *(f"{name} @ {length}" for name, *_, length in asked)]
    rows = [
        [*arm(r), *(said(*counts([r], kind, length, hops)) for _, kind, hops, length in asked)]
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
        for other, (name, *what) in itertools.product(others, columns(length)):
            pairs = [(own[other], own[first]) for own in by_rest.values() if {first, other} <= own.keys()]
            if len(pairs) > 1:
                points, nats = (difference(pairs, what, i) for i in (0, 2))
                lines.append((factor, f"{other} - {first}", name, len(pairs), points, nats))
    head = ["factor", "difference", f"questions at {length}", "pairs", "share answered", "nats an answer"]
    return [table(head, lines)] if lines else []


def difference(pairs: Sequence[tuple[Result, Result]], what: Sequence[Any], i: int) -> str:
    """Mean over the pairs, with its 95% t interval, of a count for each question that is asked."""
    kind, hops, length = what
    each = [
        [found[i] / found[1] for found in (counts([r], kind, length, hops) for r in pair)] for pair in pairs
    ]
    mean, half, _ = interval([a - b for a, b in each])
    return f"{mean:+.3f} ± {half:.3f}"


def rises(results: Sequence[Result], trunk: int) -> str:
    """Whose loss rises behind the trunk's length."""
    rising = []
    for r in results:
        means = [(int(name.split("-")[1]) > trunk, x) for name, x in r["loss_by_position"].items()]
        inside, beyond = ([x for far, x in means if far == which] for which in (False, True))
        if max(beyond, default=0) > inside[-1] + ROUNDING:
            rising.append(f"{r['name']} ({inside[-1]:.3f} to {max(beyond):.3f})")
    return f"Loss that rises behind {trunk} by more than {ROUNDING} nats: {'; '.join(rising) or 'none'}."


def control(results: Sequence[Result], length: int) -> str:
    """What a lane whose keys are lost answers less, over all runs."""
    lines = []
    for kind in KINDS:
        whole, without = (counts(results, kind, length, where=where) for where in ("answered", "control"))
        (high, low) = (ends(int(each[0]), int(each[1])) for each in (without, whole))
        lines.append((kind, said(*whole), said(*without), "found" if high[1] < low[0] else "NOT FOUND"))
    head = ["questions of one hop", "answered, %, nats", "one lane's keys lost", "the fault is"]
    return table(head, lines)
