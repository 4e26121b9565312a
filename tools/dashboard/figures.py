"""Curves with a choice of the axis of x, and the figures made of them: losses of several runs and sources, checkpoints.

A long run has more rows than a screen has pixels: `sample` keeps, of each bucket of neighbouring rows, those with the
extremes, so that no spike is lost. Smoothing comes first, on all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import plotly.graph_objects as go

from records.page import PLOT, colour, dash
from records.run import Run, number

Rows = Sequence[dict[str, Any]]
Points = Sequence[tuple[dict[str, Any], float | None]]  # (row or record, figure)
MARKS = 100  # more points than this are a line without marks
BUCKETS = 400  # about one for every three pixels of a wide screen
LONG = 500  # losses; the axis of a longer curve leaves out its steep start and the tips of its spikes
AXES = {  # name -> key of a row or record, title
    "tokens": ("x_tokens", "tokens seen, all phases"),
    "steps": ("x_step", "step, all phases"),
    "FLOPs": ("x_flops", "training FLOPs, all phases"),
}
BUTTONS = {"type": "buttons", "direction": "right", "bgcolor": "rgba(0,0,0,0)", "font": {"size": 11}, "x": 1,
           "xanchor": "right"}  # fmt: skip


# curves


def curve(points: Points, tint: str, width: float = 2, marks: str = "", **more: Any) -> go.Scatter:
    """One curve; its places on all AXES travel along as `meta`, for `switch_x`. marks: a plotly symbol."""
    return go.Scatter(
        y=[y for _, y in points], line={"color": tint, "width": width},
        meta={axis: [row.get(key) for row, _ in points] for axis, (key, _) in AXES.items()},
        mode="lines+markers" if marks and len(points) <= MARKS else "lines",
        marker={"symbol": marks or "circle", "size": 6, "color": tint},
    ).update(more)  # fmt: skip


def points(rows: Rows, key: str) -> list[tuple[dict[str, Any], float | None]]:
    """The figures under `key` with six digits."""
    return [(row, None if row[key] is None else float(f"{row[key]:.6g}")) for row in rows]


def lines_figure(curves: Sequence[go.Scatter], height: int = 380, **y_axis: Any) -> go.Figure:
    """Curves over each other."""
    figure = go.Figure(curves, {**PLOT, "height": height})
    figure.update_yaxes(fixedrange=True, zeroline=False, nticks=7, **y_axis)
    switch_x(figure)
    return figure


def checkpoint_figure(records: Rows, names: Sequence[str], value: Callable[..., float | None]) -> go.Figure:
    """A curve a name over evaluated checkpoints. value: of (record, name), None where it is not known."""
    found = [[(record, y) for record in records if (y := value(record, name)) is not None] for name in names]
    curves = [curve(known, colour(i), marks="circle", name=names[i]) for i, known in enumerate(found)]
    return lines_figure(curves, 276, hoverformat=".4f")


def switch_x(figure: go.Figure, changes: Callable[[str], dict[str, Any]] | None = None, **place: Any) -> None:
    """Give all curves their x, with a button for every axis on which all points have a place.

    changes: the changes of the layout that belong to an axis; its title where there are none. place: of the buttons.
    """
    found = [trace.meta for trace in figure.data]
    known = [axis for axis in AXES if all(x is not None for at in found for x in at[axis])] or ["steps"]
    changes = changes or (lambda axis: {"xaxis.title.text": AXES[axis][1]})
    args = {a: [{"x": [at[a] for at in found]}, {**changes(a), "xaxis.autorange": True}] for a in known}
    for trace, x in zip(figure.data, args[known[0]][0]["x"], strict=True):
        trace.update(x=x, meta=None)
    buttons = [{"label": axis, "method": "update", "args": args[axis]} for axis in known]
    place = place or {"y": 1, "yanchor": "bottom", "pad": {"b": 4}}
    figure.update_layout(args[known[0]][1])
    figure.update_layout(updatemenus=[{**BUTTONS, **place, "buttons": buttons}] if len(known) > 1 else [])
    figure.update_xaxes(title_font_size=12, exponentformat="SI", nticks=8, zeroline=False)


def sample(rows: Rows, buckets: int, extremes: Sequence[tuple[str, Callable[..., int]]]) -> list[int]:
    """Indices of the rows to draw: all when few, else of each bucket its first row and those of the extremes.

    extremes: (key, min or max).
    """
    if len(rows) <= 4 * buckets:
        return list(range(len(rows)))
    chosen = {len(rows) - 1}
    for bucket in range(buckets):
        inside = range(bucket * len(rows) // buckets, (bucket + 1) * len(rows) // buckets)
        chosen.add(inside[0])
        for key, extreme in extremes:
            if known := [i for i in inside if rows[i][key] is not None]:
                chosen.add(extreme(known, key=lambda i, key=key: rows[i][key]))
    return sorted(chosen)


def smooth(values: Sequence[float | None], half_life: float) -> list[float | None]:
    """The exponential mean of the values so far, None where there is no value.

    The half-life, in values, grows to its full length: a loss falls like a power of the steps, so that a mean over a
    fixed span would lie far above its steep beginning.
    """
    total = weight = 0.0
    means: list[float | None] = []
    for index, value in enumerate(values):
        keep = 0.5 ** (1 / max(1.0, min(half_life, index / 25)))
        if value is not None:
            total, weight = keep * total + value, keep * weight + 1
        means.append(None if value is None else total / weight)
    return means


def half_life_rows(run: Run) -> float:
    return max(2.0, len(run.kept_rows) / 200)


def smooth_losses(run: Run) -> None:
    """Set `smooth_loss` of all rows that count, phase by phase."""
    for phase in run.phases:
        rows = [row for row in run.kept_rows if row["phase"] == phase]
        for row, mean in zip(rows, smooth([row["loss"] for row in rows], half_life_rows(run)), strict=True):
            row["smooth_loss"] = mean


def settled(values: Sequence[float | None]) -> list[float]:
    """The known values; of a long curve without its first fiftieth, which would flatten the rest."""
    known = [value for value in values if value is not None]
    return known[len(known) // 50 :] if len(known) >= LONG else known


def span(values: Sequence[float]) -> list[float] | None:
    """Ends of an axis that shows these values."""
    if not values:
        return None
    margin = 0.05 * (max(values) - min(values)) or 0.1
    return [min(values) - margin, max(values) + margin]


# several runs, and sources


def comparison_figure(runs: Sequence[Run]) -> go.Figure:
    """Loss (smoothed, lines) and validation loss (marks) of several runs; a ring where a run branches."""
    curves, losses = [], list[float]()
    for index, run in enumerate(runs):
        rows = [row for row in run.kept_rows if row["x_tokens"] is not None]
        losses += settled([row["smooth_loss"] for row in rows])
        validated = points([row for row in rows if row["valid_loss"] is not None], "valid_loss")
        rows = [rows[i] for i in sample(rows, BUCKETS, [("smooth_loss", min), ("smooth_loss", max)])]
        known = points([row for row in rows if row["smooth_loss"] is not None], "smooth_loss")
        curves.append(curve(points(rows, "smooth_loss"), colour(index), name=run.name, line_dash=dash(index)))
        curves.append(curve(validated, colour(index), marks="diamond", name=f"{run.name}, validation", mode="markers"))
        parent = next((lineage.get("parent") for lineage in run.lineages.values()), None)
        if known and parent:
            look: dict[str, Any] = {"name": f"{run.name} begins at {parent}", "mode": "markers"}
            look |= {"marker": {"size": 12, "line": {"width": 2}}, "hovertemplate": "%{fullData.name}<extra></extra>"}
            curves.append(curve(known[:1], colour(index), marks="circle-open", **look))
    return lines_figure(curves, range=span(losses))


def sources_of(run: Run) -> list[str]:
    """All sources that any phase names, in order; the place of a source is its colour."""
    keys = ("loss_by_source", "tokens_by_source")
    return list(dict.fromkeys(name for row in run.kept_rows for key in keys for name in row[key]))


def sources_figure(run: Run) -> go.Figure:
    """Loss by source, smoothed (lines), and validation loss by source (diamonds)."""
    curves, shown, sources, half_life = [], list[float](), sources_of(run), half_life_rows(run)
    for phase in run.phases:
        rows = [row for row in run.kept_rows if row["phase"] == phase]
        every = max(1, len(rows) // (2 * BUCKETS))
        for index, name in enumerate(sources):
            losses = smooth([number(row["loss_by_source"].get(name)) for row in rows], half_life)
            line = [(row, y) for row, y in zip(rows, losses, strict=True) if y is not None]
            line = [(row, float(f"{y:.6g}")) for row, y in (*line[::every], *line[-1:])]
            valid = [(row, y) for row in rows if (y := number(row["valid_loss_by_source"].get(name))) is not None]
            curves.append(curve(line, colour(index), 1.8, name=name, line_dash=dash(index)))
            look = {"name": f"{name}, validation", "line_dash": dash(index), "opacity": 0.8}
            curves.append(curve(valid, colour(index), 0.8, "diamond").update(look))
            shown += [*settled([y for _, y in line]), *sorted(y for _, y in valid)[:1]]
    return lines_figure(curves, range=span(shown), hoverformat=".4f")
