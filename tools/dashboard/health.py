"""What a person beside the run asks first: when it ends, what it costs, what went wrong,
and which layer drifts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

import plotly.graph_objects as go

from records.page import PLOT, card, chart, fold, measured, missing, none, short, table, utc
from records.run import Run
from records.usage import Usage, duration, money, usage_of, whole
from tools.dashboard.core import where_evaluated
from tools.dashboard.panels import Panel, domains, event_groups, is_trouble, lay_out, said_by
from tools.dashboard.rows import known_in, sample, width_of

LISTED = 12  # more incidents than this are folded
COARSER = 2  # buckets of a heat map are so many times wider than those of curves
LAYERS = {  # key of a row
    "layer_grad_norm": Panel("Gradient norm", "by layer", (), 150),
    "layer_stream_rms": Panel("RMS of the stream", "behind each layer", (), 150),
}
SCALE = [[0, "rgba(79,143,247,0.06)"], [0.5, "#4f8ff7"], [1, "#e5647c"]]


def metrics_section(run: Run) -> dict[str, Any]:
    """[metrics] of the newest phase: what a GPU-hour costs."""
    return next((config.get("metrics", {}) for config in reversed(run.configs.values())), {})


def usage_tiles(run: Run) -> tuple[tuple[str, str, str], ...]:
    """The tiles of time left and GPU-hours."""
    of, rows, pricing = whole(usage_of(run)), run.kept_rows, metrics_section(run)
    if not rows or rows[-1]["time"] is None:
        return ("time left", none(), "nothing logged"), ("GPU-hours", none(), "nothing logged")
    left, end = none(), "steps unknown"
    if of.finish_time is not None:
        left_s = of.finish_time - rows[-1]["time"]
        left, end = ("done", "training.steps reached")
        if left_s:
            left, end = duration(left_s), f"until {utc(of.finish_time)} UTC"
    total = total_hours(of)
    note = ", ".join(filter(None, (f"of {short(total)}" if total else "", money(total, pricing))))
    return ("time left", left, end), ("GPU-hours", short(of.gpu_hours), note or "so far")


def total_hours(of: Usage) -> float | None:
    return None if of.gpu_hours_left is None else of.gpu_hours + of.gpu_hours_left


def usage_card(run: Run) -> str:
    """GPU-hours, cost and end of every phase, and of the whole run."""
    usage, pricing, rows = usage_of(run), metrics_section(run), []
    if not run.kept_rows:
        return ""
    together = {"<b>all</b>": whole(usage)} if len(usage) > 1 else {}
    for name, of in ({escape(phase): of for phase, of in usage.items()} | together).items():
        hours = [measured(value, ",.1f") for value in (of.gpu_hours, of.repeated, of.gpu_hours_left)]
        costs = [money(value, pricing) or none("no price") for value in (of.gpu_hours, total_hours(of))]
        rows.append([name, *hours, *costs, utc(of.finish_time)])
    head = ("phase", "GPU-hours used", "of them repeated", "left", "cost so far", "cost in all", "ends (UTC)")
    caption = "From an attempt's first record to its last: start-up and repeated steps count, queues do not. What is "
    caption += (
        "left goes by the median speed of the last rows. The price is <code>metrics.gpu_hour_price</code>."
    )
    return card("Time and cost", table(head, rows, "numbers"), caption)


def incidents_card(run: Run) -> str:
    """The events of the run, the newest first; trouble is red."""
    rows = []
    for group in reversed(event_groups(run.events)):
        first = group[0]
        kind = str(first["kind"] or "event").removeprefix("supervisor_").replace("_", " ")
        many = f" <small>{len(group)} times</small>" if len(group) > 1 else ""
        hosts = sorted({str(event["host"]) for event in group if event["host"]})
        more = f" and {len(hosts) - 2} more" if len(hosts) > 2 else ""
        rows.append([
            utc(first["time"]), (missing if is_trouble(first) else escape)(kind) + many,
            escape(where_evaluated(first)), escape(", ".join(hosts[:2]) + more), said_by(first),
        ])  # fmt: skip
    if not rows:
        return card("Incidents", none("no event on record"))
    head = ("time (UTC)", "event", "where", "host", "what")
    body, earlier = table(head, rows[:LISTED], "events"), rows[LISTED:]
    if earlier:
        body += fold(f"{len(earlier):,} earlier ones", table(head, earlier[:200], "events"))
    return card("Incidents", body)


def layers_card(run: Run) -> str:
    """Gradient norm and stream RMS of every layer over the steps."""
    rows = [row for row in run.kept_rows if any(isinstance(row.get(key), list) for key in LAYERS)]
    if not rows:
        return ""
    caption = (
        "Logarithmic colours, the first layer at the bottom. A layer that leaves its neighbours is at fault "
    )
    caption += "itself; all of them together, of the data or the learning rate."
    figure = layers_figure(sample(rows, COARSER * width_of(run), [("layer_peak", max)]))
    drawn = chart(figure, f"layers-{run.name}") + f'<p class="caption">{caption}</p>'
    return card("Layers", fold("Gradient norm and RMS of the stream by layer, over the steps", drawn))


def drafts_card(run: Run) -> str:
    """The newest validation of a head that drafts, in each phase that has one."""
    rows = []
    for phase in run.phases:
        last = next((row for row in reversed(run.rows_of(phase)) if known_in(row, "valid_acceptance")), None)
        if last is not None:
            odds = known_in(last, "valid_acceptance")
            length = 1 + sum(math.prod(odds[: i + 1]) for i in range(len(odds)))
            listed = [
                ", ".join(f"{v:.3f}" for v in values) for values in (known_in(last, "valid_draft_loss"), odds)
            ]
            rows.append([escape(phase), f"{last['step']:,}", *listed, f"{length:.2f}"])
    caption = "Of each token drafted after the next: its loss, and how often it is the model's own choice where those "
    caption += "before it were, in held-out text. A pass of the model then gives so many tokens."
    head = ("phase", "step", "loss by place", "accepted by place", "tokens a pass")
    return card("Drafts", table(head, rows, "numbers"), caption) if rows else ""


def layers_figure(rows: Sequence[dict[str, Any]]) -> go.Figure:
    """Heat maps (layer by step) above each other."""
    figure, panels = go.Figure(layout=PLOT), tuple(LAYERS.values())
    lay_out(figure, panels)
    for place, (key, (bottom, top)) in enumerate(zip(LAYERS, domains(panels), strict=True), start=1):
        values = [known_in(row, key) for row in rows]
        grid = [[each[i] if i < len(each) else None for each in values] for i in range(max(map(len, values)))]
        figure.add_heatmap(
            x=[row["x_step"] for row in rows], yaxis=f"y{place}", colorscale=SCALE, text=grid, hoverongaps=False,
            z=[[round(math.log10(v), 3) if v else None for v in line] for line in grid],
            hovertemplate="layer %{y}, step %{x:,}<br>%{text:.3g}<extra></extra>",
            colorbar={"thickness": 8, "outlinewidth": 0, "len": top - bottom, "y": (top + bottom) / 2,
                      "tickfont": {"size": 11}, **log_ticks([v for line in grid for v in line if v])},
        )  # fmt: skip
    figure.update_layout(hovermode="closest", margin_t=0)
    figure.update_yaxes(showgrid=False, nticks=5, rangemode="normal")
    figure.update_xaxes(
        title={"text": "step, all phases", "font": {"size": 12}}, showgrid=False, zeroline=False
    )
    return figure


def log_ticks(values: Sequence[float]) -> dict[str, Any]:
    """Four ticks of a colour bar whose places are logarithms, with the figures themselves as texts."""
    if not values:
        return {}
    low, high = math.log10(min(values)), math.log10(max(values))
    places = [low + i / 3 * (high - low) for i in range(4)]
    return {"tickvals": places, "ticktext": [f"{10**place:.2g}" for place in places]}
