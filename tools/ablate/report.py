"""Results to paired differences: per seed against the same seed of the baseline, with a t interval."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.stats import f as fisher_f
from scipy.stats import nct
from scipy.stats import t as student_t

from records.files import read_lines

Result = dict[str, Any]
Row = dict[str, Any]
POWER = 0.8


def read_results(path: Path) -> list[Result]:
    """The lines of results.jsonl; a run that diverged has an infinite loss."""
    return [{**r, "valid_loss": math.inf if r["valid_loss"] is None else r["valid_loss"]} for r in read_lines(path)]


def swept(results: Sequence[Result]) -> dict[tuple[str, str], dict[float, float]]:
    """Mean loss of each learning rate of each size and variant, over seeds; of those rates that have the most seeds."""
    losses: dict[tuple[str, str], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for r in results:
        losses[r["size"], r["variant"]][r["learning_rate"]].append(r["valid_loss"])
    found = {}
    for key, rates in losses.items():
        most = max(map(len, rates.values()))
        found[key] = {rate: sum(own) / most for rate, own in rates.items() if len(own) == most}
    return found


def best_rates(results: Sequence[Result]) -> dict[tuple[str, str], float]:
    """The learning rate with the least mean loss of each size and variant."""
    return {key: min(rates, key=lambda rate: rates[rate]) for key, rates in swept(results).items()}


def paired(results: Sequence[Result], baseline: str) -> list[Row]:
    """Of every size and variant at its best rate: mean loss, and its difference to the baseline with the interval."""
    rates, sweeps = best_rates(results), swept(results)
    rates_tried = {size: max(len(tried) for (z, _), tried in sweeps.items() if z == size) for size, _ in sweeps}
    at_best = {
        (r["size"], r["variant"], r["seed"]): r
        for r in results
        if r["learning_rate"] == rates[r["size"], r["variant"]]
    }  # fmt: skip
    rows = []
    for size, variant in rates:
        seeds = sorted(s for z, v, s in at_best if (z, v) == (size, variant) and (size, baseline, s) in at_best)
        if not seeds:
            continue
        own = [at_best[size, variant, seed]["valid_loss"] for seed in seeds]
        base = [at_best[size, baseline, seed]["valid_loss"] for seed in seeds]
        mean, half, deviation = interval([a - b for a, b in zip(own, base, strict=True)])
        one, tried, rate = at_best[size, variant, seeds[0]], sweeps[size, variant], rates[size, variant]
        rows.append(
            {
                "size": size, "variant": variant, "role": role(one, baseline), "model": one["model"],
                "joins": one["joins"], "parameters": one["parameters"], "tokens": one["tokens"],
                "learning_rate": rate, "swept": len(tried) == rates_tried[size],
                "edge_of_sweep": len(tried) > 1 and rate in (min(tried), max(tried)),
                "seeds": len(seeds), "losses": own, "valid_loss": sum(own) / len(own), "difference": mean,
                "half_width_95": half, "deviation": deviation,
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
        (name for name, is_it in controls.items() if is_it), "baseline" * (result["variant"] == baseline) or None
    )


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean, half the width of its 95% t interval, and the standard deviation; the last two NaN for one value."""
    n, mean = len(values), sum(values) / len(values)
    if n < 2:
        return mean, math.nan, math.nan
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1))
    return mean, float(student_t.ppf(0.975, n - 1)) * deviation / math.sqrt(n), deviation


def detectable(deviation: float, n: int) -> float:
    """The difference that a two-sided paired t test at 5% of n pairs finds in 80% of experiments; NaN without a s.d."""
    if n < 2 or not math.isfinite(deviation):
        return math.nan
    critical = student_t.ppf(0.975, n - 1)
    return float(brentq(lambda shift: nct.sf(critical, n - 1, shift) - POWER, 0.0, 50.0)) * deviation / math.sqrt(n)


def pooled_deviation(rows: Sequence[Row]) -> float:
    """Of the paired differences of all compared variants: root of the mean variance, NaN without repeated seeds."""
    squares = [
        row["deviation"] ** 2
        for row in rows
        if row["role"] is None and row["swept"] and math.isfinite(row["deviation"])
    ]
    return math.sqrt(sum(squares) / len(squares)) if squares else math.nan


def together(rows: Sequence[Row]) -> Row | None:
    """Of one size, all variants but planted faults in one two-way analysis of variance, over variants and seeds.

    It takes runs to scatter alike whatever their joins, and so knows their deviation from all of them. `half_width_95`:
    of any difference to the baseline; `p`: of the F test that no variant differs. None without repeated seeds.
    """
    rows = [row for row in rows if row["role"] != "planted fault" and row["swept"] and math.isfinite(row["valid_loss"])]
    n = max((row["seeds"] for row in rows), default=0)
    losses = np.array([row["losses"] for row in rows if row["seeds"] == n])  # (variants, seeds)
    if n < 2 or len(losses) < 2:
        return None
    of_variants, degrees = losses.mean(1, keepdims=True), (len(losses) - 1) * (n - 1)
    residuals = losses - of_variants - losses.mean(0) + losses.mean()
    variance = float((residuals**2).sum()) / degrees
    f = n * float(of_variants.var(ddof=1)) / variance if variance else math.inf
    half = float(student_t.ppf(0.975, degrees)) * math.sqrt(2 * variance / n)
    p = float(fisher_f.sf(f, len(losses) - 1, degrees))
    return {"seeds": n, "degrees": degrees, "deviation": math.sqrt(variance), "half_width_95": half, "p": p}


def noise_floor(rows: Sequence[Row]) -> float:
    """Of one size: how far other initial weights alone may move the mean, |difference| and its half width; 0: none."""
    row = next((row for row in rows if row["role"] == "noise floor"), None)
    half = row["half_width_95"] if row and math.isfinite(row["half_width_95"]) else 0.0
    return abs(row["difference"]) + half if row else 0.0
