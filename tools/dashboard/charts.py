"""What the dashboard draws: plotly figures from the rows of a run, and the page's style sheet.

Colours come from CSS where they depend on the theme (text, grid, background) and from here where they carry meaning
(attempts, sources). A long run has more rows than a screen has pixels: `sample` keeps, of each bucket of neighbouring
rows, those with the extremes, so that a spike is never lost, and smoothing is done before it, on all rows.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import plotly.graph_objects as go

from records.run import Run
from tools.dashboard.style import FONT

PALETTE = ("#4f8ff7", "#f0994b", "#2fb5a0", "#c77dff", "#e5647c", "#8fb339", "#3fa9d6", "#c9a227")
PHASE_TINTS = ("rgba(79,143,247,0.07)", "rgba(240,153,75,0.09)", "rgba(47,181,160,0.08)")
NEUTRAL = "#8a94a6"
VALID = "#a03fb8"  # the validation loss, on both themes
TROUBLE_TINT = "#d93a4e"
MARKS = 100  # more points than this are a line without marks
BUCKETS = 400  # about one for every three pixels of a wide screen


class Panel(NamedTuple):
    """One of several plots above each other: title, unit, row keys of its curves, share of the height."""

    title: str
    unit: str
    keys: tuple[str, ...]
    domain: tuple[float, float]  # from bottom to top
    form: str = ".3g"


TRAINING_PANELS = (
    Panel("Loss", "nats per token", ("loss", "smooth_loss"), (0.52, 0.95), ".4f"),
    Panel("Learning rate", "", ("lr",), (0.37, 0.46)),
    Panel("Gradient norm", "", ("grad_norm",), (0.19, 0.31)),
    Panel("Tokens per second", "", ("tokens_per_s",), (0.0, 0.13), ",.0f"),
)
MACHINE_PANELS = (
    Panel("z of the loss", "robust deviations", ("loss_z",), (0.86, 0.95), ".2f"),
    Panel("z of the gradient norm", "", ("grad_norm_z",), (0.715, 0.805), ".2f"),
    Panel("Tokens per second and device", "", ("tokens_per_s_per_device",), (0.57, 0.67), ",.0f"),
    Panel("MFU", "% of the peak", ("mfu",), (0.43, 0.52), ".1f"),
    Panel("Waiting for data", "% of the time", ("data_percent",), (0.29, 0.38), ".2f"),
    Panel("Waiting for checkpoints", "s", ("checkpoint_s",), (0.145, 0.235), ".2f"),
    Panel("Memory, peak", "GiB", ("memory_gib",), (0.0, 0.09), ".2f"),
)
TROUBLE = re.compile(
    "unclean|fail|crash|kill|hang|spike|nan|finite|damage|corrupt|quarantine|roll|lost|bad|stop|error|exit"
)


def colour(index: int) -> str:
    return PALETTE[index % len(PALETTE)]


def sample(rows: Sequence[dict[str, Any]], buckets: int, keys: Sequence[str] = ()) -> list[int]:
    """Indices of the rows to draw: all when few, else of each bucket its first row and those with extreme values.

    keys: figures of which both extremes are kept; by default those of the training figure that matter.
    """
    if len(rows) <= 4 * buckets:
        return list(range(len(rows)))
    extremes: list[tuple[str, Callable[..., int]]] = [(key, extreme) for key in keys for extreme in (min, max)]
    extremes = extremes or [("loss", min), ("loss", max), ("grad_norm", max), ("tokens_per_s", min)]
    chosen = {len(rows) - 1}
    for bucket in range(buckets):
        inside = range(bucket * len(rows) // buckets, (bucket + 1) * len(rows) // buckets)
        chosen.add(inside[0])
        for key, extreme in extremes:
            known = [i for i in inside if rows[i][key] is not None]
            if known:
                chosen.add(extreme(known, key=lambda i: rows[i][key]))
    return sorted(chosen)


def smooth(rows: Sequence[dict[str, Any]], half_life_rows: float) -> None:
    """Set `smooth_loss` of each row: the exponential mean of the losses so far, None where there is no loss.

    The half-life grows to its full length with the rows seen: a loss falls like a power of the steps, so that a mean
    over a fixed span would hang far above its steep beginning.
    """
    total = weight = 0.0
    for index, row in enumerate(rows):
        keep = 0.5 ** (1 / max(1.0, min(half_life_rows, index / 25)))
        row["smooth_loss"] = None
        if row["loss"] is not None:
            total, weight = keep * total + row["loss"], keep * weight + 1
            row["smooth_loss"] = total / weight


def half_life_rows(run: Run) -> float:
    return max(2.0, len(run.kept_rows) / 200)


def bare_figure() -> go.Figure:
    figure = go.Figure(layout=go.Layout(template=go.layout.Template()))
    figure.update_layout(
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": FONT, "size": 12, "color": NEUTRAL},
        margin={"l": 46, "r": 10, "t": 24, "b": 56},
        hovermode="x unified",
        hoverlabel={"namelength": -1},
        showlegend=False,
    )
    return figure


def values_of(rows: Sequence[dict[str, Any]], key: str) -> list[float | None]:
    return [None if row[key] is None else float(f"{row[key]:.6g}") for row in rows]


def _line(rows: Sequence[dict[str, Any]], key: str, axis: str, line: dict[str, Any], **options: Any) -> go.Scatter:
    """One curve over steps; the tokens of its points travel along as `meta`, for the other x axis."""
    steps, tokens = [row["x_step"] for row in rows], [row["x_tokens"] for row in rows]
    options = {"mode": "lines", "hoverinfo": "skip", **options}
    return go.Scatter(x=steps, y=values_of(rows, key), yaxis=axis, line=line, meta=tokens, **options)


def attempts_of(run: Run) -> list[tuple[str, int]]:
    """(phase, attempt) in the order of the run: an attempt's place here is its colour."""
    return list(dict.fromkeys((s.phase, s.attempt) for s in run.stretches))


