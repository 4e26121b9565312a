"""The figures of a run's training: panels over one axis, losses of several runs and sources, bits per byte.

A new panel is one row of TRAINING or MACHINE. A long run has more rows than a screen has pixels: `sample` keeps, of
each bucket of neighbouring rows, those with the extremes, so that no spike is lost. Smoothing comes first, on all rows.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from html import escape
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import plotly.graph_objects as go

from records.page import BAD, NEUTRAL, PLOT, colour, dash
from records.run import Run, number

Rows = Sequence[dict[str, Any]]
PHASE_TINTS = ("rgba(79,143,247,0.07)", "rgba(240,153,75,0.09)", "rgba(47,181,160,0.08)")
VALID = "#a03fb8"  # validation loss
MARKS = 100  # more points than this are a line without marks
BUCKETS = 400  # about one for every three pixels of a wide screen
LONG = 500  # losses; the axis of a longer curve leaves out its steep start and the tips of its spikes
TITLE_PX = 48  # above each panel
MANY = 30  # more restarts than this are not numbered
AXES = {  # name -> key of a row or record, title
    "tokens": ("x_tokens", "tokens seen, all phases"),
    "steps": ("x_step", "step, all phases"),
    "FLOPs": ("x_flops", "training FLOPs, all phases"),
}
BUTTONS = {"type": "buttons", "direction": "right", "bgcolor": "rgba(0,0,0,0)", "font": {"size": 11}, "x": 1,
           "xanchor": "right"}  # fmt: skip
TROUBLE = re.compile(
    "unclean|fail|crash|kill|hang|spike|nan|finite|damage|corrupt|quarantine|roll|lost|bad|stop|error|exit"
)


class Panel(NamedTuple):
    """One of several plots above each other."""

    title: str
    unit: str
    keys: tuple[str, ...]  # of a row, one a curve
    px: int  # height
    form: str = ".3g"  # of its figures in the hover box
    extremes: tuple[Callable[..., int], ...] = (min, max)  # of the first key, that `sample` must keep
    axis: dict[str, Any] = {}  # noqa: RUF012  (read only)


SIGNED = {"rangemode": "normal"}
TRAINING = (
    Panel("Loss", "nats per token", ("loss", "smooth_loss"), 344, ".4f", axis={**SIGNED, "nticks": 7}),
    Panel("Learning rate", "", ("lr",), 72, extremes=(), axis={"exponentformat": "power"}),
    Panel("Gradient norm", "", ("grad_norm",), 96, extremes=(max,)),
    Panel("Tokens per second", "", ("tokens_per_s",), 104, ",.0f", extremes=(min,)),
)
MACHINE = (
    Panel("z-score of the loss", "robust deviations", ("loss_z",), 81, ".2f", axis=SIGNED),
    Panel("z-score of the gradient norm", "", ("grad_norm_z",), 81, ".2f", axis=SIGNED),
    Panel("Tokens per second and device", "", ("tokens_per_s_per_device",), 81, ",.0f"),
    Panel("MFU", "% of the peak", ("mfu",), 81, ".1f"),
    Panel("Waiting for data", "% of the time", ("data_percent",), 81, ".2f"),
    Panel("Waiting for checkpoints", "s", ("checkpoint_s",), 81, ".2f"),
    Panel("Peak memory", "GiB", ("memory_gib",), 81, ".2f"),
)
LOOKS: dict[str, dict[str, Any]] = {
    "loss": {"opacity": 0.3},
    "smooth_loss": {"line_width": 2.4},
    "lr": {"line_width": 1.8, "line_color": NEUTRAL},
}


# curves


def curve(
    rows: Rows, y: Sequence[float | None], tint: str, width: float = 2, marks: str = "", **more: Any
) -> go.Scatter:
    """One curve; its places on all AXES travel along as `meta`, for `switch_x`. marks: a plotly symbol."""
    return go.Scatter(
        y=y, meta={axis: [row.get(key) for row in rows] for axis, (key, _) in AXES.items()},
        mode="lines+markers" if marks and len(rows) <= MARKS else "lines", line={"color": tint, "width": width},
        marker={"symbol": marks or "circle", "size": 6, "color": tint},
    ).update(more)  # fmt: skip


def six_digits(rows: Rows, key: str) -> list[float | None]:
    return [None if row[key] is None else float(f"{row[key]:.6g}") for row in rows]


def switch_x(figure: go.Figure, changes: Callable[[str], dict[str, Any]] | None = None, **place: Any) -> None:
    """Give all curves their x, with a button for every axis on which all points have a place.

    changes: the changes of the layout that belong to an axis; its title where there are none. place: of the buttons.
    """
    found = [trace.meta for trace in figure.data]
    known = [axis for axis in AXES if all(x is not None for at in found for x in at[axis])] or ["steps"]
    changes = changes or (lambda axis: {"xaxis.title.text": AXES[axis][1]})
    layouts = {axis: {**changes(axis), "xaxis.autorange": True} for axis in known}
    for trace, at in zip(figure.data, found, strict=True):
        trace.update(x=at[known[0]], meta=None)
    buttons = [
        {"label": axis, "method": "update", "args": [{"x": [at[axis] for at in found]}, layouts[axis]]}
        for axis in known
    ]
    place = place or {"y": 1, "yanchor": "bottom", "pad": {"b": 4}}
    figure.update_layout(layouts[known[0]])
    figure.update_layout(updatemenus=[{**BUTTONS, **place, "buttons": buttons}] if len(known) > 1 else [])
    figure.update_xaxes(title_font_size=12, exponentformat="SI", nticks=8, zeroline=False)


def sample(rows: Rows, buckets: int, panels: Sequence[Panel] = TRAINING) -> list[int]:
    """Indices of the rows to draw: all when few, else of each bucket its first row and the extremes of the panels."""
    if len(rows) <= 4 * buckets:
        return list(range(len(rows)))
    chosen = {len(rows) - 1}
    for bucket in range(buckets):
        inside = range(bucket * len(rows) // buckets, (bucket + 1) * len(rows) // buckets)
        chosen.add(inside[0])
        for panel in panels:
            key = panel.keys[0]
            known = [i for i in inside if rows[i][key] is not None] if panel.extremes else []
            chosen.update(extreme(known, key=lambda i, key=key: rows[i][key]) for extreme in panel.extremes if known)
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
    """Set `smooth_loss` of all rows that count, phase by phase, and to None in the others."""
    for stretch in run.stretches:
        for row in stretch.rows:
            row["smooth_loss"] = None
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


# panels of one run


def training_figure(run: Run) -> go.Figure:
    """Loss with validation and events, learning rate, gradient norm and speed over one axis of steps or tokens."""
    figure = go.Figure(layout=PLOT)
    for stretch in run.stretches:
        if not stretch.kept:
            rows, tint = _sampled(run, stretch.rows, TRAINING), _tint(run, stretch)
            figure.add_trace(
                curve(rows, six_digits(rows, "loss"), tint, 1.2, line_dash="dot", opacity=0.6, hoverinfo="skip")
            )
    _draw_panels(figure, run, TRAINING)
    validated = [row for row in run.kept_rows if row["valid_loss"] is not None]
    for phase in run.phases:  # another mixture has another validation loss: no line from one to the next
        rows = [row for row in validated if row["phase"] == phase]
        figure.add_trace(curve(rows, six_digits(rows, "valid_loss"), VALID, 1.4, "diamond", hoverinfo="skip"))
    losses = sorted(settled([row["loss"] for row in run.kept_rows]))
    if len(losses) >= LONG:
        losses = losses[: int(0.999 * len(losses))]
    lowest = min((row["valid_loss"] for row in validated), default=None)
    figure.update_yaxes(selector=0, range=span([*losses, *([] if lowest is None else [lowest])]))
    _draw_events(figure, run)
    _mark_x(figure, run, TRAINING)
    return figure


def machine_figure(run: Run) -> go.Figure:
    """z-scores, speed, waiting and memory, attempts in the colours of the training figure."""
    figure = go.Figure(layout=PLOT)
    _draw_panels(figure, run, MACHINE)
    _mark_x(figure, run, MACHINE)
    return figure


def attempts_of(run: Run) -> list[tuple[str, int]]:
    """(phase, attempt) in the order of the run: the place of an attempt is its colour."""
    return list(dict.fromkeys((s.phase, s.attempt) for s in run.stretches))


def _tint(run: Run, stretch: Any) -> str:
    return colour(attempts_of(run).index((stretch.phase, stretch.attempt)))


def _sampled(run: Run, rows: Rows, panels: Sequence[Panel]) -> list[dict[str, Any]]:
    buckets = math.ceil(BUCKETS * len(rows) / sum(len(s.rows) for s in run.stretches))
    return [rows[i] for i in sample(rows, buckets, panels)]


def _draw_panels(figure: go.Figure, run: Run, panels: Sequence[Panel]) -> None:
    """The curves of all panels, attempt by attempt, their axes and titles, and what the hover box says."""
    drawn: list[dict[str, Any]] = []
    for stretch in run.stretches:
        if not stretch.kept:
            continue
        rows = _sampled(run, stretch.rows, panels)
        joined = [row for row in drawn[-1:] if row["phase"] == stretch.phase]  # a restart leaves no gap in the curve
        for axis, panel in enumerate(panels, start=1):
            for key in panel.keys:
                values = six_digits([*joined, *rows], key)
                if any(value is not None for value in values):
                    look = {"yaxis": f"y{axis}", "hoverinfo": "skip", **LOOKS.get(key, {})}
                    figure.add_trace(curve([*joined, *rows], values, _tint(run, stretch), 1.2, **look))
        drawn += rows
    key, axis = ("loss", 1) if panels[0].keys[0] == "loss" else ("zero", len(panels))
    texts = [_hover_text(row, panels) for row in drawn]
    told = curve(drawn, [row.get(key, 0.0) for row in drawn], "rgba(0,0,0,0)", yaxis=f"y{axis}", text=texts)
    figure.add_trace(told.update(hovertemplate="%{text}<extra></extra>"))
    _lay_out(figure, panels, [p for p in panels if any(row[key] is not None for row in drawn for key in p.keys)])


def _hover_text(row: dict[str, Any], panels: Sequence[Panel]) -> str:
    lines = [f"{row['phase']}, attempt {row['attempt']}, step {row['step']:,}"]
    for panel in panels:
        values = ["not measured" if row[key] is None else format(row[key], panel.form) for key in panel.keys]
        lines.append(f"{panel.title[0].lower() + panel.title[1:]} {', smoothed '.join(values)}")
    if row["valid_loss"] is not None and panels is TRAINING:
        lines.append(f"validation loss {row['valid_loss']:.4f}")
    return "<br>".join(lines)


def _domains(panels: Sequence[Panel]) -> list[tuple[float, float]]:
    """(bottom, top) of each panel as shares of the height, from their heights in pixels."""
    below = list(accumulate(panel.px + TITLE_PX for panel in panels))
    return [(1 - low / below[-1], 1 - (low - panel.px) / below[-1]) for low, panel in zip(below, panels, strict=True)]


def _lay_out(figure: go.Figure, panels: Sequence[Panel], with_figures: Sequence[Panel]) -> None:
    for index, (panel, domain) in enumerate(zip(panels, _domains(panels), strict=True), start=1):
        axis = {"domain": domain, "anchor": "x", "nticks": 3, "zeroline": False, "fixedrange": True,
                "rangemode": "tozero", "exponentformat": "SI", **panel.axis}  # fmt: skip
        figure.update_layout({f"yaxis{index}": axis})
        unit = panel.unit if panel in with_figures else "not measured"
        place = {"x": 0, "y": domain[1], "xanchor": "left", "yanchor": "bottom", "yshift": 3}
        figure.add_annotation(
            text=f"<b>{panel.title}</b>  {unit}".strip(), xref="paper", yref="paper", showarrow=False, **place
        )
    height = 80 + sum(panel.px + TITLE_PX for panel in panels)
    figure.update_layout(height=height, margin={"t": 24, "b": 56}, hoversubplots="axis", xaxis_anchor=f"y{len(panels)}")
    figure.update_xaxes(hoverformat=".4s", spikethickness=1)


def _draw_events(figure: go.Figure, run: Run) -> None:
    """Faults, roll-backs and starts as marks above the loss; what happened stands in their hover boxes."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for event in run.events:
        if event["x_step"] is not None:
            key = event["phase"], event.get("attempt"), event["x_step"], event.get("kind")
            groups.setdefault(key, []).append(event)
    if not groups:
        return
    tints = [BAD if TROUBLE.search(str(g[0].get("kind")).lower()) else NEUTRAL for g in groups.values()]
    axis, top = len(TRAINING) + 1, _domains(TRAINING)[0][1]
    marks = curve(
        [group[0] for group in groups.values()], [0.0] * len(groups), NEUTRAL, mode="markers", yaxis=f"y{axis}",
        text=[event_text(group) for group in groups.values()], hovertemplate="%{text}<extra></extra>", cliponaxis=False,
    )  # fmt: skip
    figure.add_trace(marks.update(marker={"symbol": "triangle-down", "size": 10, "color": tints}))
    strip = {"domain": (top + 0.6 * (1 - top), 1 - 0.1 * (1 - top)), "visible": False, "fixedrange": True}
    figure.update_layout({f"yaxis{axis}": {**strip, "range": [-1, 1]}})


