"""The ablation's figure: differences to the baseline against delay, lanes and size, and
the neighbours as points.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    "delay_1_flushed": "delay 1, summed before the head",
    "delay_2_flushed": "delay 2, summed before the head",
    "delay_2_replicate": "delay 2, replicated head",
    "handicap": "handicap: an eighth of the MLP less",
    "lost_lane": "planted fault: 1 of 8 lanes lost",
    "lost_lanes": "planted fault: 7 of 8 lanes lost",
}
# Okabe and Ito's, which all readers can tell apart
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
NO_EARLY = "delay_2_no_early"


def words(variant: str) -> str:
    """delay_2_lanes_4 -> delay 2, 4 lanes."""
    head, lanes, count = variant.partition("_lanes_")
    return NAMES.get(variant, head.replace("_", " ") + (f", {count} lanes" if lanes else ""))


def is_plain(row: Row) -> bool:
    """A config's own joins, everything else as in the baseline: of the curves over delay and lanes."""
    other = {"use_early_comm", "early_layers", "use_attention_comm", "use_mlp_comm", "lm_head_type", "flush"}
    return row["joins"] is None and row["role"] in (None, "baseline") and not other & row["model"].keys()


def figure_style() -> Any:
    """pyplot, for SVGs that are the same each time."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({
        "svg.hashsalt": "laneformer", "font.size": 8, "legend.fontsize": 6, "legend.frameon": False,
        "axes.spines.top": False, "axes.spines.right": False, "errorbar.capsize": 2, "lines.markersize": 4,
    })  # fmt: skip
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    figure_style().close(figure)


def finish(axes: Any, x: str, y: str = "nats a token above delay 0", **more: Any) -> None:
    """The zero line of differences, what the axes show, and the legend."""
    axes.axhline(0.0, color="gray", linewidth=0.8)
    axes.set(xlabel=x, ylabel=y, **more)
    axes.minorticks_off()
    axes.legend()


def points(
    axes: Any,
    rows: Sequence[Row],
    x: str,
    fmt: str,
    color: str,
    label: str,
    shift: float = 0.0,
    kind: str = "",
) -> None:
    """Differences with their 95% intervals against a figure of the rows; kind: what stands before their names."""
    rows = sorted(rows, key=lambda row: row[x])
    if rows:
        y, half = ([row[kind + key] for row in rows] for key in ("difference", "half_width_95"))
        axes.errorbar([row[x] + shift for row in rows], y, half, fmt=fmt, color=color, label=label)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Panels of the finite differences with 95% intervals, zero line and the band of the noise floor.

    The panel over sizes is there only where there are several.
    """
    rows = [{**row["model"], **row} for row in rows if math.isfinite(row["difference"])]
    for row in rows:
        row["lanes_log2"] = math.log2(row["num_lanes"])
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    below = ["size" if len(sizes) > 1 else "neighbours", "neighbours"]
    figure, panels = figure_style().subplot_mosaic(
        [["delay", "lanes"], below], figsize=(7.6, 6), layout="constrained"
    )
    lanes = next((row["num_lanes"] for row in rows if row["role"] == "baseline"), None)
    others = [row for row in rows if not is_plain(row) and row["variant"] != NO_EARLY]
    others.sort(key=lambda row: row["role"] is not None)  # the controls last
    heights = {name: -i for i, name in enumerate(dict.fromkeys(row["variant"] for row in others))}
    for number, (size, color) in enumerate(zip(sizes, COLORS, strict=False)):
        own, shift = [row for row in rows if row["size"] == size], 0.1 * (number - (len(sizes) - 1) / 2)
        draw_size(panels, own, lanes, color, shift)
        beside = [row for row in others if row["size"] == size]
        places = [heights[row["variant"]] - 2 * shift for row in beside]
        x, half = ([row[key] for row in beside] for key in ("difference", "half_width_95"))
        panels["neighbours"].errorbar(x, places, xerr=half, fmt="o", color=color)
    panels["neighbours"].set_yticks([*heights.values()], [words(name) for name in heights])
    panels["neighbours"].axvline(0.0, color="gray", linewidth=0.8)
    panels["neighbours"].set_xlabel("nats a token above delay 0")
    finish(panels["delay"], f"delay, layers ({lanes} lanes)", xticks=range(5))
    finish(panels["lanes"], "lanes", xticks=range(4), xticklabels=["1", "2", "4", "8"])
    if by_size := panels.get("size"):
        curve = [row for row in rows if is_plain(row) and row["num_lanes"] == lanes and not row["role"]]
        for name, color in zip(dict.fromkeys(row["variant"] for row in curve), COLORS, strict=False):
            own = [row for row in curve if row["variant"] == name]
            if len(own) > 1:
                points(by_size, own, "parameters", "o-", color, words(name))
        ticks = sorted({row["parameters"] for row in rows})
        finish(
            by_size, "parameters", xscale="log", xticks=ticks, xticklabels=[f"{n / 1e6:.2g}M" for n in ticks]
        )
    save(figure, path)


def draw_size(panels: dict[str, Any], rows: Sequence[Row], lanes: Any, color: str, shift: float) -> None:
    """The noise floor of one size, and its curves over delays and lanes; sizes stand beside each other."""
    floor, plain = noise_floor(rows), [row for row in rows if is_plain(row)]
    for band in (panels["delay"].axhspan, panels["lanes"].axhspan, panels["neighbours"].axvspan):
        band(-floor, floor, color=color, alpha=0.1, linewidth=0)
    own = [row for row in plain if row["num_lanes"] == lanes]
    label = f"{rows[0]['parameters'] / 1e6:.3g}M parameters"
    points(panels["delay"], own, "broadcast_delay", "o-", color, label, shift)
    own = [row for row in rows if row["variant"] == NO_EARLY]
    points(panels["delay"], own, "broadcast_delay", "x", color, "no early joins", shift + 0.25)
    for delay, fmt in ((2, "o-"), (0, "s")):
        own = [row for row in plain if row["broadcast_delay"] == delay]
        points(panels["lanes"], own, "lanes_log2", fmt, color, f"delay {delay}", shift)
