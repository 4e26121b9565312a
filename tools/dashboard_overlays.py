"""Figures that lay curves over each other: the losses of several runs, of several sources, bits per byte by source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from tools.dashboard_charts import BUCKETS, bare_figure, colour, half_life_rows, sample, values_of
from tools.dashboard_run import Run

DASHES = ("solid", "dash", "dot", "dashdot")  # beyond the palette, colours come again


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
    figure.update_xaxes(title_text="tokens seen, all phases", exponentformat="SI", nticks=8)
    figure.update_yaxes(fixedrange=True, zeroline=False, nticks=7, range=common_range(runs))
    figure.update_layout(margin={"t": 12})
    return figure


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
    return list(
        dict.fromkeys(n for row in run.kept_rows for k in ("loss_by_source", "tokens_by_source") for n in row[k])
    )


def sources_figure(run: Run) -> go.Figure:
    """Loss by source, smoothed (lines), and validation loss by source (diamonds), over tokens or steps."""
    figure = bare_figure()
    x_key = "x_tokens" if all(row["x_tokens"] is not None for row in run.kept_rows) else "x_step"
    keep, settled = 0.5 ** (1 / half_life_rows(run)), []
    for index, name in enumerate(sources_of(run)):
        x, y = _smoothed(run, name, x_key, keep)
        settled += y[len(y) // 50 :] if len(run.kept_rows) >= 500 else y
        figure.add_trace(go.Scatter(x=x, y=y, name=name, mode="lines", line=line_of(index, 1.8), connectgaps=False))
        validated = [row for row in run.kept_rows if row["valid_loss_by_source"].get(name) is not None]
        figure.add_trace(
            go.Scatter(
                x=[row[x_key] for row in validated], y=[row["valid_loss_by_source"][name] for row in validated],
                name=f"{name}, validation", mode="lines+markers", line={**line_of(index, 0.8)}, opacity=0.8,
                marker={"symbol": "diamond", "size": 6, "color": colour(index)},
            )
        )  # fmt: skip
    title = "tokens seen, all phases" if x_key == "x_tokens" else "step, all phases"
    figure.update_xaxes(title_text=title, exponentformat="SI", nticks=8)
    figure.update_yaxes(
        fixedrange=True, zeroline=False, nticks=7, hoverformat=".4f", range=span([*filter(None, settled)])
    )
    figure.update_layout(margin={"t": 12})
    return figure


def _smoothed(run: Run, name: str, x_key: str, keep: float) -> tuple[list[float], list[float | None]]:
    """The exponential mean of one source's losses, thinned; a gap where a phase does not have the source."""
    x: list[float] = []
    y: list[float | None] = []
    every = max(1, len(run.kept_rows) // (2 * BUCKETS))
    for phase in run.phases:
        total = weight = 0.0
        rows = [row for row in run.kept_rows if row["phase"] == phase]
        rows = [row for row in rows if row["loss_by_source"].get(name) is not None]
        for index, row in enumerate(rows):
            total, weight = keep * total + row["loss_by_source"][name], keep * weight + 1
            if index % every == 0 or index == len(rows) - 1:
                x.append(row[x_key])
                y.append(float(f"{total / weight:.6g}"))
        if rows:
            x.append(rows[-1][x_key])
            y.append(None)
    return x, y


def bits_figure(evals: Sequence[dict[str, Any]], sources: Sequence[str]) -> go.Figure:
    """Bits per byte of each source over the evaluated checkpoints; x is tokens, or steps where tokens are unknown."""
    figure = bare_figure()
    key = "tokens_total" if all(e.get("tokens_total") is not None for e in evals) else "step"
    placed = sorted((e for e in evals if e.get(key) is not None), key=lambda e: e[key])
    for index, source in enumerate(sources):
        points = [(e[key], e["sources"][source]["bits_per_byte"]) for e in placed if source in e["sources"]]
        x, y = [p[0] for p in points], [p[1] for p in points]
        line = {"color": colour(index), "width": 2}
        figure.add_trace(go.Scatter(x=x, y=y, name=source, mode="lines+markers", line=line, marker={"size": 6}))
    figure.update_xaxes(title_text="tokens seen" if key == "tokens_total" else "step", exponentformat="SI", nticks=6)
    figure.update_yaxes(nticks=6, fixedrange=True, zeroline=False)
    figure.update_layout(margin={"t": 12, "b": 40})
    return figure
