"""Results to paired differences: per seed against the same seed of the baseline, with a t interval."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.stats import nct
from scipy.stats import t as student_t

from records.files import read_lines

Result = dict[str, Any]
Row = dict[str, Any]
POWER = 0.8


def read_results(path: Path) -> list[Result]:
    """The lines of results.jsonl; a run that diverged has an infinite loss."""
    return [
        {**r, "valid_loss": math.inf if r["valid_loss"] is None else r["valid_loss"]}
        for r in read_lines(path)
    ]


def swept(results: Sequence[Result]) -> dict[tuple[str, str], dict[float, float]]:
    """Mean loss of each learning rate of each size and variant, over seeds; of those rates that
    have the most seeds.
    """
    losses: dict[tuple[str, str], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for r in results:
        losses[r["size"], r["variant"]][r["learning_rate"]].append(r["valid_loss"])
    found = {}
    for key, rates in losses.items():
        most = max(map(len, rates.values()))
        found[key] = {rate: sum(own) / most for rate, own in rates.items() if len(own) == most}
    return found


def paired(results: Sequence[Result], baseline: str) -> list[Row]:
    """Every size and variant against the baseline, each at its best of the learning rates
    that both have tried.
    """
    sweeps, runs = (
        swept(results),
        {(r["size"], r["variant"], r["learning_rate"], r["seed"]): r for r in results},
    )
    rows = []
    for (size, variant), tried in sweeps.items():
        of_base = sweeps.get((size, baseline), {})
        if not (rates := sorted(tried.keys() & of_base.keys())):
            continue
        rate, base_rate = min(rates, key=tried.__getitem__), min(rates, key=of_base.__getitem__)
        seeds = sorted(
            s for *run, s in runs if run == [size, variant, rate] and (size, baseline, base_rate, s) in runs
        )
        if not seeds:
            continue
        own = [runs[size, variant, rate, seed]["valid_loss"] for seed in seeds]
        base = [runs[size, baseline, base_rate, seed]["valid_loss"] for seed in seeds]
        mean, half, deviation = interval([a - b for a, b in zip(own, base, strict=True)])
        one = runs[size, variant, rate, seeds[0]]
        rows.append(
            {
                "size": size, "variant": variant, "role": role(one, baseline), "model": one["model"],
                "joins": one["joins"], "parameters": one["parameters"], "tokens": one["tokens"],
                "learning_rate": rate, "rates": len(rates),
                "edge_of_sweep": len(rates) > 1 and rate in (rates[0], rates[-1]),
                "seeds": len(seeds), "valid_loss": sum(own) / len(own),
                "difference": mean, "half_width_95": half, "deviation": deviation,
            }
        )  # fmt: skip
    return rows


def role(result: Result, baseline: str) -> str | None:
    """What a variant is there for, beside being compared."""
    controls = {
        "planted fault": (result["joins"] or "").startswith("lost_"),
        "noise floor": bool(result["seed_offset"]),
    }
    return next(
        (name for name, is_it in controls.items() if is_it),
        "baseline" * (result["variant"] == baseline) or None,
    )


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean, half the width of its 95% t interval, and the standard deviation; the last two NaN for one value."""
    n, mean = len(values), sum(values) / len(values)
    if n < 2:
        return mean, math.nan, math.nan
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1))
    return mean, float(student_t.ppf(0.975, n - 1)) * deviation / math.sqrt(n), deviation


def detectable(deviation: float, n: int) -> float:
    """The difference that a two-sided paired t test at 5% of n pairs finds in 80% of experiments;
    NaN without a s.d.
    """
    if n < 2 or not math.isfinite(deviation):
        return math.nan
    critical = student_t.ppf(0.975, n - 1)
    return (
        float(brentq(lambda shift: nct.sf(critical, n - 1, shift) - POWER, 0.0, 50.0))
        * deviation
        / math.sqrt(n)
    )


def pooled_deviation(rows: Sequence[Row]) -> float:
    """Of the paired differences of all compared variants: root of the mean variance,
    NaN without repeated seeds.
    """
    squares = [
        row["deviation"] ** 2 for row in rows if row["role"] is None and math.isfinite(row["deviation"])
    ]
    return math.sqrt(sum(squares) / len(squares)) if squares else math.nan


def together(results: Sequence[Result], baseline: str) -> Row | None:
    """Of one size at the learning rate of most runs: all variants but planted faults,
    over variants and seeds.

    A two-way analysis of variance, which takes runs to scatter alike whatever their joins, and so
    knows their deviation from all of them. `half_width_95`: of one of the `differences` to the
    baseline; `half_width_95_of_all`: so wide that all hold at once in 95% of experiments (Bonferroni).
    None without repeated seeds.
    """
    at_rate: dict[float, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for r in results:
        if role(r, baseline) != "planted fault" and math.isfinite(r["valid_loss"]):
            at_rate[r["learning_rate"]][r["variant"]][r["seed"]] = r["valid_loss"]
    if not at_rate:
        return None
    rate = max(at_rate, key=lambda rate: sum(map(len, at_rate[rate].values())))
    seeds = max(at_rate[rate].values(), key=len).keys()
    whole = {name: own for name, own in at_rate[rate].items() if own.keys() == seeds}
    n, losses = (
        len(seeds),
        np.array([[own[seed] for seed in seeds] for own in whole.values()]),
    )  # (variants, seeds)
    if n < 2 or len(losses) < 2 or baseline not in whole:
        return None
    means, degrees = losses.mean(1, keepdims=True), (len(losses) - 1) * (n - 1)
    variance = float(((losses - means - losses.mean(0) + losses.mean()) ** 2).sum()) / degrees
    mean, compared, error = (
        dict(zip(whole, means[:, 0], strict=True)),
        len(losses) - 1,
        math.sqrt(2 * variance / n),
    )
    return {
        "learning_rate": rate, "seeds": n, "degrees": degrees, "deviation": math.sqrt(variance),
        "differences": {name: float(m - mean[baseline]) for name, m in mean.items() if name != baseline},
        "half_width_95": float(student_t.ppf(0.975, degrees)) * error,
        "half_width_95_of_all": float(student_t.ppf(1 - 0.025 / compared, degrees)) * error,
    }  # fmt: skip


def noise_floor(rows: Sequence[Row]) -> float:
    """Of one size: how far other initial weights alone may move the mean, |difference| and its
    half width; 0: none.
    """
    row = next((row for row in rows if row["role"] == "noise floor"), None)
    half = row["half_width_95"] if row and math.isfinite(row["half_width_95"]) else 0.0
    return abs(row["difference"]) + half if row else 0.0
