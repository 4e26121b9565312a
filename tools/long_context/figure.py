"""What is found against how far away it is: the share of `keys` answered by length, a panel for each rope."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.ablate.figure import COLORS, figure_style

from .plan import Plan
from .report import Result, counts, ends

QUESTION = "keys"


def draw(results: Sequence[Result], plan: Plan, path: Path) -> None:
    """Curves by delay with Wilson's 95% intervals, both layouts together; dashed: before the last stage of
    windows. The file is the same each time. Nothing is drawn before a rope has been trained.
    """
    pyplot, lengths = figure_style(), [stage.seq_len for stage in plan.stages]
    ropes = [rope for rope in dict.fromkeys(r["rope"] for r in results) if rope]
    if not ropes:  # trunks alone so far
        return
    figure, panels = pyplot.subplots(
        1, len(ropes), figsize=(2.1 * len(ropes), 2.4), sharey=True, squeeze=False
    )
    for axes, rope in zip(panels[0], ropes, strict=True):
        for color, delay in zip(COLORS, sorted(plan.delays), strict=False):
            for stage in range(1, len(lengths)):
                own = [r for r in results if (r["delay"], r["rope"], r["stage"]) == (delay, rope, stage)]
                if measured := [r for r in own if "answered" in r]:
                    draw_curve(axes, measured, lengths[: stage + 2], color, delay, stage == len(lengths) - 1)
        axes.set(xscale="log", ylim=(0, 1.04), title=rope, xlabel="tokens of the document")
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axes.minorticks_off()
    panels[0][0].set_ylabel(f"share of `{QUESTION}` answered")
    panels[0][0].legend(title=f"trained on {lengths[-1]:,} (dashed: {lengths[-2]:,})", title_fontsize=6)
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    pyplot.close(figure)


def draw_curve(
    axes: Any, results: Sequence[Result], lengths: Sequence[int], color: str, delay: int, last: bool
) -> None:
    found = {length: counts(results, QUESTION, length) for length in lengths}
    shares = {length: right / asked for length, (right, asked, _) in found.items() if asked}
    bars = [ends(*found[length][:2]) for length in shares]
    sides = [[abs(y - bar[i]) for y, bar in zip(shares.values(), bars, strict=True)] for i in (0, 1)]
    axes.errorbar(
        [length * 1.04 ** (delay - 1) for length in shares], [*shares.values()], yerr=sides, color=color,
        marker="o", linewidth=1, linestyle="-" if last else "--", label=f"delay {delay}" if last else None,
    )  # fmt: skip