def smooth_losses(run: Run) -> None:
    """Set `smooth_loss` of all rows that count, phase by phase."""
    for phase in run.phases:
        smooth([row for s in run.stretches if s.phase == phase and s.kept for row in s.rows], half_life_rows(run))


def training_figure(run: Run) -> go.Figure:
    """Loss with validation and events, learning rate, gradient norm and speed over one axis of steps or tokens."""
    figure = bare_figure()
    drawn = _draw_attempts(figure, run, TRAINING_PANELS)
    for phase in run.phases:  # another mixture, another validation loss: no line from one to the next
        validated = [row for row in run.kept_rows if row["phase"] == phase and row["valid_loss"] is not None]
        mode = "lines+markers" if len(validated) <= MARKS else "lines"
        look = {"mode": mode, "marker": {"size": 6, "symbol": "diamond", "color": VALID}}
        figure.add_trace(_line(validated, "valid_loss", "y", {"color": VALID, "width": 1.4}, **look))
    _draw_hover(figure, drawn, TRAINING_PANELS)
    _lay_out_panels(figure, TRAINING_PANELS, drawn)
    figure.update_layout(yaxis={"nticks": 7, "rangemode": "normal", "range": loss_range(run)})
    figure.update_layout(yaxis2={"exponentformat": "power"})
    _draw_events(figure, run)
    _switch_x(figure, run)
    return figure


def machine_figure(run: Run) -> go.Figure:
    """z-scores, speed, waiting and memory, attempts in the colours of the training figure."""
    figure = bare_figure()
    drawn = _draw_attempts(figure, run, MACHINE_PANELS)
    _draw_hover(figure, drawn, MACHINE_PANELS)
    _lay_out_panels(figure, MACHINE_PANELS, drawn)
    figure.update_layout(yaxis={"rangemode": "normal"}, yaxis2={"rangemode": "normal"})
    _switch_x(figure, run)
    return figure


def _draw_attempts(figure: go.Figure, run: Run, panels: Sequence[Panel]) -> list[dict[str, Any]]:
    """Curves of all panels; returns the rows that were drawn and count."""
    attempts, rows_total = attempts_of(run), sum(len(s.rows) for s in run.stretches)
    keys = [key for panel in panels for key in panel.keys] if panels is not TRAINING_PANELS else []
    drawn: list[dict[str, Any]] = []
    for stretch in sorted(run.stretches, key=lambda s: s.kept):  # what was thrown away lies underneath
        tint = colour(attempts.index((stretch.phase, stretch.attempt)))
        buckets = math.ceil(BUCKETS * len(stretch.rows) / rows_total)
        rows = [stretch.rows[i] for i in sample(stretch.rows, buckets, keys)]
        if not stretch.kept:
            if panels is TRAINING_PANELS:
                figure.add_trace(_line(rows, "loss", "y", {"color": tint, "width": 1.2, "dash": "dot"}, opacity=0.6))
            continue
        joined = [row for row in drawn[-1:] if row["phase"] == stretch.phase]  # a restart leaves no gap in the curve
        _draw(figure, [*joined, *rows], tint, panels)
        drawn += rows
    return drawn


def _draw(figure: go.Figure, rows: Sequence[dict[str, Any]], tint: str, panels: Sequence[Panel]) -> None:
    for index, panel in enumerate(panels):
        axis = f"y{index + 1 if index else ''}"
        for key in panel.keys:
            if all(row[key] is None for row in rows):
                continue
            look: dict[str, Any] = {"color": NEUTRAL if key == "lr" else tint, "width": 1.8 if key == "lr" else 1.2}
            if key == "smooth_loss":
                look["width"] = 2.4
            figure.add_trace(_line(rows, key, axis, look, opacity=0.3 if key == "loss" else 1))


