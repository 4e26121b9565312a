"""Figures that lay curves over each other: the losses of several runs, of several sources, bits per byte by source."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from records.run import Run, number
from tools.dashboard.charts import BUCKETS, MARKS, bare_figure, colour, half_life_rows, sample, values_of

DASHES = ("solid", "dash", "dot")  # beyond the palette, colours come again


def line_of(index: int, width: float = 2) -> dict[str, Any]:
    """Colour and dash of curve `index`."""
    return {"color": colour(index), "dash": DASHES[index // 8 % len(DASHES)], "width": width}


def comparison_figure(runs: Sequence[Run]) -> go.Figure:
    """Loss (smoothed, lines) and validation loss (marks) of several runs over tokens; a ring where a run branches."""
    figure = bare_figure()
    for index, run in enumerate(runs):
        rows = [row for row in run.kept_rows if row["x_tokens"] is not None]
        rows = [rows[i] for i in sample(rows, BUCKETS)]
        x = [row["x_tokens"] for row in rows]
        figure.add_trace(
            go.Scatter(x=x, y=values_of(rows, "smooth_loss"), name=run.name, mode="lines", line=line_of(index))
        )
        validated = [row for row in rows if row["valid_loss"] is not None]
        figure.add_trace(
            go.Scatter(
                x=[row["x_tokens"] for row in validated], y=values_of(validated, "valid_loss"), mode="markers",
                name=f"{run.name}, validation", marker={"symbol": "diamond", "size": 6, "color": colour(index)},
            )
        )  # fmt: skip
        first = next((row for row in rows if row["smooth_loss"] is not None), None)
        if first and any(lineage.get("parent") for lineage in list(run.lineages.values())[:1]):
            ring = {"symbol": "circle-open", "size": 12, "color": colour(index), "line": {"width": 2}}
            told = f"{run.name} begins at {next(iter(run.lineages.values()))['parent']}"
            figure.add_trace(
                go.Scatter(
                    x=[first["x_tokens"]], y=[first["smooth_loss"]], mode="markers", marker=ring, name=told,
                    hovertemplate="%{fullData.name}<extra></extra>",
                )
            )  # fmt: skip
    figure.update_xaxes(
        title_text="tokens seen, all phases", exponentformat="SI", nticks=8, zeroline=False, title_font_size=12
    )
    figure.update_yaxes(fixedrange=True, zeroline=False, nticks=7, range=common_range(runs))
    figure.update_layout(margin={"t": 12})
    return figure


def label_x(figure: go.Figure, title: str) -> None:
    figure.update_xaxes(title_text=title, title_font_size=12, exponentformat="SI", nticks=8, zeroline=False)


def span(values: Sequence[float]) -> list[float] | None:
    """Ends of an axis that shows these values."""
    if not values:
        return None
    margin = 0.05 * (max(values) - min(values)) or 0.1
    return [min(values) - margin, max(values) + margin]


def common_range(runs: Sequence[Run]) -> list[float] | None:
    """The loss axis of several runs; for long ones without their steep starts, which would flatten the others."""
    losses: list[float] = []
    for run in runs:
        rows = run.kept_rows[len(run.kept_rows) // 50 :] if len(run.kept_rows) >= 500 else run.kept_rows
        losses += [row["smooth_loss"] for row in rows if row["smooth_loss"] is not None]
    return span(losses)


def sources_of(run: Run) -> list[str]:
    """All sources that any phase names, in order; a source's place here is its colour."""
    names: dict[str, None] = {}
    for row in run.kept_rows:
        names |= dict.fromkeys(row["loss_by_source"]) | dict.fromkeys(row["tokens_by_source"])
    return list(names)


