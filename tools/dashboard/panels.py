"""The panels of one run: plots above each other over one axis of tokens or steps, with its
phases, restarts and events.

A new panel is one row of TRAINING or MACHINE; the layout follows from the heights.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import plotly.graph_objects as go

from records.events import DONE, STOPPED
from records.page import BAD, NEUTRAL, PLOT, colour
from records.run import Record, Run
from tools.dashboard.figures import (
    add_smoothing,
    curve,
    key_curve,
    rounded,
    switch_x,
)
from tools.dashboard.rows import sample, width_of

VALID = "#a03fb8"  # validation loss
TITLE_PX = 48  # above each panel
MANY = 16  # more restarts than this are not numbered
TROUBLE = re.compile(
    "unclean|fail|crash|kill|hang|spike|nan|finite|damage|corrupt|quaran|roll|lost|bad|stop|error|exit"
)
PLACE = {
    "phase",
    "kind",
    "step",
    "attempt",
    "time",
    "x_step",
    "x_tokens",
    "x_flops",
    "rank",
    "host",
}  # of an event


class Panel(NamedTuple):
    """One of several plots above each other."""

    title: str
    unit: str
    keys: tuple[str, ...]  # of a row, one a curve
    px: int  # height
    form: str = ".3g"  # of its figures in the hover box
    extremes: tuple[Callable[..., int], ...] = (min, max)  # of the first key, that `sample` must keep
    axis: dict[str, Any] = {}  # noqa: RUF012  (read only)


SETTLED = {"rangemode": "normal"}  # see `fit` in records/page.js
TRAINING = (
    Panel("Loss", "nats per token", ("loss", "smooth_loss"), 344, ".4f", axis={**SETTLED, "nticks": 7}),
    Panel("Learning rate", "", ("lr",), 72, extremes=(), axis={"exponentformat": "power"}),
    Panel("Gradient norm", "", ("grad_norm",), 96, extremes=(max,)),
    Panel("Tokens per second", "", ("tokens_per_s",), 104, ",.0f", extremes=(min,)),
)
MACHINE = (
    Panel("z-score of the loss", "robust deviations", ("loss_z",), 81, ".2f"),
    Panel("z-score of the gradient norm", "", ("grad_norm_z",), 81, ".2f"),
    Panel("z-loss", "mean of (log Z)²", ("z_loss",), 81, ".3g"),
    Panel("Largest logit", "", ("max_logit",), 81, ".3g"),
    Panel("Tokens per second and device", "", ("tokens_per_s_per_device",), 81, ",.0f"),
    Panel("MFU", "% of the peak", ("mfu",), 81, ".1f"),
    Panel("Waiting for data", "% of the time", ("data_percent",), 81, ".2f"),
    Panel("Waiting for checkpoints", "s", ("checkpoint_s",), 81, ".2f"),
    Panel("Peak memory", "GiB", ("memory_gib",), 81, ".2f"),
)
NAMES = {"smooth_loss": "Loss, smoothed"}  # of curves in the hover box that are not named as their panel
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
    _draw_events(figure, run, panels)
    mark_x(figure, run)
    return add_smoothing(figure)


def draw_validation(figure: go.Figure, run: Run, axis: str = "y") -> None:
    """The validation loss by phase: another mixture has another one, so there is no line from
    one to the next.
    """
    for phase in run.phases:
        rows = [row for row in run.rows_of(phase) if row["valid_loss"] is not None]
        look = {"yaxis": axis, "name": "validation loss", "legendgroup": "validation loss"}
        figure.add_trace(
            key_curve(rows, "valid_loss", VALID, 1.4, "diamond", hovertemplate="%{y:.4f}", **look)
        )


def machine_figure(run: Run) -> go.Figure:
    """z-scores, speed, waiting and memory, attempts in the colours of the training figure."""
    figure = go.Figure(layout=PLOT)
    draw_panels(figure, run, MACHINE)
    mark_x(figure, run)
    return figure


def not_measured(run: Run, panels: Sequence[Panel]) -> list[str]:
    """The titles of panels that have no figure: they are not drawn."""
    return [
        p.title for p in panels if p.keys and all(row[key] is None for row in run.kept_rows for key in p.keys)
    ]


def tint(run: Run, place: tuple[str, int]) -> str:
    """The colour of (phase, attempt): that of the phase, every other attempt paler."""
    phase, attempt = place
    return colour(run.phases.index(phase)) + "99" * (attempt % 2 == 0)


def _sampled(
    run: Run, panels: Sequence[Panel], kept: bool
) -> Iterator[tuple[tuple[str, int], list[dict[str, Any]]]]:
    """((phase, attempt), rows to draw) of every segment that counts, or of those that do not."""
    extremes, width = extremes_of(panels), width_of(run)
    wider = 1 << math.ceil(math.log2(max(5, 1 + len(extremes)) / 5))  # about as many rows whatever the panels
    for s in (s for s in run.segments if s.kept == kept):
        yield (s.phase, s.attempt), sample(s.rows, wider * width if width > 1 else 1, extremes)


def draw_panels(figure: go.Figure, run: Run, panels: Sequence[Panel]) -> list[Panel]:
    """The curves of all panels that have figures, attempt by attempt, and their axes and titles.

    Returns the panels drawn. A panel without keys is left empty.
    """
    absent = not_measured(run, panels)
    panels = [panel for panel in panels if panel.title not in absent]
    first = next((key for panel in panels for key in panel.keys), None)  # its hover text names the step
    last: list[dict[str, Any]] = []
    for place, rows in _sampled(run, panels, kept=True):
        joined = [
            *(row for row in last if row["phase"] == rows[0]["phase"]),
            *rows,
        ]  # a restart leaves no gap
        steps = [f"{row['phase']}, attempt {row['attempt']}, step {row['step']:,}" for row in joined]
        for axis, panel in enumerate(panels, start=1):
            for key in panel.keys:
                trace = key_curve(joined, key, tint(run, place))
                if all(value is None for value in trace.y):
                    continue
                look = {"name": NAMES.get(key, panel.title), "yaxis": f"y{axis}", "legendgroup": place[0]}
                figure.add_trace(
                    trace.update(look | LOOKS.get(key, {}), hovertemplate=f"%{{y:{panel.form}}}")
                )
                if key == first:
                    trace = figure.data[-1]
                    trace.update(text=steps, hovertemplate=f"{trace.hovertemplate}  %{{text}}")
                if band := band_of(joined, key, tint(run, place)):
                    figure.add_trace(band.update({**look, "name": f"{panel.title}, lowest and highest"}))
        last = rows[-1:]
    lay_out(figure, panels)
    return panels


def band_of(rows: Sequence[dict[str, Any]], key: str, tint: str) -> go.Scatter | None:
    """The area from the lowest to the highest value of what rows are the middles of; None of rows as logged."""
    known = [(row, row["band"][key]) for row in rows if key in row.get("band", ())]
    if not known:
        return None
    outline = [(row, rounded(band[1])) for row, band in known]
    outline += [(row, rounded(band[0])) for row, band in reversed(known)]
    return curve(outline, tint, 1, fill="toself", opacity=0.4, hoverinfo="skip")


def domains(panels: Sequence[Panel]) -> list[tuple[float, float]]:
    """(bottom, top) of each panel as shares of the height, from their heights in pixels."""
    below = list(accumulate(panel.px + TITLE_PX for panel in panels))
    return [
        (1 - low / below[-1], 1 - (low - panel.px) / below[-1])
        for low, panel in zip(below, panels, strict=True)
    ]


def lay_out(figure: go.Figure, panels: Sequence[Panel]) -> None:
    """The axes of y and the titles of panels above each other."""
    for index, (panel, domain) in enumerate(zip(panels, domains(panels), strict=True), start=1):
        axis = {"domain": domain, "anchor": "x", "nticks": 3, "zeroline": False, "rangemode": "tozero",
                "exponentformat": "SI", **panel.axis}  # fmt: skip
        figure.update_layout({f"yaxis{index}": axis})
        figure.add_annotation(
            x=0, y=domain[1], xref="paper", yref="paper", xanchor="left", yanchor="bottom", yshift=3,
            showarrow=False, text=f"<b>{panel.title}</b>  {panel.unit}".strip(),
        )  # fmt: skip
    height = 80 + sum(panel.px + TITLE_PX for panel in panels)
    figure.update_layout(height=height, margin={"t": 24, "b": 56}, hoversubplots="axis")
    figure.update_xaxes(hoverformat=".4s", spikethickness=1, anchor=f"y{len(panels)}")


def _draw_events(figure: go.Figure, run: Run, panels: Sequence[Panel]) -> None:
    """Faults, roll-backs and starts as marks above the loss; what happened stands in their hover boxes."""
    groups = event_groups(event for event in run.events if event["x_step"] is not None)
    if not groups or not panels:
        return
    texts = []
    for group in groups:
        kind, attempt, step = (group[0].get(key, "?") for key in ("kind", "attempt", "step"))
        said = "<br>".join(textwrap.wrap(said_by(group[0]), 90)[:6])
        head = f"<b>{escape(str(kind))}</b>, attempt {attempt}, step {step}, {len(group)} times"
        texts.append(f"{head}<br>{said}")
    tints = [BAD if is_trouble(group[0]) else NEUTRAL for group in groups]
    axis, top = len(panels) + 1, domains(panels)[0][1]
    marks = curve([(group[0], 0.0) for group in groups], NEUTRAL, yaxis=f"y{axis}", legendgroup="events")
    figure.add_trace(marks.update(
        text=texts, hovertemplate="%{text}<extra></extra>", mode="markers", cliponaxis=False,
        marker={"symbol": "triangle-down", "size": 9, "color": tints},
    ))  # fmt: skip
    strip = {"domain": (top + 0.6 * (1 - top), 1 - 0.1 * (1 - top)), "visible": False, "fixedrange": True}
    figure.update_layout({f"yaxis{axis}": {**strip, "range": [-1, 1]}})


def event_groups(events: Iterable[Record]) -> list[list[Record]]:
    """Events of all ranks that are one: of the same kind at the same place of the same attempt,
    with the same text.
    """
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for event in events:
        key = tuple(event[name] for name in ("phase", "attempt", "x_step", "kind", "text"))
        groups.setdefault(key, []).append(event)
    return list(groups.values())


def is_trouble(event: Record) -> bool:
    """Whether its kind sounds like trouble, or it tells of an exit code that no run should end with."""
    return bool(TROUBLE.search(str(event["kind"]).lower())) or event["code"] not in (None, DONE, STOPPED)


def said_by(event: dict[str, Any]) -> str:
    """What an event says: its text or reason, else its other facts. HTML."""
    facts = {key: value for key, value in event.items() if key not in PLACE and value is not None}
    told = ", ".join(f"{key} {v if isinstance(v, str) else json.dumps(v)}" for key, v in facts.items())
    return escape(str(event["text"] or event["reason"] or told))


def restarts(run: Run) -> list[dict[str, Any]]:
    """The first row of every segment that continues a phase after a restart or a step back."""
    pairs = [(a, b) for a, b in pairwise(run.segments) if a.phase == b.phase]
    return [b.rows[0] for a, b in pairs if a.attempt != b.attempt or b.rows[0]["step"] <= a.rows[-1]["step"]]


def mark_x(figure: go.Figure, run: Run) -> None:
    """The axis of x of all panels, with shaded phases, restart lines and their labels."""
    titles, lines, rows = figure.layout.annotations, figure.layout.shapes, restarts(run)

    def marks(key: str) -> dict[str, Any]:
        sheet = go.Figure()
        for index, phase in enumerate(run.phases):
            places = [row[key] for row in run.rows_of(phase)]
            parent = run.lineages.get(phase, {}).get("parent") if index == 0 else None
            origin = f" from {'/'.join(Path(parent).parts[-3::2])}" if parent else ""
            sheet.add_vrect(
                min(places, default=0), max(places, default=0), fillcolor=f"{colour(index)}14", line_width=0,
                annotation_text=f"<b>{escape(phase)}</b>{escape(origin)}", annotation_position="outside top",
            )  # fmt: skip
        sheet.update_annotations(yref="paper")
        for row in rows:
            label = f"↻{row['attempt']}" if len(rows) <= MANY else ""
            line = {"color": NEUTRAL, "width": 1, "dash": "dot"}
            sheet.add_vline(row[key], line=line, opacity=0.5, annotation={"text": label, "font_size": 10})
        sheet.update_shapes(yref="paper", layer="below")
        drawn = sheet.to_dict()["layout"]
        return {
            "shapes": [*(line.to_plotly_json() for line in lines), *drawn.get("shapes", ())],
            "annotations": [*(title.to_plotly_json() for title in titles), *drawn.get("annotations", ())],
        }

    switch_x(figure, marks)