def _draw_hover(figure: go.Figure, rows: Sequence[dict[str, Any]], panels: Sequence[Panel]) -> None:
    """One unseen curve whose hover box tells what was logged at a step, for all panels."""
    texts = [_hover_text(row, panels) for row in rows]
    flat = [{**row, "zero": 0.0} for row in rows]
    key, axis = ("loss", "y") if panels is TRAINING_PANELS else ("zero", f"y{len(panels)}")
    unseen = _line(flat, key, axis, {"color": "rgba(0,0,0,0)"}, text=texts, hovertemplate="%{text}<extra></extra>")
    figure.add_trace(unseen.update(hoverinfo=None))


def _hover_text(row: dict[str, Any], panels: Sequence[Panel]) -> str:
    lines = [f"{row['phase']}, attempt {row['attempt']}, step {row['step']:,}"]
    for panel in panels:
        values = ["not measured" if row[key] is None else format(row[key], panel.form) for key in panel.keys]
        lines.append(f"{panel.title[0].lower() + panel.title[1:]} {', smoothed '.join(values)}")
    if row["valid_loss"] is not None and panels is TRAINING_PANELS:
        lines.append(f"validation loss {row['valid_loss']:.4f}")
    return "<br>".join(lines)


def _draw_events(figure: go.Figure, run: Run) -> None:
    """Faults, roll-backs and starts as marks above the loss; what happened stands in their hover boxes."""
    at: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for event in run.events:
        if event["x_step"] is not None:
            at.setdefault((event["phase"], event.get("attempt"), event["x_step"], event.get("kind")), []).append(event)
    if not at:
        return
    groups = list(at.values())
    rows = [{"x_step": g[0]["x_step"], "x_tokens": g[0]["x_tokens"], "zero": 0.0} for g in groups]
    tints = [TROUBLE_TINT if TROUBLE.search(str(g[0].get("kind")).lower()) else NEUTRAL for g in groups]
    marks = _line(
        rows, "zero", f"y{len(TRAINING_PANELS) + 1}", {}, mode="markers", text=[event_text(group) for group in groups],
        marker={"symbol": "triangle-down", "size": 10, "color": tints}, hovertemplate="%{text}<extra></extra>",
    )  # fmt: skip
    figure.add_trace(marks.update(hoverinfo=None, cliponaxis=False))
    strip = {"domain": (0.98, 0.995), "visible": False, "fixedrange": True, "range": [-1, 1]}
    figure.update_layout({f"yaxis{len(TRAINING_PANELS) + 1}": strip})


def event_text(group: Sequence[dict[str, Any]]) -> str:
    """What one kind of event at one step was: its first record, and how many ranks or times there were."""
    first = group[0]
    told = {"phase", "kind", "step", "attempt", "time", "x_step", "x_tokens"}
    details = [f"{key} {_cut(value)}" for key, value in first.items() if key not in told and value is not None]
    more = f" ({len(group)} times)" if len(group) > 1 else ""
    head = f"<b>{escape(str(first.get('kind', 'event')))}</b>{more}, attempt {first.get('attempt', '?')}"
    return "<br>".join([f"{head}, step {first.get('step')}", *map(escape, details[:6])])


