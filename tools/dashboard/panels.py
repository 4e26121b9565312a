"""The panels of one run: plots above each other over one axis of tokens or steps, with its
phases, restarts and events.

A new panel is one row of TRAINING or MACHINE; the layout follows from the heights.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import plotly.graph_objects as go

from records.page import BAD, NEUTRAL, PLOT, colour
from records.run import Run
from tools.dashboard.figures import (
    AXES,
    BUCKETS,
    LONG,
    add_smoothing,
    curve,
    key_curve,
    sample,
    settled,
    span,
    switch_x,
)

VALID = "#a03fb8"  # validation loss
TITLE_PX = 48  # above each panel
MANY = 16  # more restarts than this are not numbered
TROUBLE = re.compile(
    "unclean|fail|crash|kill|hang|spike|nan|finite|damage|corrupt|quaran|roll|lost|bad|stop|error|exit"
)
SHAPE = {"xref": "x", "yref": "paper", "y0": 0, "layer": "below"}
LABEL = {"yref": "paper", "showarrow": False}


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
    Panel("z-loss", "mean of (log Z)²", ("z_loss",), 81, ".3g"),
    Panel("Largest logit", "", ("max_logit",), 81, ".3g"),
    Panel("Tokens per second and device", "", ("tokens_per_s_per_device",), 81, ",.0f"),
    Panel("MFU", "% of the peak", ("mfu",), 81, ".1f"),
    Panel("Waiting for data", "% of the time", ("data_percent",), 81, ".2f"),
    Panel("Waiting for checkpoints", "s", ("checkpoint_s",), 81, ".2f"),
    Panel("Peak memory", "GiB", ("memory_gib",), 81, ".2f"),
)
LOOKS: dict[str, dict[str, Any]] = {
    "loss": {"opacity": 0.3}, "smooth_loss": {"line_width": 2.4}, "lr": {"line_width": 1.8, "line_color": NEUTRAL}
}  # fmt: skip


def extremes_of(panels: Sequence[Panel]) -> list[tuple[str, Callable[..., int]]]:
    return [(panel.keys[0], extreme) for panel in panels for extreme in panel.extremes]


def training_figure(run: Run) -> go.Figure:
    """Loss with validation and events, learning rate, gradient norm and speed over one axis
    of steps or tokens.
    """
    figure = go.Figure(layout=PLOT)
    panels = draw_panels(figure, run, TRAINING)
    for place, rows in _sampled(run, TRAINING, kept=False):
        look = {"line_dash": "dot", "opacity": 0.6, "hoverinfo": "skip", "legendgroup": rows[0]["phase"]}
        figure.add_trace(key_curve(rows, "loss", tint(run, place), **look))
    draw_validation(figure, run)
    losses = sorted(settled([row["loss"] for row in run.kept_rows]))
    if len(losses) >= LONG:
        losses = losses[: int(0.999 * len(losses))]
    lowest = sorted(row["valid_loss"] for row in run.kept_rows if row["valid_loss"] is not None)[:1]
    if panels and panels[0].keys[0] == "loss":
        figure.update_yaxes(selector=0, range=span([*losses, *lowest]))
    _draw_events(figure, run, panels)
    mark_x(figure, run, panels)
    add_smoothing(figure)
    return figure


def draw_validation(figure: go.Figure, run: Run, axis: str = "y") -> None:
    """The validation loss by phase: another mixture has another one, so there is no line from
    one to the next.
    """
    for phase in run.phases:
        rows = [row for row in run.kept_rows if row["phase"] == phase and row["valid_loss"] is not None]
        look = {"yaxis": axis, "legendgroup": "validation loss", "hoverinfo": "skip"}
        figure.add_trace(key_curve(rows, "valid_loss", VALID, 1.4, "diamond", **look))


def machine_figure(run: Run) -> go.Figure:
    """z-scores, speed, waiting and memory, attempts in the colours of the training figure."""
    figure = go.Figure(layout=PLOT)
    mark_x(figure, run, draw_panels(figure, run, MACHINE))
    return figure


def not_measured(run: Run, panels: Sequence[Panel]) -> list[str]:
    """The titles of panels that have no figure: they are not drawn."""
    return [
        p.title for p in panels if p.keys and all(row[key] is None for row in run.kept_rows for key in p.keys)
    ]


def attempts_of(run: Run) -> list[tuple[str, int]]:
    """(phase, attempt) in the order of the run."""
    return list(dict.fromkeys((s.phase, s.attempt) for s in run.segments))


def tint(run: Run, place: tuple[str, int]) -> str:
    """The colour of (phase, attempt): that of the phase, every other attempt paler."""
    phase, _ = place
    of_phase = [each for each in attempts_of(run) if each[0] == phase]
    return colour(run.phases.index(phase)) + ("99" if of_phase.index(place) % 2 else "")


def _sampled(
    run: Run, panels: Sequence[Panel], kept: bool
) -> Iterator[tuple[tuple[str, int], list[dict[str, Any]]]]:
    """((phase, attempt), rows to draw) of every segment that counts, or of those that do not."""
    total, extremes = sum(len(s.rows) for s in run.segments), extremes_of(panels)
    buckets = BUCKETS * 5 / max(5, 1 + len(extremes))  # about as many rows whatever the number of panels
    for s in (s for s in run.segments if s.kept == kept):
        chosen = sample(s.rows, math.ceil(buckets * len(s.rows) / total), extremes)
        yield (s.phase, s.attempt), [s.rows[i] for i in chosen]


def draw_panels(figure: go.Figure, run: Run, panels: Sequence[Panel]) -> list[Panel]:
    """The curves of all panels that have figures, attempt by attempt, their axes and titles,
    and the hover box.

    Returns the panels drawn. A panel without keys is left empty.
    """
    absent = not_measured(run, panels)
    panels = [panel for panel in panels if panel.title not in absent]
    drawn: list[dict[str, Any]] = []
    for place, rows in _sampled(run, panels, kept=True):
        joined = [row for row in drawn[-1:] if row["phase"] == rows[0]["phase"]]  # a restart leaves no gap
        for axis, panel in enumerate(panels, start=1):
            for key in panel.keys:
                trace = key_curve([*joined, *rows], key, tint(run, place))
                if any(value is not None for value in trace.y):
                    look = {"yaxis": f"y{axis}", "hoverinfo": "skip", "legendgroup": place[0]}
                    figure.add_trace(trace.update(look | LOOKS.get(key, {})))
        drawn += rows
    losses = [i for i, panel in enumerate(panels, start=1) if {"loss", "smooth_loss"} & {*panel.keys}]
    key, axis = (panels[losses[0] - 1].keys[0], losses[0]) if losses else ("zero", len(panels))
    texts = [_hover_text(row, panels) for row in drawn]
    told = curve([(row, row.get(key, 0.0)) for row in drawn], "rgba(0,0,0,0)", yaxis=f"y{axis}", text=texts)
    figure.add_trace(told.update(hovertemplate="%{text}<extra></extra>"))
    lay_out(figure, panels)
    return panels


def _hover_text(row: dict[str, Any], panels: Sequence[Panel]) -> str:
    lines = [f"{row['phase']}, attempt {row['attempt']}, step {row['step']:,}"]
    for panel in (panel for panel in panels if panel.keys):
        values = ["not measured" if row[key] is None else format(row[key], panel.form) for key in panel.keys]
        lines.append(f"{panel.title[0].lower() + panel.title[1:]} {', smoothed '.join(values)}")
    if row["valid_loss"] is not None and any("smooth_loss" in panel.keys for panel in panels):
        lines.append(f"validation loss {row['valid_loss']:.4f}")
    return "<br>".join(lines)


def domains(panels: Sequence[Panel]) -> list[tuple[float, float]]:
    """(bottom, top) of each panel as shares of the height, from their heights in pixels."""
    below = list(accumulate(panel.px + TITLE_PX for panel in panels))
    return [
        (1 - low / below[-1], 1 - (low - panel.px) / below[-1])
        for low, panel in zip(below, panels, strict=True)
    ]


def lay_out(figure: go.Figure, panels: Sequence[Panel]) -> None:
    for index, (panel, domain) in enumerate(zip(panels, domains(panels), strict=True), start=1):
        axis = {"domain": domain, "anchor": "x", "nticks": 3, "zeroline": False, "rangemode": "tozero",
                "exponentformat": "SI", **panel.axis}  # fmt: skip
        figure.update_layout({f"yaxis{index}": axis})
        place = {"x": 0, "y": domain[1], "xanchor": "left", "yanchor": "bottom", "yshift": 3}
        figure.add_annotation(
            {**LABEL, **place, "xref": "paper", "text": f"<b>{panel.title}</b>  {panel.unit}".strip()}
        )
    height = 80 + sum(panel.px + TITLE_PX for panel in panels)
    figure.update_layout(
        height=height, margin={"t": 24, "b": 56}, hoversubplots="axis", xaxis_anchor=f"y{len(panels)}"
    )
    figure.update_xaxes(hoverformat=".4s", spikethickness=1)


def _draw_events(figure: go.Figure, run: Run, panels: Sequence[Panel]) -> None:
    """Faults, roll-backs and starts as marks above the loss; what happened stands in their hover boxes."""
    groups = event_groups(event for event in run.events if event["x_step"] is not None)
    if not groups or not panels:
        return
    tints = [BAD if TROUBLE.search(str(group[0].get("kind")).lower()) else NEUTRAL for group in groups]
    axis, top = len(panels) + 1, domains(panels)[0][1]
    told = {"text": list(map(event_text, groups)), "hovertemplate": "%{text}<extra></extra>"}
    look = {
        "mode": "markers",
        "cliponaxis": False,
        "marker": {"symbol": "triangle-down", "size": 9, "color": tints},
    }
    marks = curve([(group[0], 0.0) for group in groups], NEUTRAL, yaxis=f"y{axis}", legendgroup="events")
    figure.add_trace(marks.update(told | look))
    strip = {"domain": (top + 0.6 * (1 - top), 1 - 0.1 * (1 - top)), "visible": False, "fixedrange": True}
    figure.update_layout({f"yaxis{axis}": {**strip, "range": [-1, 1]}})


def event_groups(events: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Events of all ranks that are one: of the same kind at the same place of the same attempt,
    with the same text.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for event in events:
        key = tuple(event.get(name) for name in ("phase", "attempt", "x_step", "kind", "text"))
        groups.setdefault(key, []).append(event)
    return list(groups.values())


def event_text(group: Sequence[dict[str, Any]]) -> str:
    """What one kind of event at one step was: its first record, and how many ranks or times there were."""
    first = group[0]
    told = {"phase", "kind", "step", "attempt", "time", *(key for key, _ in AXES.values())}
    texts = {
        k: v if isinstance(v, str) else json.dumps(v)
        for k, v in first.items()
        if k not in told and v is not None
    }
    details = [f"{key} {text if len(text) <= 90 else text[:89] + '…'}" for key, text in texts.items()]
    more = f" ({len(group)} times)" if len(group) > 1 else ""
    head = f"<b>{escape(str(first.get('kind', 'event')))}</b>{more}, attempt {first.get('attempt', '?')}"
    return "<br>".join([f"{head}, step {first.get('step')}", *map(escape, details[:6])])


def restarts(run: Run) -> list[dict[str, Any]]:
    """The first row of every segment that continues a phase after a restart or a step back."""
    pairs = [(a, b) for a, b in pairwise(run.segments) if a.phase == b.phase]
    return [b.rows[0] for a, b in pairs if a.attempt != b.attempt or b.rows[0]["step"] <= a.rows[-1]["step"]]


def mark_x(figure: go.Figure, run: Run, panels: Sequence[Panel]) -> None:
    """The axis of x of all panels, with shaded phases, restart lines and their labels."""
    titles = [annotation.to_plotly_json() for annotation in figure.layout.annotations]
    lines = [shape.to_plotly_json() for shape in figure.layout.shapes]
    top, rows = domains(panels)[0][1] if panels else 1.0, restarts(run)

    def marks(axis: str) -> dict[str, Any]:
        x, title = AXES[axis]
        place = {"xref": "paper", "x": 0, "y": 0, "xanchor": "left", "yanchor": "top", "yshift": -26}
        labels, shapes = [*titles, {**LABEL, **place, "text": title}], [*lines]
        for index, phase in enumerate(run.phases):
            places = [row[x] for row in run.kept_rows if row["phase"] == phase]
            start, end = min(places, default=0), max(places, default=0)
            area = {"type": "rect", "line": {"width": 0}, "fillcolor": f"{colour(index)}14"}
            shapes.append({**SHAPE, **area, "x0": start, "x1": end, "y1": 1})
            parent = run.lineages.get(phase, {}).get("parent") if index == 0 else None
            origin = f" from {'/'.join(Path(parent).parts[-3::2])}" if parent else ""
            text = f"<b>{escape(phase)}</b>{escape(origin)}"
            labels.append({**LABEL, "x": (start + end) / 2, "y": 1, "yanchor": "bottom", "text": text})
        for row in rows:
            line = {"type": "line", "line": {"color": NEUTRAL, "width": 1, "dash": "dot"}, "opacity": 0.5}
            shapes.append({**SHAPE, **line, "x0": row[x], "x1": row[x], "y1": top})
            if len(rows) <= MANY and panels and panels[0].keys:
                place = {"x": row[x], "y": top, "yanchor": "top", "xanchor": "left", "xshift": 1}
                labels.append({**LABEL, **place, "text": f"↻{row['attempt']}", "font": {"size": 10}})
        return {"shapes": shapes, "annotations": labels}

    switch_x(figure, marks)