def sources_figure(run: Run) -> go.Figure:
    """Loss by source, smoothed (lines), and validation loss by source (diamonds), over tokens or steps."""
    figure, names = bare_figure(), sources_of(run)
    x_key = "x_tokens" if all(row["x_tokens"] is not None for row in run.kept_rows) else "x_step"
    settled: list[float] = []
    for phase in run.phases:
        rows = [row for row in run.kept_rows if row["phase"] == phase]
        x, smooth = smoothed_by_source(rows, names, x_key, half_life_rows(run))
        validated = [row for row in rows if row["valid_loss_by_source"]]
        valid_x = [row[x_key] for row in validated]
        look: dict[str, Any] = {"mode": "lines+markers" if len(validated) <= MARKS else "lines"}
        for index, name in enumerate(names):
            y = [None if math.isnan(value) else float(f"{value:.6g}") for value in smooth[:, index]]
            if any(value is not None for value in y):
                figure.add_trace(go.Scatter(x=x, y=y, name=name, mode="lines", line=line_of(index, 1.8)))
                long = len(run.kept_rows) >= 500 and phase == run.phases[0]
                settled += [value for value in y[len(y) // 50 if long else 0 :] if value is not None]
            losses = [number(row["valid_loss_by_source"].get(name)) for row in validated]
            known = [loss for loss in losses if loss is not None]
            if known:
                settled.append(min(known))
                marker = {"symbol": "diamond", "size": 6, "color": colour(index)}
                figure.add_trace(
                    go.Scatter(x=valid_x, y=losses, name=f"{name}, validation", line=line_of(index, 0.8), marker=marker)
                    .update(look, opacity=0.8)
                )  # fmt: skip
    label_x(figure, "tokens seen, all phases" if x_key == "x_tokens" else "step, all phases")
    figure.update_yaxes(fixedrange=True, zeroline=False, nticks=7, hoverformat=".4f", range=span(settled))
    figure.update_layout(margin={"t": 12})
    return figure


def smoothed_by_source(
    rows: Sequence[dict[str, Any]], names: Sequence[str], x_key: str, half_life: float
) -> tuple[list[float], np.ndarray]:
    """The exponential means of all sources' losses, thinned for the screen: x, and float64 (points, sources).

    A row without a source leaves its mean as it is; NaN before the first one.
    """
    keep, every = 0.5 ** (1 / half_life), max(1, len(rows) // (2 * BUCKETS))
    total, weight = np.zeros(len(names)), np.zeros(len(names))
    x, points = [], []
    for place, row in enumerate(rows):
        losses = np.array([row["loss_by_source"].get(name) for name in names], dtype=float)  # None becomes NaN
        there = np.isfinite(losses)
        total[there], weight[there] = keep * total[there] + losses[there], keep * weight[there] + 1
        if place % every == 0 or place == len(rows) - 1:
            x.append(row[x_key])
            points.append(np.divide(total, weight, out=np.full(len(names), np.nan), where=weight > 0))
    return x, np.array(points).reshape(len(points), len(names))


def bits_figure(evals: Sequence[dict[str, Any]], sources: Sequence[str]) -> go.Figure:
    """Bits per byte of each source over the evaluated checkpoints; x is tokens, or steps where tokens are unknown."""
    figure = bare_figure()
    key = "tokens_total" if all(e.get("tokens_total") is not None for e in evals) else "step"
    placed = sorted((e for e in evals if e.get(key) is not None), key=lambda e: e[key])
    for index, source in enumerate(sources):
        points = [(e[key], e["sources"][source]["bits_per_byte"]) for e in placed if source in e["sources"]]
        x, y = [p[0] for p in points], [p[1] for p in points]
        look: dict[str, Any] = {"mode": "lines+markers" if len(points) <= MARKS else "lines", "marker": {"size": 6}}
        figure.add_trace(go.Scatter(x=x, y=y, name=source, line={"color": colour(index), "width": 2}, **look))
    figure.update_xaxes(title_text="tokens seen" if key == "tokens_total" else "step", exponentformat="SI", nticks=6)
    figure.update_yaxes(nticks=6, fixedrange=True, zeroline=False)
    figure.update_layout(margin={"t": 12, "b": 40})
    return figure
