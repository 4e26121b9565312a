"""Curves with a choice of the axis of x, and the figures made of them: losses of several
runs and sources, checkpoints.

What rows are drawn, and what is smoothed, says rows.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import plotly.graph_objects as go

from records.page import PLOT, colour, dash
from records.run import Row, Run, number
from tools.dashboard.rows import sample, width_of

Rows = Sequence[dict[str, Any]]
Losses = Sequence[float | None]
Points = Sequence[tuple[dict[str, Any], float | None]]  # (row or record, figure)
MARKS = 100  # more points than this are a line without marks
AXES = {  # name -> key of a row or record, title
    "tokens": ("x_tokens", "tokens seen, all phases"),
    "steps": ("x_step", "step, all phases"),
    "FLOPs": ("x_flops", "training FLOPs, all phases"),
}


# curves


def curve(
    points: Points, tint: str, width: float = 2, marks: str = "", logged: Points = (), **more: Any
) -> go.Scatter:
    """One curve. Its meta is what the choices of the figure change: its places on all AXES, and, where smoothing
    is switched off, the `logged` values of a smoothed curve. marks: a plotly symbol.
    """
    meta = {"x": {axis: {"x": [row.get(key) for row, _ in points]} for axis, (key, _) in AXES.items()}}
    return go.Scatter(
        y=[y for _, y in points], line={"color": tint, "width": width},
        meta=meta | ({"smoothing": {"off": {"y": [y for _, y in logged]}}} if logged else {}),
        mode="lines+markers" if marks and len(points) <= MARKS else "lines",
        marker={"symbol": marks or "circle", "size": 6, "color": tint},
    ).update(more)  # fmt: skip


def rounded(value: float | None) -> float | None:
    """The value with six digits."""
    return None if value is None else float(f"{value:.6g}")


def points(rows: Rows, key: str) -> Points:
    """The figures under `key` with six digits."""
    return [(row, rounded(row[key])) for row in rows]


def key_curve(
    rows: Rows, key: str, tint: str, width: float = 1.2, marks: str = "", **more: Any
) -> go.Scatter:
    """The curve of one figure of a run's rows; a smoothed loss can be switched to the logged one."""
    logged = points(rows, "loss") if key == "smooth_loss" else ()
    return curve(points(rows, key), tint, width, marks, logged, **more)


def lines_figure(curves: Sequence[go.Scatter], **y_axis: Any) -> go.Figure:
    """Curves over each other."""
    figure = go.Figure(curves, {**PLOT, "margin_t": 10})
    figure.update_yaxes(zeroline=False, nticks=7, hoverformat=".4f").update_yaxes(y_axis)
    switch_x(figure)
    return figure


class Series(NamedTuple):
    """One score over checkpoints; published: the same score of another model, drawn as a dotted line; ends: of the
    interval of 95 % of each point, () where it is not known.
    """

    name: str
    points: Points
    published: float | None = None
    ends: Sequence[Sequence[float]] = ()


def checkpoint_figure(
    series: Sequence[Series], places: Sequence[int] = (), height: int = 276, **y_axis: Any
) -> go.Figure:
    """A curve for each series through the checkpoints that have its score. places: of the series in the palette."""
    curves, published = [], []
    for (name, points, value, ends), place in zip(series, places or range(len(series)), strict=True):
        known = [point for point in points if point[1] is not None]
        look: dict[str, Any] = {"name": name, "legendgroup": name, **whiskers(points, ends)}
        curves.append(curve(known, colour(place), marks="circle", line_dash=dash(place)).update(look))
        if value is not None:
            published.append((value, {"color": colour(place), "width": 1.4, "dash": "dot"}))
    figure = lines_figure(curves, **y_axis).update_layout(height=height)
    for value, line in published:
        figure.add_hline(value, line=line)
    return figure


def whiskers(points: Points, ends: Sequence[Sequence[float]]) -> dict[str, Any]:
    """The bars of the intervals of those points that have a figure; {} where none has one."""
    known = [(y, end) for (_, y), end in zip(points, ends, strict=bool(ends)) if y is not None]
    if not any(end for _, end in known):
        return {}
    low, high = ([abs(end[side] - y) if end else 0 for y, end in known] for side in (0, 1))
    return {"error_y": {"type": "data", "array": high, "arrayminus": low, "thickness": 1, "width": 3}}


def add_choice(figure: go.Figure, name: str, options: dict[str, dict[str, Any]]) -> None:
    """A row of buttons above the chart, see records.page.chart. options: {option: changes of the layout}; the
    first one is chosen.
    """
    figure.update_layout(meta={**(figure.layout.meta or {}), name: options})


def add_smoothing(figure: go.Figure) -> go.Figure:
    """The choices of a figure whose first y axis is a loss."""
    add_choice(figure, "smoothing", {"on": {}, "off": {}})
    add_choice(figure, "scale", {"linear": {}, "log": {"yaxis.type": "log"}})
    return figure