def event_text(group: Rows) -> str:
    """What one kind of event at one step was: its first record, and how many ranks or times there were."""
    first = group[0]
    told = {"phase", "kind", "step", "attempt", "time", "x_step", "x_tokens"}
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in first.items() if k not in told and v is not None}
    details = [f"{key} {text if len(text) <= 90 else text[:89] + '…'}" for key, text in texts.items()]
    more = f" ({len(group)} times)" if len(group) > 1 else ""
    head = f"<b>{escape(str(first.get('kind', 'event')))}</b>{more}, attempt {first.get('attempt', '?')}"
    return "<br>".join([f"{head}, step {first.get('step')}", *map(escape, details[:6])])


def restarts(run: Run) -> Rows:
    """The first row of every stretch that continues a phase after a restart or a step back."""
    pairs = [(a, b) for a, b in pairwise(run.stretches) if a.phase == b.phase]
    return [b.rows[0] for a, b in pairs if a.attempt != b.attempt or b.rows[0]["step"] <= a.rows[-1]["step"]]


def _mark_x(figure: go.Figure, run: Run, panels: Sequence[Panel]) -> None:
    """The axis of x of all panels, with shaded phases, restart lines and their labels."""
    titles = [annotation.to_plotly_json() for annotation in figure.layout.annotations]
    top = _domains(panels)[0][1]

    def marks(axis: str) -> dict[str, Any]:
        x, title = AXES[axis]
        under = {"xref": "paper", "yref": "paper", "x": 0, "y": 0, "xanchor": "left", "yanchor": "top", "yshift": -26}
        shapes, labels = _phase_marks(run, x)
        lines, numbers = _restart_marks(run, x, top)
        below = {**under, "text": title, "showarrow": False}
        return {"shapes": [*shapes, *lines], "annotations": [*titles, below, *labels, *numbers]}

    switch_x(figure, marks, y=0, yanchor="top", pad={"t": 24})


