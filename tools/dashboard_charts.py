"""What the dashboard draws: plotly figures from the rows of a run, and the page's style sheet.

Colours come from CSS where they depend on the theme (text, grid, background) and from here where they carry meaning
(attempts, sources). A long run has more rows than a screen has pixels: `sample` keeps, of each bucket of neighbouring
rows, those with the extremes, so that a spike is never lost, and smoothing is done before it, on all rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import plotly.graph_objects as go

from tools.dashboard_run import Run

PALETTE = ("#4f8ff7", "#f0994b", "#2fb5a0", "#c77dff", "#e5647c", "#8fb339", "#3fa9d6", "#c9a227")
PHASE_TINTS = ("rgba(79,143,247,0.07)", "rgba(240,153,75,0.09)", "rgba(47,181,160,0.08)")
NEUTRAL = "#8a94a6"
BUCKETS = 400  # about one for every three pixels of a wide screen
# panel: row key, title, unit, share of the height from bottom to top
PANELS = (
    ("loss", "Loss", "nats per token", (0.52, 0.97)),
    ("lr", "Learning rate", "", (0.37, 0.46)),
    ("grad_norm", "Gradient norm", "", (0.19, 0.31)),
    ("tokens_per_s", "Tokens per second", "", (0.0, 0.13)),
)


FONT = 'ui-sans-serif,system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif'
# the page in two themes: everything that is not data takes its colour from here
STYLE = (
    "body { font:15px/1.5 "
    + FONT
    + """ }
