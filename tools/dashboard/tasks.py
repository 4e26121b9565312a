"""The tasks of CORE on the page: the heat map over checkpoints, means by category, the newest record in full."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import plotly.graph_objects as go

from evals.core.tasks import NOT_CHOSEN
from records.page import BAD, NEUTRAL, PLOT, card, chart, code, fold, measured, missing, short, table
from records.run import Record, Run, number
from tools.dashboard.core import (
    VERSIONS,
    Point,
    core_curves,
    figure_of,
    newest,
    normal,
    points_of,
    settings_text,
    tasks_of,
    where_evaluated,
)
from tools.dashboard.figures import Series, checkpoint_figure

BETTER = "#2f6fe0"  # than the baseline; BAD is worse
DRAWN = 200  # points of a task's curve
FEW = 8  # a table of at most so many tasks is not folded
NOISY = 0.03  # a standard error of the accuracy above which a task alone says little


def heat_figure(points: Sequence[Point]) -> go.Figure:
    """Centered accuracy (v2) of each task (rows) at each checkpoint (columns); a gap where a
    checkpoint lacks the task.
    """
    tasks, labels = tasks_of(points), [checkpoint_text(p) for p in points]
    z = [[figure_of(p, task, "centered_v2") for p in points] for task in tasks]
    reach = max([0.1, *(abs(c) for row in z for c in row if c is not None)])
    scale = [[0, BAD], [0.5, "rgba(138,148,166,0.12)"], [1, BETTER]]
    bar = {
        "thickness": 8,
        "outlinewidth": 0,
        "nticks": 5,
        "len": 0.5,
        "tickfont": {"size": 11},
        "orientation": "h",
        "y": -0.06,
        "yanchor": "top",
    }
    figure = go.Figure(layout={**PLOT, "height": 64 + 21 * len(tasks)})
    figure.add_heatmap(
        z=z, y=tasks, customdata=[labels] * len(tasks), colorscale=scale, zmin=-reach, zmax=reach, colorbar=bar,
        hovertemplate="%{y}<br>%{customdata}<br>centered %{z:.4f}<extra></extra>", hoverongaps=False, ygap=1,
        xgap=int(len(points) < 60),
    )  # fmt: skip
    ticks = sorted({0, len(points) - 1})
    still = {"fixedrange": True, "showgrid": False, "zeroline": False}
    figure.update_xaxes(tickvals=ticks, ticktext=[labels[i] for i in ticks], tickangle=0, **still)
    names = [
        task.replace("bigbench_", "bb_").replace("_identification", "_id") for task in tasks
    ]  # for a phone
    look = {"tickvals": tasks, "ticktext": names, "tickfont": {"size": 11}}
    figure.update_yaxes(autorange="reversed", automargin=True, **look, **still)
    figure.update_layout(hovermode="closest", margin_t=8)
    return figure


def tasks_card(run: Run) -> str:
    """The tasks of CORE: by checkpoint, by category, and the newest in full."""
    curves = core_curves([run])
    if not curves:
        return ""
    points, last = curves[-1].points, curves[-1].last
    toy, body = last["not_core"], ""
    if toy:
        rest = len(last["missing"] or {})
        body = f"<p>{escape(str(toy))}</p><p class='caption'>The other {rest} tasks of CORE are not in this bundle.</p>"
    if len(points) > 1 and tasks_of(points):
        heat = chart(heat_figure(points), f"heat-{run.name}")
        body += f'<h3>Centered accuracy (v2) by checkpoint (tokens seen)</h3><div class="scroll wide">{heat}</div>'
    body += gold_part(points, f"gold-{run.name}")
    if not toy:
        body += categories_part(points, f"categories-{run.name}")
    words = f"Accuracy of each task, {escape(settings_text(Record(last, not_core=None)))}"
    body += fold(words, task_table(last), len(last["tasks"]) <= FEW) + missing_part(last)
    hashes = (("data", "data_sha256"), ("tokenizer", "tokenizer_sha256"), ("code", "code_version"))
    made = [
        f"seed {escape(str(last['seed']))}",
        *(f"{name} {code(last[key])}" for name, key in hashes),
    ]
    title = "Tasks of a toy bundle, not CORE" if toy else "CORE by task"
    return card(title, body, f"{escape(where_evaluated(last))}: {', '.join(made)}.")


def checkpoint_text(point: Point) -> str:
    return where_evaluated(point) if number(point["tokens_total"]) is None else short(point["tokens_total"])


def categories_part(points: Sequence[Point], name: str) -> str:
    """The means by category over checkpoints; a category that lacks a task has none."""
    series, absent = [], []
    for category in points[-1]["categories"] or ():
        means = [number(((p["categories"] or {}).get(category) or Record())["centered_v2"]) for p in points]
        if means[-1] is None:
            absent.append(category)
        else:
            series.append(Series(category, list(zip(points, means, strict=True))))
    if not series:
        return ""
    figure = checkpoint_figure(series)
    figure.update_yaxes(zeroline=True, zerolinecolor=NEUTRAL)  # the baseline
    words = f'<p class="caption">{missing("N/A")}: {escape(", ".join(absent))}</p>' if absent else ""
    return f"<h3>Means by category, centered on v2</h3>{chart(figure, name)}{words}"


def gold_part(points: Sequence[Point], name: str) -> str:
    """Bits per byte of the right answers over checkpoints, task by task: they move before accuracies do."""
    key, series = "gold_bits_per_byte", []
    for task in tasks_of(points):
        errors = [figure_of(p, task, f"{key}_se") for p in points]
        values = [figure_of(p, task, key) for p in points]
        ends = [normal(value, error) for value, error in zip(values, errors, strict=True)]
        if len([value for value in values if value is not None]) > 1:
            series.append(Series(task, list(zip(points, values, strict=True)), None, ends))
    if not series:
        return ""
    figure = checkpoint_figure(series, rangemode="normal", hoverformat=".3f")
    return (
        f"<h3>Bits per byte of the right answers, an early signal: lower is better</h3>{chart(figure, name)}"
    )


def gold_card(run: Run) -> str:
    """Gold bits per byte that the job measured itself, from step 0 on, with paired errors."""
    points, key = newest(points_of(run, "gold"), "phase", "step"), "gold_bits_per_byte"
    if not points:
        return ""
    subsets: dict[str, list[Point]] = {}
    for point in points:
        subsets.setdefault(str(point["data_sha256"]), []).append(point)
    series = list[Series]()
    for same in subsets.values():
        means = [(p, number(p[key])) for p in same]
        errors = [number((p["change"] or Record())["bits_standard_error"]) for p in same]
        ends = [normal(mean, error) for (_, mean), error in zip(means, errors, strict=True)]
        series.append(Series(f"mean of {len(tasks_of(same))} tasks", means, None, ends))
    some = same[:: -max(1, len(same) // DRAWN)][::-1]  # of the tasks, the newest one among them
    series += [Series(task, [(p, figure_of(p, task, key)) for p in some]) for task in tasks_of(same)]
    figure = checkpoint_figure(series, rangemode="normal", hoverformat=".3f")
    for trace in figure.data[len(subsets) :]:
        trace.update(line_width=1, opacity=0.55)
    last, change = points[-1], points[-1]["change"] or Record()
    told = f"{escape(where_evaluated(last))}: <b>{measured(last[key], '.4f')}</b>"
    if change["since"] is not None:
        moved, error = (measured(change[f"bits_{name}"], form)
                        for name, form in (("difference", "+.4f"), ("standard_error", ".4f")))  # fmt: skip
        told += f", {moved} ± {error} since step {change['since']:,}"
    caption = (
        "Bits per byte of the right answers, measured by the job on the same items; lower is better. "
        "Bars of the mean: 95 % of its change since the point before, paired; ± is one standard error."
    )
    return card(
        "Gold bits per byte while training", f"<p>{told}</p>{chart(figure, f'loop-{run.name}')}", caption
    )


def task_table(point: Point) -> str:
    """The scored tasks of one record with how they were asked."""
    rows, gold = [], any("gold_bits_per_byte" in found for found in point["tasks"].values())
    for task, found in point["tasks"].items():
        accuracy, n = number(found["accuracy"]) or 0.0, number(found["n"]) or 0.0
        likely = (accuracy * n + 0.5) / (n + 1)  # none right of four is no certainty
        noisy = " <small>noisy</small>" if (likely * (1 - likely) / (n + 1)) ** 0.5 > NOISY else ""
        ends = found["interval"]
        error = f" ± {measured(found['standard_error'], '.4f')}"
        error = f" ({' – '.join(measured(end, '.3f') for end in ends)})" if isinstance(ends, list) else error
        bases = " / ".join(dict.fromkeys(measured(found[f"baseline_{v}"], "g") for v in VERSIONS))
        rows.append([
            *(escape(str(text)) for text in (task, found.get("category", ""), found.get("type", ""))),
            short(found["shots"]), f"{short(found['n'])} of {short(found['n_total'])}",
            f"{measured(found['accuracy'], '.4f')}{error}{noisy}", f"{bases} %",
            *(measured(found[f"centered_{v}"], ".4f") for v in VERSIONS),
            *([measured(found["gold_bits_per_byte"], ".3f")] if gold else []),
        ])  # fmt: skip
    head = ("task", "category", "type", "shots", "items", "accuracy", "baseline", "centered v1", "centered v2",
            *(["gold bits per byte"] if gold else []))  # fmt: skip
    return table(head, rows) if rows else ""


def missing_part(point: Point) -> str:
    """One line for the tasks that a record lacks, with their reasons; of a toy bundle the card has said it."""
    reasons = {} if point["not_core"] else point["missing"] or {}
    absent = {task: reason for task, reason in reasons.items() if reason != NOT_CHOSEN}
    text = (
        f'<p class="caption">{len(reasons) - len(absent)} tasks were not chosen.</p>'
        if absent != reasons
        else ""
    )
    if not absent:
        return text
    why = escape("".join(f"{task}: {reason}\n" for task, reason in absent.items()))
    words = missing(f"{len(absent)} of {len(reasons) + len(point['tasks'])} tasks missing")
    names = escape(", ".join(absent))
    return text + fold(f"{words}, hence no CORE: {names}", f"<pre>{why}</pre>")