def _phase_marks(run: Run, x: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    shapes, labels = [], []
    for index, phase in enumerate(run.phases):
        start = run.origins[phase][x == "x_tokens"]
        end = max((row[x] for row in run.kept_rows if row["phase"] == phase), default=start)
        area = {"type": "rect", "xref": "x", "yref": "paper", "y0": 0, "y1": 1, "layer": "below", "line": {"width": 0}}
        shapes.append({**area, "x0": start, "x1": end, "fillcolor": PHASE_TINTS[index % len(PHASE_TINTS)]})
        parent = run.lineages.get(phase, {}).get("parent") if index == 0 else None
        origin = f" from {'/'.join(Path(parent).parts[-3::2])}" if parent else ""
        label = {"xref": "x", "yref": "paper", "x": (start + end) / 2, "y": 1, "yanchor": "bottom", "showarrow": False}
        labels.append({**label, "text": f"<b>{escape(phase)}</b>{escape(origin)}"})
    return shapes, labels


def _restart_marks(run: Run, x: str, top: float) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    shapes, labels, rows = [], [], restarts(run)
    for row in rows:
        dotted = {"color": NEUTRAL, "width": 1, "dash": "dot"}
        line = {"type": "line", "xref": "x", "yref": "paper", "y0": 0, "y1": top, "line": dotted, "opacity": 0.7}
        shapes.append({**line, "x0": row[x], "x1": row[x], "layer": "below"})
        label = {"xref": "x", "yref": "paper", "x": row[x], "y": top, "yanchor": "top", "xanchor": "left", "xshift": 1}
        labels.append({**label, "text": f"↻{row['attempt']}", "showarrow": False})
    return shapes, labels if len(rows) <= MANY else []


# runs, sources and checkpoints


def comparison_figure(runs: Sequence[Run]) -> go.Figure:
    """Loss (smoothed, lines) and validation loss (marks) of several runs over tokens; a ring where a run branches."""
    figure, losses = go.Figure(layout=PLOT), list[float]()
    for index, run in enumerate(runs):
        rows = [row for row in run.kept_rows if row["x_tokens"] is not None]
        losses += settled([row["smooth_loss"] for row in rows])
        rows = [rows[i] for i in sample(rows, BUCKETS)]
        look: dict[str, Any] = {"name": run.name, "line_dash": dash(index)}
        figure.add_trace(curve(rows, six_digits(rows, "smooth_loss"), colour(index), **look))
        validated = [row for row in rows if row["valid_loss"] is not None]
        points = curve(validated, six_digits(validated, "valid_loss"), colour(index), marks="diamond", mode="markers")
        figure.add_trace(points.update(name=f"{run.name}, validation"))
        first = [row for row in rows if row["smooth_loss"] is not None][:1]
        parents = [lineage.get("parent") for lineage in run.lineages.values()][:1]
        if first and any(parents):
            ring = {"symbol": "circle-open", "size": 12, "color": colour(index), "line": {"width": 2}}
            told = {"name": f"{run.name} begins at {parents[0]}", "hovertemplate": "%{fullData.name}<extra></extra>"}
            y = [first[0]["smooth_loss"]]
            figure.add_trace(curve(first, y, colour(index), mode="markers").update(marker=ring, **told))
    figure.update_yaxes(fixedrange=True, zeroline=False, nticks=7, range=span(losses))
    switch_x(figure)
    figure.update_layout(margin={"t": 36})
    return figure


def sources_of(run: Run) -> list[str]:
    """All sources that any phase names, in order; the place of a source is its colour."""
    return list(
        dict.fromkeys(name for row in run.kept_rows for name in (*row["loss_by_source"], *row["tokens_by_source"]))
    )


def sources_figure(run: Run) -> go.Figure:
    """Loss by source, smoothed (lines), and validation loss by source (diamonds)."""
    figure, shown = go.Figure(layout=PLOT), list[float]()
    for phase in run.phases:
        rows = [row for row in run.kept_rows if row["phase"] == phase]
        every = max(1, len(rows) // (2 * BUCKETS))
        for index, name in enumerate(sources_of(run)):
            look: dict[str, Any] = {"name": name, "line_dash": dash(index)}
            losses = smooth([number(row["loss_by_source"].get(name)) for row in rows], half_life_rows(run))
            points = [(row, float(f"{y:.6g}")) for row, y in zip(rows, losses, strict=True) if y is not None]
            points = [*points[::every], *points[-1:]]
            figure.add_trace(curve([row for row, _ in points], [y for _, y in points], colour(index), 1.8, **look))
            shown += settled([y for _, y in points])
            known = [(r, y) for r in rows if (y := number(r["valid_loss_by_source"].get(name))) is not None]
            shown += [min(y for _, y in known)] if known else []
            look |= {"name": f"{name}, validation", "opacity": 0.8}
            figure.add_trace(curve([r for r, _ in known], [y for _, y in known], colour(index), 0.8, "diamond", **look))
    figure.update_yaxes(fixedrange=True, zeroline=False, nticks=7, hoverformat=".4f", range=span(shown))
    switch_x(figure)
    figure.update_layout(margin={"t": 36})
    return figure


def bits_figure(points: Rows, sources: Sequence[str]) -> go.Figure:
    """Bits per byte of each source over the evaluated checkpoints."""
    figure = go.Figure(layout={**PLOT, "height": 276})
    for index, source in enumerate(sources):
        known = [point for point in points if source in point["sources"]]
        y = [point["sources"][source]["bits_per_byte"] for point in known]
        figure.add_trace(curve(known, y, colour(index), marks="circle", name=source))
    figure.update_yaxes(nticks=6, fixedrange=True, zeroline=False)
    switch_x(figure)
    figure.update_layout(margin={"t": 36, "b": 44})
    return figure
