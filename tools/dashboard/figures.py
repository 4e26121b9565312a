"""Curves with a choice of the axis of x, and the figures made of them: losses of several
runs and sources, checkpoints.

A long run has more rows than a screen has pixels: `sample` keeps, of each bucket of neighbouring rows, those
with the extremes, so that no spike is lost. Smoothing comes first, on all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import plotly.graph_objects as go

from laneformer.config import LaneformerConfig, flops_per_token
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


# curves


def curve(points: Points, tint: str, width: float = 2, marks: str = "", **more: Any) -> go.Scatter:
    """One curve; its places on all AXES travel along as `meta`, for `switch_x`. marks: a plotly symbol."""
    places = {axis: {"x": [row.get(key) for row, _ in points]} for axis, (key, _) in AXES.items()}
    return go.Scatter(
        y=[y for _, y in points], line={"color": tint, "width": width}, meta={"x": places},
        mode="lines+markers" if marks and len(points) <= MARKS else "lines",
        marker={"symbol": marks or "circle", "size": 6, "color": tint},
    ).update(more)  # fmt: skip


def smoothed(trace: go.Scatter, logged: Sequence[float | None]) -> go.Scatter:
    """A smoothed curve, with the logged values as its y where the reader switches smoothing off."""
    trace.meta = {**trace.meta, "smoothing": {"off": {"y": logged}}}
    return trace


def points(rows: Rows, key: str) -> list[tuple[dict[str, Any], float | None]]:
    """The figures under `key` with six digits."""
    return [(row, None if row[key] is None else float(f"{row[key]:.6g}")) for row in rows]


def key_curve(
    rows: Rows, key: str, tint: str, width: float = 1.2, marks: str = "", **more: Any
) -> go.Scatter:
    """The curve of one figure of a run's rows; a smoothed loss can be switched to the logged one."""
    trace = curve(points(rows, key), tint, width, marks, **more)
    return smoothed(trace, [y for _, y in points(rows, "loss")]) if key == "smooth_loss" else trace


def lines_figure(curves: Sequence[go.Scatter], height: int = 380, **y_axis: Any) -> go.Figure:
    """Curves over each other."""
    figure = go.Figure(curves, {**PLOT, "height": height})
    figure.update_layout(margin_t=10)
    figure.update_yaxes(zeroline=False, nticks=7, **y_axis)
    switch_x(figure)
    return figure


