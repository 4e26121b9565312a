"""The damage map: what a delay costs a dense model without any training, for every layer at
which it could begin.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from laneformer import Laneformer
from records.files import append_line, read_lines, write_atomically
from tools.ablate.report import interval

from .lanes import ENDS, embedded, held_out_losses, run_late

Row = dict[str, Any]


@torch.no_grad()
def damage_map(
    model: Laneformer, parts: Sequence[Tensor], delays: Sequence[int], path: Path, about: Row
) -> list[Row]:
    """Losses with delay in layers >= k for every k and delay; a line of `path` each, those that
    it holds are kept.

    parts: batches of token ids (b, S + 1). about: what the results depend on. ValueError where the
    file's depend on other.
    """
    depth, rows = len(model.layers), same_run(read_lines(path), about, path)
    done = {(row["first_late_layer"], row["delay"]) for row in rows}
    left = [
        (first, delay) for first in reversed(range(depth)) for delay in delays if (first, delay) not in done
    ]
    if not left:
        return rows
    inputs = [embedded(model, parts)]  # of every layer and of the head
    for i in range(depth):
        inputs.append([run_late(model, h, i, [0.0], 1)[0] for h in inputs[-1]])
    dense = held_out_losses(model, inputs[-1], parts, depth, [], 1)["dropped"]
    for first, delay in track(left, f"damage map -> {path}", console=Console(stderr=True)):
        found = held_out_losses(model, inputs[first], parts, first, [1.0] * (depth - first), delay)
        rows.append({"first_late_layer": first, "delay": delay, **found, "dense": dense, "about": about})
        append_line(path, json.dumps(rows[-1]))
    return rows


def same_run(rows: list[Row], about: Row, path: Path) -> list[Row]:
    """The rows; ValueError unless they come from the same model, text and settings."""
    for row in rows:
        if differing := [name for name in about if row["about"].get(name) != about[name]]:
            raise ValueError(f"{path} holds results of another {', '.join(differing)}; choose another --out")
    return rows


def report(rows: Sequence[Row], keys: Sequence[str], path: Path, curves: str | None) -> None:
    """PATH.json and PATH.svg: mean loss of both ends, and the paired difference to the
    dense model's, 95% interval.

    rows: losses by window, told apart by `keys`, the first of which is x.
    """
    found = []
    for row in sorted(rows, key=lambda row: row[keys[0]]):
        out = {key: row[key] for key in keys}
        for end in ENDS:
            mean, half, _ = interval(
                [late - dense for late, dense in zip(row[end], row["dense"], strict=True)]
            )
            out |= {end: fmean(row[end]), f"{end}_difference": mean, f"{end}_half_width_95": half}
        found.append(out)
        print("  ".join(f"{key} {f'{v:.4f}' if isinstance(v, float) else v}" for key, v in out.items()))
    write_atomically(path.with_suffix(".json"), json.dumps(found, indent=1) + "\n")
    plot(found, keys[0], curves, path.with_suffix(".svg"))
    print(f"nats a token; written: {path}.json, {path}.svg")


def plot(found: Sequence[Row], x: str, curves: str | None, path: Path) -> None:
    """Differences against x, a curve for both ends of every value of `curves`; the same file each time."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "laneformer"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for color, value in enumerate(sorted({row[curves] for row in found}) if curves else [None]):
        rows = [row for row in found if curves is None or row[curves] == value]
        for end, line in zip(ENDS, ("-", "--"), strict=True):
            axes.errorbar(
                [row[x] for row in rows], [row[f"{end}_difference"] for row in rows], capsize=2, marker="o",
                yerr=[row[f"{end}_half_width_95"] for row in rows], linestyle=line, color=f"C{color}", markersize=3,
                label=f"{curves} {value}, {end}" if curves else end,
            )  # fmt: skip
    axes.set(xlabel=x.replace("_", " "), ylabel="nats a token above delay 0")
    axes.axhline(0.0, color="gray", linewidth=0.8)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
