"""The ablation's figure: differences to the baseline against delay, lanes and size, and
every variant as a point.
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
    "delay_2_post": "delay 2, the post's beginning and head",
    "handicap": "handicap: an eighth of the MLP less",
    "handicap_large": "handicap: three eighths of the MLP less",
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

    Curves over delays, lanes and sizes are there only where there are several.
    """
    rows = [{**row["model"], **row} for row in rows if math.isfinite(row["difference"])]
    for row in rows:
        row["lanes_log2"] = math.log2(row["num_lanes"])
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    lanes = next((row["num_lanes"] for row in rows if row["role"] == "baseline"), None)
    several = {"delay": ("broadcast_delay", 4), "lanes": ("num_lanes", 2), "size": ("size", 2)}
    curves = [name for name, (key, least) in several.items() if len({row[key] for row in rows}) >= least]
    mosaic = [curves, ["variants"] * len(curves)] if curves else [["variants"]]
    height = 3 * len(mosaic)
    figure, panels = figure_style().subplot_mosaic(mosaic, figsize=(7.6, height), layout="constrained")
    for number, (size, color) in enumerate(zip(sizes, COLORS, strict=False)):
        own, shift = [row for row in rows if row["size"] == size], 0.1 * (number - (len(sizes) - 1) / 2)
        draw_size(panels, own, lanes, color, shift)
    draw_variants(panels["variants"], rows, sizes)
    if by_delay := panels.get("delay"):
        finish(by_delay, f"delay, layers ({lanes} lanes)", xticks=range(5))
    if by_lanes := panels.get("lanes"):
        finish(by_lanes, "lanes", xticks=range(4), xticklabels=["1", "2", "4", "8"])
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


def draw_variants(axes: Any, rows: Sequence[Row], sizes: Sequence[str]) -> None:
    """A line of each variant: its pairs, their mean and its interval; the controls last."""
    others = sorted(
        (row for row in rows if row["role"] != "baseline"), key=lambda row: row["role"] is not None
    )
    heights = {name: -i for i, name in enumerate(dict.fromkeys(row["variant"] for row in others))}
    for number, (size, color) in enumerate(zip(sizes, COLORS, strict=False)):
        own = [row for row in others if row["size"] == size]
        places = [heights[row["variant"]] - 0.2 * (number - (len(sizes) - 1) / 2) for row in own]
        x, half = ([row[key] for row in own] for key in ("difference", "half_width_95"))
        axes.errorbar(x, places, xerr=half, fmt="o", color=color)
        for place, row in zip(places, own, strict=True):
            axes.plot(row["pairs"], [place + 0.2] * len(row["pairs"]), "o", mfc="none", color=color)
    axes.set_yticks([*heights.values()], [words(name) for name in heights])
    axes.axvline(0.0, color="gray", linewidth=0.8)
    axes.set_xlabel("nats a token above delay 0 (circles: one seed)")


def draw_size(panels: dict[str, Any], rows: Sequence[Row], lanes: Any, color: str, shift: float) -> None:
    """The noise floor of one size, and its curves over delays and lanes; sizes stand beside each other."""
    floor, plain = noise_floor(rows), [row for row in rows if is_plain(row)]
    for name, axes in panels.items():
        band = axes.axvspan if name == "variants" else axes.axhspan
        band(-floor, floor, color=color, alpha=0.1, linewidth=0)
    if by_delay := panels.get("delay"):
        own = [row for row in plain if row["num_lanes"] == lanes]
        label = f"{rows[0]['parameters'] / 1e6:.3g}M parameters"
        points(by_delay, own, "broadcast_delay", "o-", color, label, shift)
        own = [row for row in rows if row["variant"] == NO_EARLY]
        points(by_delay, own, "broadcast_delay", "x", color, "no early joins", shift + 0.25)
    for delay, fmt in ((2, "o-"), (0, "s")) if "lanes" in panels else ():
        own = [row for row in plain if row["broadcast_delay"] == delay]
        points(panels["lanes"], own, "lanes_log2", fmt, color, f"delay {delay}", shift)
