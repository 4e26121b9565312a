"""The ablation's figure: differences to the baseline against delay, lanes and size, and
the neighbours as points.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .report import Row, noise_floor

NAMES = {
    "dense": "one lane (dense)",
    "delay_0": "delay 0 (tensor parallel)",
    "delay_0_again": "delay 0, other initial weights",
    "delay_2_no_early": "delay 2, no early joins",
    "no_reduce": "never reduced",
    "ladder": "Ladder",
    "parallel": "parallel attention and MLP",
    "desync_2": "Desync, every 2nd module",
    "desync_4": "Desync, every 4th module",
    "lost_lane": "planted fault: 1 of 8 lanes lost",
    "lost_lanes": "planted fault: 7 of 8 lanes lost",
}
COLORS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
)  # Okabe and Ito's, which all readers can tell apart


def words(variant: str) -> str:
    """delay_2_lanes_4 -> delay 2, 4 lanes."""
    head, lanes, count = variant.partition("_lanes_")
    return NAMES.get(variant, head.replace("_", " ") + (f", {count} lanes" if lanes else ""))


def is_plain(row: Row) -> bool:
    """A config's own joins, everything else as in the baseline: of the curves over delay and lanes."""
    switched = {"use_early_comm", "use_attention_comm", "use_mlp_comm"} & row["model"].keys()
    return row["joins"] is None and row["role"] in (None, "baseline") and not switched


def half_width(row: Row) -> float:
    """For drawing: nothing where there is one seed."""
    return 0.0 if math.isnan(row["half_width_95"]) else row["half_width_95"]


def figure_style() -> Any:
    """pyplot, for SVGs that are the same each time."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "laneformer", "font.size": 8, "axes.titlesize": 9})
    matplotlib.rcParams.update(
        {"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
    )
    from matplotlib import pyplot

    return pyplot


def draw(rows: Sequence[Row], path: Path) -> None:
    """Panels of the finite differences with 95% intervals, zero line and the band of the noise floor.

    The panel over sizes is there only where there are several.
    """
    pyplot = figure_style()
    rows = [row for row in rows if math.isfinite(row["difference"])]
    colors = dict(zip(dict.fromkeys(row["size"] for row in rows), COLORS, strict=False))
    below = ["size" if len(colors) > 1 else "neighbours", "neighbours"]
    figure, panels = pyplot.subplot_mosaic(
        [["delay", "lanes"], below], figsize=(7.6, 6), layout="constrained"
    )
    by_delay, by_lanes, neighbours = panels["delay"], panels["lanes"], panels["neighbours"]
    lanes = next((row["model"]["num_lanes"] for row in rows if row["role"] == "baseline"), None)
    curve = [row for row in rows if is_plain(row) and row["model"]["num_lanes"] == lanes]
    order: dict[str, int] = {}
    for number, (size, color) in enumerate(colors.items()):
        own, shift = [row for row in rows if row["size"] == size], 0.1 * (number - (len(colors) - 1) / 2)
        floor, delay = noise_floor(own), of_model("broadcast_delay", shift)
        for panel in (by_delay, by_lanes):
            panel.axhspan(-floor, floor, color=color, alpha=0.1, linewidth=0)
        neighbours.axvspan(-floor, floor, color=color, alpha=0.1, linewidth=0)
        label = f"{own[0]['parameters'] / 1e6:.3g}M parameters"
        points(by_delay, [row for row in curve if row["size"] == size], delay, "o-", color, label)
        no_early = [row for row in own if row["variant"] == "delay_2_no_early"]
        points(by_delay, no_early, of_model("broadcast_delay", shift + 0.25), "x", color, "no early joins")
        for layers, fmt in ((2, "o-"), (0, "s")):
            plain = [row for row in own if is_plain(row) and row["model"]["broadcast_delay"] == layers]
            points(by_lanes, plain, of_model("num_lanes", shift), fmt, color, f"delay {layers}")
        others = [row for row in own if (row["joins"] and not row["role"]) or row["variant"] == "no_reduce"]
        controls = [row for row in own if row["role"] in ("noise floor", "planted fault")]
        draw_neighbours(neighbours, [*others, *controls], color, shift, order)
    if by_size := panels.get("size"):
        names = dict.fromkeys(row["variant"] for row in curve if row["role"] is None)
        for name, color in zip(names, COLORS, strict=False):
            own = [r for r in curve if r["variant"] == name]
            if len(own) > 1:
                points(by_size, own, lambda r: r["parameters"], "o-", color, words(name))
        ticks = sorted({row["parameters"] for row in rows})
        by_size.set(
            xlabel="parameters", xscale="log", xticks=ticks, xticklabels=[f"{t / 1e6:.2g}M" for t in ticks]
        )
        by_size.minorticks_off()
    by_delay.set(xlabel=f"delay, layers ({lanes} lanes)", xticks=range(5))
    by_lanes.set(xlabel="lanes", xscale="log", xticks=[1, 2, 4, 8], xticklabels=["1", "2", "4", "8"])
    by_lanes.minorticks_off()
    for panel in filter(None, (by_delay, by_lanes, by_size)):
        panel.axhline(0.0, color="gray", linewidth=0.8)
        panel.set_ylabel("nats a token above delay 0")
        panel.legend(fontsize=6)
    neighbours.axvline(0.0, color="gray", linewidth=0.8)
    neighbours.set_xlabel("nats a token above delay 0")
    neighbours.invert_yaxis()
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    pyplot.close(figure)


def of_model(field: str, shift: float) -> Callable[[Row], float]:
    """A field of the config as abscissa; sizes stand beside each other, and lanes on a logarithmic axis."""
    if field == "num_lanes":
        return lambda row: row["model"][field] * 2.0**shift
    return lambda row: row["model"][field] + shift


def points(axes: Any, rows: list[Row], x: Callable[[Row], float], fmt: str, color: str, label: str) -> None:
    rows = sorted(rows, key=x)
    if rows:
        y, half = [row["difference"] for row in rows], [half_width(row) for row in rows]
        axes.errorbar(
            [x(row) for row in rows], y, half, fmt=fmt, color=color, label=label, capsize=2, markersize=4
        )


def draw_neighbours(axes: Any, rows: Sequence[Row], color: str, shift: float, order: dict[str, int]) -> None:
    """One line a variant; `order` is theirs, and grows."""
    heights = [order.setdefault(row["variant"], len(order)) + 2 * shift for row in rows]
    half = [half_width(row) for row in rows]
    axes.errorbar(
        [row["difference"] for row in rows], heights, xerr=half, fmt="o", color=color, capsize=2, markersize=4
    )
    axes.set_yticks(range(len(order)), [words(name) for name in order])
