"""Results to paired differences: per seed against the same seed of the baseline, with a t interval."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.stats import dunnett, nct
from scipy.stats import t as student_t

from records.files import read_lines

Result = dict[str, Any]
Row = dict[str, Any]
POWER = 0.8


def read_results(path: Path) -> list[Result]:
    """The lines of results.jsonl; a run that diverged has an infinite loss."""
    results = read_lines(path)
    for one in results:
        if one["valid_loss"] is None:
            one["valid_loss"] = math.inf
    return results


def paired(results: Sequence[Result], baseline: str) -> list[Row]:
    """Every size and variant against the baseline, each at its best of the learning rates that both have tried on
    the most seeds: the rate with the lowest mean loss over seeds.
    """
    runs: dict[tuple[str, str], dict[float, dict[int, Result]]] = defaultdict(lambda: defaultdict(dict))
    for r in results:
        runs[r["size"], r["variant"]][r["learning_rate"]][r["seed"]] = r
    for tried in runs.values():
        most = max(map(len, tried.values()))
        for rate in [rate for rate, by_seed in tried.items() if len(by_seed) < most]:
            del tried[rate]
    rows = []
    for (size, variant), tried in runs.items():
        of_base = runs.get((size, baseline), {})
        if not (rates := sorted(tried.keys() & of_base.keys())):
            continue
        rate, base_rate = (min(rates, key=lambda rate: mean_loss(of[rate])) for of in (tried, of_base))
        own, base = tried[rate], of_base[base_rate]
        if not (seeds := sorted(own.keys() & base.keys())):
            continue
        pairs = [own[s]["valid_loss"] - base[s]["valid_loss"] for s in seeds]
        mean, half, deviation = interval(pairs)
        one = own[seeds[0]]
        rows.append(
            {
                "size": size, "variant": variant, "role": role(one, baseline),
                **{name: one[name] for name in ("model", "joins", "parameters", "tokens")},
                "learning_rate": rate, "rates": len(rates),
                "edge_of_sweep": len(rates) > 1 and rate in (rates[0], rates[-1]),
                "seeds": len(seeds), "valid_loss": mean_loss({s: own[s] for s in seeds}),
                "pairs": pairs, "difference": mean, "half_width_95": half, "deviation": deviation,
            }
        )  # fmt: skip
    return rows


def mean_loss(by_seed: dict[int, Result]) -> float:
    return fmean(r["valid_loss"] for r in by_seed.values())


def role(result: Result, baseline: str) -> str | None:
    """What a variant is there for, beside being compared."""
    if (result["joins"] or "").startswith("lost_") or result["variant"].startswith("handicap"):
        return "planted fault"
    if result["seed_offset"]:
        return "noise floor"
    return "baseline" if result["variant"] == baseline else None


def interval(values: Sequence[float] | np.ndarray) -> tuple[float, float, float]:
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
    shift = brentq(lambda shift: nct.sf(critical, n - 1, shift) - POWER, 0.0, 50.0)
    return float(shift) * deviation / math.sqrt(n)


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
    baseline; `half_width_95_of_all`: so wide that all hold at once in 95% of experiments (Bonferroni); `dunnett`:
    p of each difference by Dunnett's test of all against the baseline, not paired.
    None without repeated seeds.
    """
    kept = [r for r in results if role(r, baseline) != "planted fault" and math.isfinite(r["valid_loss"])]
    if not kept:
        return None
    rate = Counter(r["learning_rate"] for r in kept).most_common(1)[0][0]
    by_seed: dict[str, dict[int, float]] = defaultdict(dict)
    for r in kept:
        if r["learning_rate"] == rate:
            by_seed[r["variant"]][r["seed"]] = r["valid_loss"]
    ran = Counter(frozenset(own) for name, own in by_seed.items() if name != baseline)
    seeds = sorted(ran.most_common(1)[0][0]) if ran else []
    whole = {name: [own[s] for s in seeds] for name, own in by_seed.items() if own.keys() >= {*seeds}}
    n, compared = len(seeds), len(whole) - 1
    if n < 2 or compared < 1 or baseline not in whole:
        return None
    losses = np.array(list(whole.values()))  # (variants, seeds)
    means, degrees = losses.mean(1), compared * (n - 1)
    residuals = losses - means[:, None] - losses.mean(0) + losses.mean()
    deviation = math.sqrt((residuals**2).sum() / degrees)
    mean = dict(zip(whole, means.tolist(), strict=True))
    others = [name for name in whole if name != baseline]
    runs = [
        list(by_seed[name].values()) for name in (*others, baseline)
    ]  # the baseline may have run on more seeds
    tested = dunnett(*runs[:-1], control=runs[-1], rng=np.random.default_rng(0)).pvalue
    half = student_t.ppf([0.975, 1 - 0.025 / compared], degrees) * deviation * math.sqrt(2 / n)
    return {
        "learning_rate": rate, "seeds": n, "degrees": degrees, "deviation": deviation,
        "differences": {name: m - mean[baseline] for name, m in mean.items() if name != baseline},
        "dunnett": dict(zip(others, tested.tolist(), strict=True)),
        "half_width_95": float(half[0]), "half_width_95_of_all": float(half[1]),
    }  # fmt: skip


def noise_floor(rows: Sequence[Row]) -> float:
    """Of one size: how far other initial weights alone may move the mean, |difference| and its
    half width; 0: none.
    """
    row = next((row for row in rows if row["role"] == "noise floor"), None)
    half = row["half_width_95"] if row and math.isfinite(row["half_width_95"]) else 0.0
    return abs(row["difference"]) + half if row else 0.0
