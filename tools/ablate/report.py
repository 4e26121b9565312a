"""Results to paired differences: per seed against the same seed of the baseline, with a t interval."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scipy.stats import t as student_t

Result = dict[str, Any]


def best_rates(results: Sequence[Result]) -> dict[tuple[str, str], float]:
    """The learning rate with the least loss of each size and variant, on the first seed, which has all of them."""
    losses: dict[tuple[str, str], dict[float, float]] = defaultdict(dict)
    first = min((r["seed"] for r in results), default=0)
    for r in results:
        if r["seed"] == first:
            losses[r["size"], r["variant"]][r["learning_rate"]] = r["valid_loss"]
    return {key: min(rates, key=lambda rate: rates[rate]) for key, rates in losses.items()}


def paired(results: Sequence[Result], baseline: str) -> list[dict[str, Any]]:
    """Of every size and variant at its best rate: mean loss, and its difference to the baseline with the interval."""
    rates = best_rates(results)
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
        differences = [a - b for a, b in zip(own, base, strict=True)]
        mean, half = interval(differences)
        one = at_best[size, variant, seeds[0]]
        rows.append(
            {
                "size": size, "variant": variant, "parameters": one["parameters"], "tokens": one["tokens"],
                "learning_rate": rates[size, variant], "seeds": len(seeds), "valid_loss": sum(own) / len(own),
                "difference": mean, "half_width_95": half,
            }
        )  # fmt: skip
    return rows


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95% t interval; NaN for one value."""
    n, mean = len(values), sum(values) / len(values)
    if n < 2:
        return mean, math.nan
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1))
    return mean, float(student_t.ppf(0.975, n - 1)) * deviation / math.sqrt(n)


def plot(rows: Sequence[dict[str, Any]], baseline: str, path: Path) -> None:
    """Differences to the baseline with their intervals, one panel a size."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "laneformer"  # the same file each time
    from matplotlib import pyplot

    sizes = list(dict.fromkeys(row["size"] for row in rows))
    if not sizes:
        return
    figure, panels = pyplot.subplots(1, len(sizes), sharey=True, squeeze=False, figsize=(2 + 4 * len(sizes), 5))
    for size, axes in zip(sizes, panels[0], strict=True):
        own = [row for row in rows if row["size"] == size][::-1]
        widths = [0.0 if math.isnan(row["half_width_95"]) else row["half_width_95"] for row in own]
        names = [row["variant"].replace("_", " ") for row in own]
        axes.errorbar([row["difference"] for row in own], names, xerr=widths, fmt="o", capsize=3)
        axes.axvline(0.0, color="gray", linewidth=0.8)
        axes.set(title=f"{own[0]['parameters'] / 1e6:.1f}M parameters", xlabel=f"nats a token above {baseline}")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    pyplot.close(figure)