def switch_x(figure: go.Figure, marks: Callable[[str], dict[str, Any]] = lambda key: {}) -> None:
    """Give all curves their x, with a choice of the axes on which all points have a place.

    marks: the changes of the layout that belong to an axis, by its key of a row.
    """
    found = [trace.meta["x"] for trace in figure.data]
    known = [axis for axis in AXES if all(x is not None for at in found for x in at[axis]["x"])] or ["steps"]
    for trace, at in zip(figure.data, found, strict=True):
        trace.x = at[known[0]]["x"]
        trace.meta = {**trace.meta, "x": {axis: at[axis] for axis in known[1:]}}
    changes = {axis: {"xaxis.title.text": AXES[axis][1], **marks(AXES[axis][0])} for axis in known}
    figure.update_layout({path.replace(".", "_"): value for path, value in changes[known[0]].items()})
    add_choice(figure, "x", changes)
    figure.update_xaxes(title_font_size=12, exponentformat="SI", nticks=8, zeroline=False)


# several runs, and sources


def loss_curves(
    rows: Rows, width: int, name: str, place: int, smoothed: Losses, logged: Losses, valid: Losses
) -> list[go.Scatter]:
    """A smoothed loss that can be switched to the logged one, and its validation loss as diamonds.

    The losses are one a row, None where there is none. All validation losses are drawn; width: see `sample`.
    """
    known = [{"n": row["n"], "i": i, "loss": loss} for i, (row, loss) in enumerate(zip(rows, smoothed, strict=True))
             if loss is not None]  # fmt: skip
    chosen = [each["i"] for each in sample(known, width, [("loss", min), ("loss", max)])]
    line, raw = ([(rows[i], rounded(of[i])) for i in chosen] for of in (smoothed, logged))
    validated = [(row, rounded(loss)) for row, loss in zip(rows, valid, strict=True) if loss is not None]
    look: dict[str, Any] = {"legendgroup": name, "line_dash": dash(place)}
    return [
        curve(line, colour(place), 2, "", raw, name=name, **look),
        curve(validated, colour(place), 0.8, "diamond", name=f"{name}, validation", opacity=0.8, **look),
    ]


def comparison_figure(runs: Sequence[Run]) -> go.Figure:
    """Loss and validation loss of several runs; a ring where a run branches."""
    curves = []
    for index, run in enumerate(runs):
        rows = [row for row in run.kept_rows if row["x_tokens"] is not None]
        losses = [[row[key] for row in rows] for key in ("smooth_loss", "loss", "valid_loss")]
        curves += loss_curves(rows, width_of(run), run.name, index, *losses)
        parent = next((lineage.get("parent") for lineage in run.lineages.values()), None)
        first = next((point for point in points(rows, "smooth_loss") if point[1] is not None), None)
        if first and parent:
            ring = curve([first], colour(index), marks="circle-open", legendgroup=run.name)
            told = f"{run.name} begins at {parent}"
            ring.update(name=told, hovertemplate="%{fullData.name}<extra></extra>")
            curves.append(ring.update(marker={"size": 12, "line": {"width": 2}}))
    return add_smoothing(lines_figure(curves))


def sources_of(run: Run) -> list[str]:
    """All sources that any phase trains on or validates, in order."""
    keys = ("loss_by_source", "tokens_by_source", "valid_loss_by_position")
    return list(dict.fromkeys(name for row in run.kept_rows for key in keys for name in row[key]))


def source_places(run: Run) -> dict[str, int]:
    """The place of every source in the palette, in all figures: those of training
    first, then held-out text's.
    """
    held_out = (name for record in run.evals_of("bits_per_byte") for name in record["sources"] or {})
    return {name: index for index, name in enumerate(dict.fromkeys([*sources_of(run), *held_out]))}


def sources_figure(run: Run) -> go.Figure:
    """Loss by source, smoothed (lines), and validation loss by source (diamonds)."""
    curves, places = [], source_places(run)
    for phase, name in itertools.product(run.phases, sources_of(run)):
        rows = run.rows_of(phase)
        logged, valid = (
            [number(row[key].get(name)) for row in rows] for key in ("loss_by_source", "valid_loss_by_source")
        )
        smoothed = [row["smooth_by_source"].get(name) for row in rows]
        curves += loss_curves(rows, width_of(run), name, places[name], smoothed, logged, valid)
    return add_smoothing(lines_figure(curves))


def positions_figure(run: Run, first: Row, last: Row) -> go.Figure:
    """Validation loss by octave of positions, a curve for each source; dotted: that of the `first` row."""
    figure, places = go.Figure(layout={**PLOT, "margin_t": 10}), source_places(run)
    known = {int(octave) for losses in last["valid_loss_by_position"].values() for octave in losses}
    for row, dotted in ((last, False), (first, True)):
        for name, losses in row["valid_loss_by_position"].items():
            tint = colour(places[name])
            look = {"line_dash": "dot", "opacity": 0.6} if dotted else {}
            figure.add_scatter(
                x=list(losses), y=[rounded(number(loss)) for loss in losses.values()], name=name,
                legendgroup=name, line_color=tint, mode="lines" if dotted else "lines+markers", **look,
                hovertemplate=f"%{{y:.4f}}  step {row['step']:,}",
            )  # fmt: skip
    figure.update_xaxes(type="category", categoryarray=[str(octave) for octave in sorted(known)])
    figure.update_xaxes(title_text="first position of an octave, tokens", title_font_size=12)
    return figure.update_yaxes(zeroline=False, nticks=7)