def checkpoint_figure(
    records: Rows, names: Sequence[str], value: Callable[..., float | None], places: Sequence[int] = ()
) -> go.Figure:
    """A curve a name over evaluated checkpoints. value: of (record, name), None if unknown.
    places: in the palette.
    """
    found = [[(record, y) for record in records if (y := value(record, name)) is not None] for name in names]
    places = places or range(len(names))
    curves = [
        curve(known, colour(i), marks="circle", name=name, legendgroup=name, line_dash=dash(i))
        for known, name, i in zip(found, names, places, strict=True)
    ]
    later = [
        y for known in found for _, y in known[len(known) // 20 :]
    ]  # the first ones would flatten the rest
    return lines_figure(curves, 276, hoverformat=".4f", range=span(later))


def add_choice(figure: go.Figure, name: str, options: dict[str, dict[str, Any]]) -> None:
    """A row of buttons above the chart, see records.page.chart. options: {option: changes of the layout}; the
    first one is chosen.
    """
    figure.update_layout(meta={**(figure.layout.meta or {}), name: options})


def add_smoothing(figure: go.Figure) -> None:
    """The choices of a figure whose first y axis is a loss."""
    add_choice(figure, "smoothing", {"on": {}, "off": {}})
    add_choice(figure, "scale", {"linear": {}, "log": {"yaxis.type": "log"}})


def switch_x(figure: go.Figure, changes: Callable[[str], dict[str, Any]] | None = None) -> None:
    """Give all curves their x, with a choice of the axes on which all points have a place.

    changes: the changes of the layout that belong to an axis; its title where there are none.
    """
    found = [trace.meta["x"] for trace in figure.data]
    known = [axis for axis in AXES if all(x is not None for at in found for x in at[axis]["x"])] or ["steps"]
    changes = changes or (lambda axis: {"xaxis.title.text": AXES[axis][1]})
    for trace, at in zip(figure.data, found, strict=True):
        trace.update(x=at[known[0]]["x"])
        trace.meta = {**trace.meta, "x": {axis: at[axis] for axis in known[1:]}}
    figure.update_layout({path.replace(".", "_"): value for path, value in changes(known[0]).items()})
    add_choice(figure, "x", {axis: changes(axis) for axis in known})
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

    The half-life, in values, grows to its full length: a loss falls like a power of the steps, so that a mean
    over a fixed span would lie far above its steep beginning.
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


def prepare(run: Run) -> None:
    """Set `smooth_loss`, phase by phase, and `x_flops` of all rows and events."""
    flops = flops_of(run)
    for row in (*run.events, *(row for segment in run.segments for row in segment.rows)):
        row["x_flops"] = (
            None if flops is None or row["x_tokens"] is None else float(f"{row['x_tokens'] * flops:.7g}")
        )
    for phase in run.phases:
        rows = [row for row in run.kept_rows if row["phase"] == phase]
        for row, mean in zip(rows, smooth([row["loss"] for row in rows], half_life_rows(run)), strict=True):
            row["smooth_loss"] = mean


def flops_of(run: Run) -> int | None:
    """Training FLOPs of a token, at the sequence length of the run's first phase."""
    try:
        model = LaneformerConfig.from_dict(run.model)
    except (TypeError, ValueError):
        return None
    lengths = [config.get("training", {}).get("seq_len") for config in run.configs.values()]
    return flops_per_token(model, next((n for n in lengths if n), model.max_position_embeddings))


def settled(values: Sequence[float | None]) -> list[float]:
    """The known values; of a long curve without its first part, which would flatten the rest."""
    known = [value for value in values if value is not None]
    return known[len(known) // 16 :] if len(known) >= LONG else known


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
        look: dict[str, Any] = {"name": run.name, "legendgroup": run.name}
        line = curve(points(rows, "smooth_loss"), colour(index), line_dash=dash(index), **look)
        curves.append(smoothed(line, [y for _, y in points(rows, "loss")]))
        look |= {"name": f"{run.name}, validation", "mode": "markers"}
        curves.append(curve(validated, colour(index), marks="diamond", **look))
        parent = next((lineage.get("parent") for lineage in run.lineages.values()), None)
        if known and parent:
            look |= {
                "name": f"{run.name} begins at {parent}",
                "hovertemplate": "%{fullData.name}<extra></extra>",
            }
            look |= {"marker": {"size": 12, "line": {"width": 2}}}
            curves.append(curve(known[:1], colour(index), marks="circle-open", **look))
    figure = lines_figure(curves, range=span(losses), hoverformat=".4f")
    add_smoothing(figure)
    return figure


def sources_of(run: Run) -> list[str]:
    """All sources that any phase trains on, in order."""
    keys = ("loss_by_source", "tokens_by_source")
    return list(dict.fromkeys(name for row in run.kept_rows for key in keys for name in row[key]))


def source_places(run: Run) -> dict[str, int]:
    """The place of every source in the palette, in all figures: those of training
    first, then held-out text's.
    """
    held_out = (name for record in run.evals_of("bits_per_byte") for name in record.get("sources") or {})
    return {name: index for index, name in enumerate(dict.fromkeys([*sources_of(run), *held_out]))}


def sources_figure(run: Run) -> go.Figure:
    """Loss by source, smoothed (lines), and validation loss by source (diamonds)."""
    curves, shown, sources, half_life = [], list[float](), source_places(run), half_life_rows(run)
    for phase in run.phases:
        rows = [row for row in run.kept_rows if row["phase"] == phase]
        every = max(1, len(rows) // (2 * BUCKETS))
        for name in sources_of(run):
            raw = [number(row["loss_by_source"].get(name)) for row in rows]
            drawn = [i for i, value in enumerate(raw) if value is not None]
            drawn = [*drawn[::every], *drawn[-1:]]
            valid = [
                (row, y) for row in rows if (y := number(row["valid_loss_by_source"].get(name))) is not None
            ]
            look: dict[str, Any] = {"legendgroup": name, "line_dash": dash(sources[name])}
            means = rounded(smooth(raw, half_life), drawn)
            line = [(rows[i], y) for i, y in zip(drawn, means, strict=True)]
            trace = curve(line, colour(sources[name]), 1.8, name=name, **look)
            curves.append(smoothed(trace, rounded(raw, drawn)))
            look |= {"name": f"{name}, validation", "opacity": 0.8}
            curves.append(curve(valid, colour(sources[name]), 0.8, "diamond").update(look))
            shown += [*settled(means), *sorted(y for _, y in valid)[:1]]
    figure = lines_figure(curves, range=span(shown), hoverformat=".4f")
    add_smoothing(figure)
    return figure


def rounded(values: Sequence[float | None], chosen: Sequence[int]) -> list[float | None]:
    """The chosen values with six digits."""
    return [None if (y := values[i]) is None else float(f"{y:.6g}") for i in chosen]
