"""The damage map: what a delay costs a dense model without any training, for every layer at
which it could begin.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from laneformer import Laneformer
from records.files import append_line, read_lines, write_atomically
from tools.ablate.figure import figure_style, finish, points, save
from tools.ablate.report import interval
from tools.ablate.trainer import same_origin

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
    depth, rows = len(model.layers), kept_rows(path, about)
    done = {(row["first_late_layer"], row["delay"]) for row in rows}
    left = [each for each in itertools.product(reversed(range(depth)), delays) if each not in done]
    if not left:
        return rows
    inputs = [embedded(model, parts)]  # of every layer and of the head
    for i in range(depth):
        inputs.append([run_late(model, h, i, [0.0], 1)[0] for h in inputs[-1]])
    dense = held_out_losses(model, inputs[-1], parts, depth, [], 1)["dropped"]
    for first, delay in track(left, f"damage map -> {path}", console=Console(stderr=True)):
        found = held_out_losses(model, inputs[first], parts, first, [1.0] * (depth - first), delay)
        keep(rows, {"first_late_layer": first, "delay": delay, **found, "dense": dense, "about": about}, path)
    return rows


def kept_rows(path: Path, about: Row) -> list[Row]:
    """The rows of a file; ValueError unless they come from the same model, text and settings."""
    rows = read_lines(path)
    same_origin((row["about"] for row in rows), about, path)
    return rows


def keep(rows: list[Row], row: Row, path: Path) -> None:
    rows.append(row)
    append_line(path, json.dumps(row))


def report(
    rows: Sequence[Row], keys: Sequence[str], path: Path, curves: str | None, drawn: Sequence[str] = ENDS
) -> None:
    """PATH.json: mean loss of both ends, and the paired difference to the dense model's, 95% interval. PATH.svg: the
    differences of those `drawn`.

    rows: losses by window, told apart by `keys`, the first of which is x. curves: the key that has a curve for
    each of its values.
    """
    found = []
    for row in sorted(rows, key=lambda row: row[keys[0]]):
        out = {key: row[key] for key in keys}
        for end in ENDS:
            mean, half, _ = interval(np.subtract(row[end], row["dense"]))
            out |= {end: fmean(row[end]), f"{end}_difference": mean, f"{end}_half_width_95": half}
        found.append(out)
        print("  ".join(f"{key} {f'{v:.4f}' if isinstance(v, float) else v}" for key, v in out.items()))
    write_atomically(path.with_suffix(".json"), json.dumps(found, indent=1) + "\n")
    figure, axes = figure_style().subplots(figsize=(7, 4), layout="constrained")
    for color, value in enumerate(sorted({row[curves] for row in found}) if curves else [None]):
        own = [row for row in found if curves is None or row[curves] == value]
        for end, line in zip(drawn, ("o-", "o--"), strict=False):
            label = f"{curves} {value}, {end}" if curves else end
            points(axes, own, keys[0], line, f"C{color}", label, kind=f"{end}_")
    finish(axes, keys[0].replace("_", " "))
    save(figure, path.with_suffix(".svg"))
    print(f"nats a token; written: {path}.json, {path}.svg")
