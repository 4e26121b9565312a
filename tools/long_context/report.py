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
from .tasks import VALUES

Result = dict[str, Any]
ROUNDING = 0.02  # nats by which a mean of eight texts may differ without a cause
TRUNK = ("delay", "layout", "seed")
QUESTIONS = {
    "recall": ("recall", "1"),
    "keys": ("keys", "1"),
    "1 hop": ("hops", "1"),
    "2 hops": ("hops", "2"),
}


def ends(right: float, asked: float) -> tuple[float, float]:
    """Of Wilson's 95% interval of a share."""
    if not asked:
        return 0.0, 1.0
    middle, half = wilson(right, int(asked))
    return middle - half, middle + half


def counts(results: Iterable[Result], question: str, length: int, where: str = "answered") -> list[float]:
    """Questions of these results together: answered, asked, and the loss of all answers."""
    kind, hops = QUESTIONS[question]
    found = [r[where][f"{kind}-{length}"].get(hops, [0, 0, 0.0]) for r in results]
    return [sum(each) for each in zip(*found, strict=True)]


def said(right: float, asked: float, nats: float) -> str:
    if not asked:
        return "-"
    low, high = ends(right, asked)
    return f"{100 * right / asked:.0f} ({100 * low:.0f}-{100 * high:.0f}), {nats / asked:.2f}"


def section(results: Sequence[Result], plan: Plan) -> str:
    """Everything that the results say, also of an experiment that is not over."""
    measured = [r for r in results if "answered" in r]
    lengths = [stage.seq_len for stage in plan.stages]
    planned = sum(len(group) for group in plan.groups())
    parts = [
        heading("Delay, layout and rope at long context", "python -m tools.long_context"),
        f"{len(results)} of {planned} runs; {len(results) - len(measured)} have diverged. By position: nats "
        "a token of held-out text. Of questions: percentage answered, its 95% interval, nats of an answer "
        f"({math.log(len(VALUES)):.2f} where any value is as likely as another).",
    ]
    for stage, length in enumerate(lengths):
        if own := [r for r in measured if r["stage"] == stage]:
            tables = [arms(own, lengths[: stage + 2]), rises(own, lengths[0])]
            parts += [f"### After windows of {length}", *tables]
    final = [r for r in measured if r["stage"] == len(lengths) - 1]
    parts += ["### Each factor, all else equal", effects(final, lengths[-1])] if final else []
    return "\n\n".join([*parts, "### The planted fault", control(measured, lengths[0])])


def arms(results: Sequence[Result], lengths: Sequence[int]) -> str:
    asked = list(itertools.product(lengths, QUESTIONS))
    names = [*results[0]["loss_by_position"], *(f"{question} @ {length}" for length, question in asked)]
    rows = [
        [r["delay"], r["layout"], r["rope"] or "-", r["seed"]]
        + [f"{x:.3f}" for x in r["loss_by_position"].values()]
        + [said(*counts([r], question, length)) for length, question in asked]
        for r in results
    ]
    return table(["delay", "full layers", "rope", "seed", *names], rows)


def effects(results: Sequence[Result], length: int) -> str:
    """Of every factor, each value against the first. The ropes of a trunk are not independent, so where the
    trunks differ, all ropes of a trunk count as one.
    """
    lines = []
    for factor in ("delay", "layout", "rope"):
        units: dict[tuple[Any, ...], dict[Any, list[Result]]] = defaultdict(lambda: defaultdict(list))
        for r in results:
            units[tuple(r[name] for name in TRUNK if name != factor)][r[factor]].append(r)
        first, *others = dict.fromkeys(r[factor] for r in results)
        for other, question in itertools.product(others, QUESTIONS):
            pairs = [(u[other], u[first]) for u in units.values() if len(u[other]) == len(u[first]) > 0]
            if len(pairs) > 1:
                means = [difference(pairs, question, length, i) for i in (0, 2)]
                lines.append([factor, f"{other} - {first}", question, len(pairs), *means])
    return table(["factor", "difference", f"at {length}", "pairs", "share answered", "nats an answer"], lines)


def difference(pairs: Sequence[tuple[list[Result], ...]], question: str, length: int, i: int) -> str:
    """Mean over the pairs, with its 95% t interval, of a count for each question that is asked."""
    found = [[counts(own, question, length) for own in pair] for pair in pairs]
    mean, half, _ = interval([a[i] / (a[1] or 1) - b[i] / (b[1] or 1) for a, b in found])
    return f"{mean:+.3f} ± {half:.3f}"


def rises(results: Sequence[Result], trunk: int) -> str:
    """Whose loss behind the trunk's length is above that of the same tokens with little before them."""
    rising = [
        f"{r['name']} at {name} ({own:.3f}, {r['loss_near'][name]:.3f})"
        for r in results
        for name, own in r["loss_by_position"].items()
        if int(name.split("-")[1]) > trunk and own > r["loss_near"][name] + ROUNDING
    ]
    return (
        f"Of {len(results)} runs those whose loss behind {trunk} is more than {ROUNDING} nats above that of "
        f"the same tokens with {trunk // 2} to {trunk} before each: {'; '.join(rising) or 'none'}."
    )


def control(results: Sequence[Result], length: int) -> str:
    """What a lane whose keys are lost answers less, over all runs."""
    lines = []
    for question in ("recall", "keys", "1 hop"):
        whole, without = (counts(results, question, length, where) for where in ("answered", "control"))
        found = ends(*without[:2])[1] < ends(*whole[:2])[0]
        lines.append([question, said(*whole), said(*without), "found" if found else "NOT FOUND"])
    return table(["questions", "answered", "one lane's keys lost", "the fault is"], lines)