:root { --page:#f6f6f3; --card:#ffffff; --ink:#1c2430; --soft:#5d6879; --line:#e6e6e0; --grid:#ecece7; --track:#eeeeea;
  --good:#1f8a5b; --warn:#b4540a; color-scheme:light dark }
@media (prefers-color-scheme:dark) { :root { --page:#0f1216; --card:#171b21; --ink:#e8ebf0; --soft:#97a1b2;
  --line:#252b34; --grid:#232932; --track:#232932; --good:#4cc38a; --warn:#f0a45d } }
* { box-sizing:border-box }
body { margin:0; background:var(--page); color:var(--ink); -webkit-text-size-adjust:100% }
main { max-width:1240px; margin:0 auto; padding:40px 24px 24px }
article + article, .card + article { margin-top:72px }
h1 { font-size:32px; line-height:1.15; letter-spacing:-.02em; margin:0; overflow-wrap:anywhere }
h2 { font-size:15px; font-weight:650; margin:0 0 12px }
h3, th { font-size:12px; font-weight:500; color:var(--soft); margin:0; text-align:left }
small, .facts, .caption, footer { color:var(--soft); font-size:13px }
.title { display:flex; flex-wrap:wrap; align-items:center; gap:8px 16px }
.state { font-size:13px; padding:3px 12px 3px 10px; border-radius:99px; background:var(--card);
  border:1px solid var(--line) }
.state::before { content:""; display:inline-block; width:8px; height:8px; border-radius:50%; margin-right:8px;
  background:var(--soft) }
.state.live::before, .state.done::before { background:var(--good) }
.state.live::before { box-shadow:0 0 0 4px color-mix(in srgb,var(--good) 22%,transparent) }
.facts { margin:10px 0 20px; display:flex; flex-wrap:wrap; gap:2px 20px }
.progress { display:flex; flex-wrap:wrap; gap:6px; margin-bottom:20px }
.progress > div { min-width:max-content }
.bar { background:var(--track); border-radius:4px; height:8px; overflow:hidden }
.bar i { display:block; height:100%; border-radius:4px }
.progress small { white-space:nowrap; font-variant-numeric:tabular-nums; display:block; margin-top:4px }
.progress b { color:var(--ink); font-weight:600 }
.tiles { display:grid; grid-template-columns:repeat(6,1fr); gap:1px; background:var(--line); overflow:hidden;
  border:1px solid var(--line); border-radius:14px; margin-bottom:16px }
.tiles > div { background:var(--card); padding:16px 18px }
.tiles strong { display:block; font-size:26px; line-height:1.3; font-weight:620; letter-spacing:-.02em;
  font-variant-numeric:tabular-nums }
.tiles small { font-size:12px; line-height:1.35; display:block }
.tiles strong .none { font-size:15px; line-height:34px; font-weight:400; letter-spacing:0; display:block }
.none { color:var(--soft); font-style:italic }
.card { background:var(--card); border:1px solid var(--line); border-radius:14px; padding:20px 22px; margin-bottom:16px;
  min-width:0 }
.caption { margin:12px 0 0 }
.pair { display:grid; grid-template-columns:1fr 1fr; gap:0 16px }
.stack .bits { display:grid; grid-template-columns:1fr 1fr; gap:0 40px; align-items:center }
.stack .low { margin:0 }
.chips { margin:0 0 4px; display:flex; flex-wrap:wrap; gap:2px 16px; font-size:13px; color:var(--soft) }
.chip i { display:inline-block; width:10px; height:10px; border-radius:3px; margin-right:7px }
.row { display:grid; grid-template-columns:minmax(84px,150px) 1fr 64px; gap:14px; align-items:center; padding:5px 0 }
.row span { line-height:1.25; overflow-wrap:anywhere } .row small { display:block; font-size:12px }
.row .bar { height:14px } .row b { text-align:right; font-weight:600; font-variant-numeric:tabular-nums }
.rows p { margin:0 0 10px; font-size:13px; color:var(--soft) }
.scroll { overflow-x:auto; margin:0 -22px; padding:0 22px } .scroll + .scroll { margin-top:22px }
table { border-collapse:collapse; width:100%; font-size:13px; font-variant-numeric:tabular-nums }
td, th { padding:6px 20px 6px 0; border-bottom:1px solid var(--line); white-space:nowrap; vertical-align:top }
tr:last-child td { border-bottom:0 }
code { font:12px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace }
.warnings { margin:0 0 16px; padding:12px 16px 12px 34px; border-radius:14px; font-size:13px; color:var(--warn);
  border:1px solid color-mix(in srgb,var(--warn) 40%,transparent) }
.chart { width:100%; min-width:0 } .tall { height:880px } .middle { height:380px }
.low { height:260px; margin-top:16px }
.chart text { fill:var(--soft) !important } .chart text.annotation-text { fill:var(--ink) !important }
.chart .gridlayer path { stroke:var(--grid) !important }
.chart .hoverlayer .bg { fill:var(--card) !important; fill-opacity:.96 !important; stroke:var(--line) !important;
  stroke-opacity:1 !important } .chart .hoverlayer text { fill:var(--ink) !important }
.chart .spikeline { stroke:var(--soft) !important; stroke-width:1px !important; opacity:.5 }
.chart .updatemenu-button rect { fill:var(--card) !important; stroke:var(--line) !important }
.facts-of { display:grid; grid-template-columns:repeat(auto-fill,minmax(150px,1fr)); gap:16px; margin:22px 0 6px }
.facts-of dt { font-size:12px; color:var(--soft) } .facts-of dd { margin:0; font-size:17px; font-weight:600;
  font-variant-numeric:tabular-nums } .scale { display:flex; justify-content:space-between; margin-top:6px }
.bullet .bar { height:28px; border-radius:7px; position:relative }
.bullet u { position:absolute; top:0; bottom:0; width:3px; margin-left:-1.5px; background:var(--card) }
 .bullet .bar i { border-radius:7px }
.bullet { margin-bottom:26px } .bullet h3 { margin-bottom:8px }
footer { text-align:center; padding:12px 0 }
@media (max-width:1000px) { .tiles { grid-template-columns:repeat(3,1fr) }
  .pair, .stack .bits { grid-template-columns:1fr } }
@media (max-width:600px) { main { padding:24px 12px } h1 { font-size:26px } .tiles { grid-template-columns:1fr 1fr }
  .card { padding:16px 14px } .scroll { margin:0 -14px; padding:0 14px } .tall { height:760px }
  .tiles > div { padding:12px 14px } .tiles strong { font-size:22px } .row { gap:10px } }
/* a finger scrolls the page; it must not be caught by a chart as tall as the screen */
@media (hover:none) and (pointer:coarse) { .chart rect.drag { pointer-events:none !important } }
"""
)


def colour(index: int) -> str:
    return PALETTE[index % len(PALETTE)]


def sample(rows: Sequence[dict[str, Any]], buckets: int) -> list[int]:
    """Indices of the rows to draw: all when few, else of each bucket its first row and those with extreme values."""
    if len(rows) <= 4 * buckets:
        return list(range(len(rows)))
    chosen = {len(rows) - 1}
    for bucket in range(buckets):
        inside = range(bucket * len(rows) // buckets, (bucket + 1) * len(rows) // buckets)
        chosen.add(inside[0])
        for key, extreme in (("loss", min), ("loss", max), ("grad_norm", max), ("tokens_per_s", min)):
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


def _figure() -> go.Figure:
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


def _values(rows: Sequence[dict[str, Any]], key: str) -> list[float | None]:
    return [None if row[key] is None else float(f"{row[key]:.6g}") for row in rows]


def _line(rows: Sequence[dict[str, Any]], key: str, axis: str, line: dict[str, Any], **options: Any) -> go.Scatter:
    """One curve over steps; the tokens of its points travel along as `meta`, for the other x axis."""
    steps, tokens = [row["x_step"] for row in rows], [row["x_tokens"] for row in rows]
    options = {"mode": "lines", "hoverinfo": "skip", **options}
    return go.Scatter(x=steps, y=_values(rows, key), yaxis=axis, line=line, meta=tokens, **options)


def attempts_of(run: Run) -> list[tuple[str, int]]:
    """(phase, attempt) in the order of the run: an attempt's place here is its colour."""
    return list(dict.fromkeys((s.phase, s.attempt) for s in run.stretches))


def training_figure(run: Run) -> go.Figure:
    """Loss, learning rate, gradient norm and speed of all phases over one axis of steps or tokens."""
    figure = _figure()
    for phase in run.phases:
        smooth([row for s in run.stretches if s.phase == phase and s.kept for row in s.rows], half_life_rows(run))
    attempts, rows_total = attempts_of(run), sum(len(s.rows) for s in run.stretches)
    drawn: list[dict[str, Any]] = []
    for stretch in sorted(run.stretches, key=lambda s: s.kept):  # what was thrown away lies underneath
        tint = colour(attempts.index((stretch.phase, stretch.attempt)))
        rows = [stretch.rows[i] for i in sample(stretch.rows, math.ceil(BUCKETS * len(stretch.rows) / rows_total))]
        if not stretch.kept:
            figure.add_trace(_line(rows, "loss", "y", {"color": tint, "width": 1.2, "dash": "dot"}, opacity=0.6))
            continue
        joined = [row for row in drawn[-1:] if row["phase"] == stretch.phase]  # a restart leaves no gap in the curve
        _draw(figure, [*joined, *rows], tint)
        drawn += rows
    texts = [_hover_text(row) for row in drawn]
    unseen = _line(drawn, "loss", "y", {"color": "rgba(0,0,0,0)"}, text=texts, hovertemplate="%{text}<extra></extra>")
    figure.add_trace(unseen.update(hoverinfo=None))
    _lay_out_panels(figure, run)
    _switch_x(figure, run)
    return figure


def _draw(figure: go.Figure, rows: Sequence[dict[str, Any]], tint: str) -> None:
    figure.add_trace(_line(rows, "loss", "y", {"color": tint, "width": 1.2}, opacity=0.3))
    figure.add_trace(_line(rows, "smooth_loss", "y", {"color": tint, "width": 2.4}))
    figure.add_trace(_line(rows, "lr", "y2", {"color": NEUTRAL, "width": 1.8}))
    figure.add_trace(_line(rows, "grad_norm", "y3", {"color": tint, "width": 1.2}))
    figure.add_trace(_line(rows, "tokens_per_s", "y4", {"color": tint, "width": 1.2}))


def _hover_text(row: dict[str, Any]) -> str:
    """One box for all panels: what was logged at this step."""

    def value(key: str, form: str) -> str:
        return "not measured" if row[key] is None else format(row[key], form)

    return "<br>".join(
        (
            f"{row['phase']}, attempt {row['attempt']}, step {row['step']:,}",
            f"loss {value('loss', '.4f')}, smoothed {value('smooth_loss', '.4f')}",
            f"learning rate {value('lr', '.3g')}",
            f"gradient norm {value('grad_norm', '.3g')}",
            f"tokens per second {value('tokens_per_s', ',.0f')}",
        )
    )


def _lay_out_panels(figure: go.Figure, run: Run) -> None:
    axes: dict[str, Any] = {}
    for (_, title, unit, domain), suffix in zip(PANELS, ("", "2", "3", "4"), strict=True):
        axes[f"yaxis{suffix}"] = {
            "domain": domain, "anchor": "x", "nticks": 7 if not suffix else 3, "zeroline": False, "fixedrange": True,
            "rangemode": "normal" if not suffix else "tozero", "exponentformat": "power" if suffix == "2" else "SI",
        }  # fmt: skip
        figure.add_annotation(
            text=f"<b>{title}</b>" + (f"  {unit}" if unit else ""), xref="paper", yref="paper", x=0, y=domain[1],
            xanchor="left", yanchor="bottom", showarrow=False, yshift=3,
        )  # fmt: skip
    figure.update_layout(**axes, hoversubplots="axis")
    figure.update_layout(xaxis={"anchor": "y4", "zeroline": False, "exponentformat": "SI", "nticks": 8})
    figure.update_xaxes(hoverformat=".4s", spikethickness=1)
    figure.update_yaxes(range=loss_range(run), selector={"anchor": "x", "nticks": 7})


def loss_range(run: Run) -> list[float] | None:
    """Ends of the loss axis: for a long run without its very first steps, which would flatten all the others."""
    losses = [row["loss"] for row in run.kept_rows if row["loss"] is not None]
    if len(losses) < 2:
        return None
    settled = losses[len(losses) // 50 :] if len(losses) >= 500 else losses
    low, high = min(losses), max(settled)
    if len(losses) >= 500:  # one spike in a thousand may leave the panel
        high = sorted(settled)[int(0.999 * (len(settled) - 1))]
    margin = 0.05 * (high - low) or 0.1
    return [low - margin, high + margin]


def _marks(run: Run, x: str, title: str, labels: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Shaded phases, restart lines and their labels, besides the given labels, with x = "x_step" or "x_tokens"."""
    shapes: list[dict[str, Any]] = []
    under = {"xref": "paper", "yref": "paper", "x": 0, "y": 0, "xanchor": "left", "yanchor": "top", "yshift": -26}
    labels = [*labels, {**under, "text": title, "showarrow": False}]
    start = 0.0
    for index, phase in enumerate(run.phases):
        end = [row[x] for row in run.kept_rows if row["phase"] == phase][-1]
        whole = {"type": "rect", "xref": "x", "yref": "paper", "y0": 0, "y1": 1, "layer": "below", "line": {"width": 0}}
        shapes.append({**whole, "x0": start, "x1": end, "fillcolor": PHASE_TINTS[index % len(PHASE_TINTS)]})
        label = {"xref": "x", "yref": "paper", "x": (start + end) / 2, "y": 1, "yanchor": "bottom"}
        labels.append({**label, "text": f"<b>{phase}</b>", "showarrow": False})
        start = end
    for row in restarts(run):
        dotted = {"color": NEUTRAL, "width": 1, "dash": "dot"}
        line = {"type": "line", "xref": "x", "yref": "paper", "y0": 0, "y1": 0.97, "line": dotted, "opacity": 0.7}
        shapes.append({**line, "x0": row[x], "x1": row[x], "layer": "below"})
        label = {"xref": "x", "yref": "paper", "x": row[x], "y": 0.97, "yanchor": "top", "xanchor": "left"}
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


def bits_figure(evals: Sequence[dict[str, Any]], sources: Sequence[str]) -> go.Figure:
    """Bits per byte of each source over the evaluated checkpoints; x is tokens, or steps where tokens are unknown."""
    figure = _figure()
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


def comparison_figure(runs: Sequence[Run]) -> go.Figure:
    """The smoothed loss of several runs over tokens."""
    figure = _figure()
    for index, run in enumerate(runs):
        rows = [row for row in run.kept_rows if row["x_tokens"] is not None]
        rows = [rows[i] for i in sample(rows, BUCKETS)]
        x = [row["x_tokens"] for row in rows]
        line = {"color": colour(index), "width": 2}
        figure.add_trace(go.Scatter(x=x, y=_values(rows, "smooth_loss"), name=run.name, mode="lines", line=line))
    figure.update_xaxes(title_text="tokens seen, all phases", exponentformat="SI", nticks=8)
    figure.update_yaxes(fixedrange=True, zeroline=False)
    figure.update_layout(margin={"t": 12})
    return figure


def to_div(figure: go.Figure, name: str, kind: str) -> str:
    """The figure as an HTML element; plotly.js must stand earlier in the page, `.chart.<kind>` gives its height."""
    config = {"responsive": True, "displayModeBar": False}
    inner = figure.to_html(full_html=False, include_plotlyjs=False, config=config, div_id=name)
    return f'<div class="chart {kind}">{inner}</div>'