def _cut(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 90 else text[:89] + "…"


def _lay_out_panels(figure: go.Figure, panels: Sequence[Panel], rows: Sequence[dict[str, Any]]) -> None:
    axes: dict[str, Any] = {}
    for index, panel in enumerate(panels):
        measured = any(row[key] is not None for row in rows for key in panel.keys)
        unit = panel.unit if measured else "not measured"
        axes[f"yaxis{index + 1 if index else ''}"] = {
            "domain": panel.domain, "anchor": "x", "nticks": 3, "zeroline": False, "fixedrange": True,
            "rangemode": "tozero", "exponentformat": "SI",
        }  # fmt: skip
        figure.add_annotation(
            text=f"<b>{panel.title}</b>  {unit}".strip(), xref="paper", yref="paper", x=0, y=panel.domain[1],
            xanchor="left", yanchor="bottom", showarrow=False, yshift=3,
        )  # fmt: skip
    figure.update_layout(**axes, hoversubplots="axis")
    figure.update_layout(xaxis={"anchor": f"y{len(panels)}", "zeroline": False, "exponentformat": "SI", "nticks": 8})
    figure.update_xaxes(hoverformat=".4s", spikethickness=1)


def loss_range(run: Run) -> list[float] | None:
    """Ends of the loss axis: for a long run without its very first steps, which would flatten all the others."""
    losses = [row["loss"] for row in run.kept_rows if row["loss"] is not None]
    if len(losses) < 2:
        return None
    settled = losses[len(losses) // 50 :] if len(losses) >= 500 else losses
    low, high = min(losses), max(settled)
    if len(losses) >= 500:  # one spike in a thousand may leave the panel
        high = sorted(settled)[int(0.999 * (len(settled) - 1))]
    valid = [row["valid_loss"] for row in run.kept_rows if row["valid_loss"] is not None]
    low = min([low, *valid])
    margin = 0.05 * (high - low) or 0.1
    return [low - margin, high + margin]


def _marks(run: Run, x: str, title: str, labels: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Shaded phases, restart lines and their labels, besides the given labels, with x = "x_step" or "x_tokens"."""
    shapes: list[dict[str, Any]] = []
    under = {"xref": "paper", "yref": "paper", "x": 0, "y": 0, "xanchor": "left", "yanchor": "top", "yshift": -26}
    labels = [*labels, {**under, "text": title, "showarrow": False}]
    for index, phase in enumerate(run.phases):
        start = run.origins[phase][x == "x_tokens"]
        end = max((row[x] for row in run.kept_rows if row["phase"] == phase), default=start)
        whole = {"type": "rect", "xref": "x", "yref": "paper", "y0": 0, "y1": 1, "layer": "below", "line": {"width": 0}}
        shapes.append({**whole, "x0": start, "x1": end, "fillcolor": PHASE_TINTS[index % len(PHASE_TINTS)]})
        label = {"xref": "x", "yref": "paper", "x": (start + end) / 2, "y": 1, "yanchor": "bottom"}
        parent = run.lineages.get(phase, {}).get("parent") if index == 0 else None
        origin = f" from {'/'.join(Path(parent).parts[-3::2])}" if parent else ""
        labels.append({**label, "text": f"<b>{escape(phase)}</b>{escape(origin)}", "showarrow": False})
    for row in restarts(run):
        dotted = {"color": NEUTRAL, "width": 1, "dash": "dot"}
        line = {"type": "line", "xref": "x", "yref": "paper", "y0": 0, "y1": 0.95, "line": dotted, "opacity": 0.7}
        shapes.append({**line, "x0": row[x], "x1": row[x], "layer": "below"})
        if len(restarts(run)) > 30:
            continue  # the lines and the chips tell them apart; numbers would lie on each other
        label = {"xref": "x", "yref": "paper", "x": row[x], "y": 0.95, "yanchor": "top", "xanchor": "left"}
        labels.append({**label, "text": f"↻{row['attempt']}", "showarrow": False, "xshift": 1})
    return {"shapes": shapes, "annotations": labels}


def restarts(run: Run) -> list[dict[str, Any]]:
    """The first row of every stretch that continues a phase after a restart or a step back."""
    pairs = [(a, b) for a, b in pairwise(run.stretches) if a.phase == b.phase]
    return [b.rows[0] for a, b in pairs if a.attempt != b.attempt or b.rows[0]["step"] <= a.rows[-1]["step"]]


def _switch_x(figure: go.Figure, run: Run) -> None:
    """Draw over tokens where every row has them, with two buttons: tokens, steps."""
    titles = [annotation.to_plotly_json() for annotation in figure.layout.annotations]
    steps, tokens = ([list(getattr(trace, place)) for trace in figure.data] for place in ("x", "meta"))
    figure.update_traces(meta=None)
    choices = [("steps", "x_step", "step, all phases", steps)]
    if all(x is not None for curve in tokens for x in curve):
        choices.insert(0, ("tokens", "x_tokens", "tokens seen, all phases", tokens))
    buttons = []
    for label, key, title, x in choices:
        layout = {**_marks(run, key, title, titles), "xaxis.autorange": True}
        buttons.append({"label": label, "method": "update", "args": [{"x": x}, layout]})
    _, key, title, x = choices[0]
    for trace, values in zip(figure.data, x, strict=True):
        trace.x = values
    figure.update_layout(_marks(run, key, title, titles))
    if len(choices) == 2:
        place = {"x": 1, "xanchor": "right", "y": 0, "yanchor": "top", "pad": {"t": 24}}
        style = {"type": "buttons", "direction": "right", "bgcolor": "rgba(0,0,0,0)", "font": {"size": 11}}
        figure.update_layout(updatemenus=[{**style, **place, "buttons": buttons}])


def to_div(figure: go.Figure, name: str, kind: str) -> str:
    """The figure as HTML: an empty element and, beside it, what the page's script draws into it.

    `.chart.<kind>` in the style sheet gives its height.
    """
    content = figure.to_json().replace("</", "<\\/")  # the text must not end the element that it stands in
    place = f'<div id="{escape(name)}"></div><script type="application/json">{content}</script>'
    return f'<div class="chart {kind}">{place}</div>'
