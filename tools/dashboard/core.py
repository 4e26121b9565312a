"""CORE on the page: above loss and learning rate, the heat map of its tasks, means by category, the table.

A `core` record that lacks a task has no aggregate (null): the mean of the others would be another number. It
has no point in the first figure; the tasks that it has are drawn all the same. Records of different protocols
or numbers of items are curves of their own: they cannot be compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import count, pairwise, product
from typing import Any, NamedTuple

import plotly.graph_objects as go

from evals.core.tasks import NOT_CHOSEN
from records.evals import with_current_names
from records.page import (
    BAD,
    NEUTRAL,
    PLOT,
    card,
    chart,
    code,
    colour,
    legend_entry,
    measured,
    missing,
    short,
    table,
)
from records.run import Run, number
from tools.dashboard.figures import (
    MARKS,
    add_choice,
    checkpoint_figure,
    curve,
    flops_of,
    lines_figure,
    settled,
    span,
)
from tools.dashboard.panels import SIGNED, VALID, Panel, draw_panels, draw_validation, mark_x
from tools.dashboard.references import CORE_REFERENCES

VERSIONS = {"v1": "solid", "v2": "dash"}  # of the baselines, and how its line is drawn
TINT = "#8667f7"  # of CORE, apart from the colours of phases and sources
ALONG = (  # CORE and, on the same axis of x, what moves it
    Panel("CORE", "centered accuracy, mean of 22 tasks", (), 300, extremes=(), axis={**SIGNED, "nticks": 7}),
    Panel("Loss", "nats per token, smoothed", ("smooth_loss",), 130, ".4f", axis={**SIGNED, "nticks": 4}),
    Panel("Learning rate", "", ("lr",), 60, extremes=(), axis={"exponentformat": "power"}),
)
BETTER = "#2f6fe0"  # than the baseline; BAD is worse
FEW = 8  # a table of at most so many tasks is not folded
NOISY = 0.03  # a standard error of the accuracy above which a task alone says little
Place = tuple[float, float]  # share of the width, value
Point = dict[
    str, Any
]  # a record with `x_tokens`, `x_step`, `x_flops`: its place on each axis, None where not known


class Curve(NamedTuple):
    """Records of one run that can be compared, in the order of the run."""

    name: str
    points: list[Point]
    place: int = 0  # in the palette: on a page of several runs that of the run

    @property
    def last(self) -> Point:
        return self.points[-1]


def points_of(run: Run, kind: str) -> list[Point]:
    """The records of a kind with their places, in the order of the run."""
    flops, points = flops_of(run), []
    for record in run.evals_of(kind):
        step, tokens = number(record.get("step")), number(record.get("tokens_total"))
        steps_before = run.origins.get(str(record.get("phase")), (0.0, 0.0))[0]
        x_step = None if step is None else steps_before + step
        x_flops = None if tokens is None or flops is None else tokens * flops
        points.append({**record, "x_tokens": tokens, "x_step": x_step, "x_flops": x_flops})
    return sorted(points, key=lambda p: (p["x_step"] or 0.0, p["x_tokens"] or 0.0))


def newest(points: Sequence[Point], *keys: str) -> list[Point]:
    """Of records that agree in `keys` the last one."""
    return list({tuple(str(p.get(key)) for key in keys): p for p in points}.values())


def where_evaluated(record: Point) -> str:
    parts = [str(record["phase"])] if record.get("phase") else []
    parts += [f"step {record['step']:,}"] if number(record.get("step")) is not None else []
    return " ".join(parts) or "checkpoint not recorded"


def settings_of(record: Point) -> tuple[Any, ...]:
    """What two CORE records must share to be compared."""
    return tuple(with_current_names(record).get(key) for key in ("protocol", "limit", "seed", "not_core"))


def settings_text(record: Point) -> str:
    most = with_current_names(record).get("limit")
    text = f"{record.get('protocol') or 'protocol not recorded'}, {f'{most} items a task' if most else 'all items'}"
    return f"{text}, {record['not_core']}" if record.get("not_core") else text


def core_curves(runs: Sequence[Run]) -> list[Curve]:
    """One curve per run and kind of setting."""
    curves, others = list[Curve](), count(len(runs))
    for place, run in enumerate(runs):
        points = [p for p in points_of(run, "core") if isinstance(p.get("tasks"), dict)]
        for index, settings in enumerate(dict.fromkeys(map(settings_of, points))):
            same = newest([p for p in points if settings_of(p) == settings], "phase", "step", "tokens_total")
            name = f"{run.name}: {settings_text(same[0])}" if len(runs) > 1 else settings_text(same[0])
            curves.append(Curve(name, same, next(others) if index else place))
    return curves


def tasks_of(points: Iterable[Point]) -> list[str]:
    """All tasks that any record has scored, in the order of the records."""
    return list(dict.fromkeys(task for point in points for task in point["tasks"]))


def figure_of(point: Point, task: str, key: str) -> float | None:
    found = point["tasks"].get(task)
    value = number(found.get(key)) if isinstance(found, dict) else None
    return None if value is None else round(value, 5)


def core_figure(curves: Sequence[Curve]) -> go.Figure:
    """CORE v1 (solid) and v2 (dashed) of several curves, with the references that lie within reach."""
    traces = [trace for each in curves for trace in core_traces(each, colour(each.place))]
    figure = lines_figure(traces, hoverformat=".4f")
    draw_references(figure, ends_of(traces))
    return figure


def along_figure(run: Run, curves: Sequence[Curve]) -> go.Figure:
    """CORE of a run above its loss and learning rate, with its phases and restarts."""
    figure = go.Figure(layout=PLOT)
    traces = [t for i, each in enumerate(curves) for t in core_traces(each, colour(i + 3) if i else TINT)]
    figure.add_traces(traces)
    draw_references(figure, ends_of(traces))
    panels = draw_panels(figure, run, ALONG)
    if len(panels) > 1 and "smooth_loss" in panels[1].keys:
        draw_validation(figure, run, "y2")
        figure.update_layout(yaxis2_range=span(settled([row["smooth_loss"] for row in run.kept_rows])))
    mark_x(figure, run, panels)
    return figure


def core_traces(each: Curve, tint: str) -> list[go.Scatter]:
    """One curve in both versions, with one standard error."""
    traces = []
    for version, dashes in VERSIONS.items():
        known = [(p, y) for p in each.points if (y := number(p.get(f"core_{version}"))) is not None]
        errors = [number(p.get(f"core_{version}_se")) or 0.0 for p, _ in known]
        bars: dict[str, Any] = {"type": "data", "array": errors, "thickness": 1, "width": 3}
        if len(known) > MARKS:  # a dashed line would not be seen among as many marks
            bars |= {"width": 0, "color": f"{tint}44"}
        look = {"name": f"{each.name}, {version}", "hovertemplate": "%{y:.4f} ± %{error_y.array:.4f}"}
        trace = curve(
            known, tint, 2, "circle", line_dash=dashes, error_y=bars, x=[p["x_tokens"] for p, _ in known]
        )
        traces.append(trace.update(look | {"legendgroup": f"{each.name}, {version}"}))
    return traces


def ends_of(traces: Sequence[go.Scatter]) -> list[float]:
    """The ends of all error bars; the last one is of the last curve's last point."""
    return [
        y + sign * e for t in traces for y, e in zip(t.y, t.error_y.array, strict=True) for sign in (1, -1)
    ]


def draw_references(figure: go.Figure, values: Sequence[float]) -> None:
    """Lines at the CORE of known models: those below the curves, and the next one above;
    values: the curves' own.

    A name stands on the right if it is far below their ends, else on the left; above its line, but that of a
    v2, the lower of two, below it. A curve or another name in the way moves it to one of the other places;
    without a free one there is no line.
    """
    ends, last = span(values) or [0.0, 0.3], values[-1] if values else 0.0
    above = [r.value for r in CORE_REFERENCES if ends[1] < r.value < 1.4 * ends[1]][:1]
    ends = [min(ends[0], 0.0), max([ends[1], *(1.08 * value for value in above)])]
    height, names, curves = 0.065 * (ends[1] - ends[0]), list[Place](), curve_points(figure)
    for name, version, value in (each for each in CORE_REFERENCES if ends[0] <= each.value <= ends[1]):
        usual = "top" if version == "v1" else "bottom", "right" if value < 0.85 * last else "left"
        crossed: dict[tuple[str, str], int] = {}
        for place in (usual, *product(("top", "bottom"), ("left", "right"))):
            low, left = value - height * (place[0] == "bottom"), 0.54 * (place[1] == "right")
            inside = [
                [left <= x <= left + 0.46 and low <= y <= low + height for x, y in of]
                for of in (curves, names)
            ]
            crossed.setdefault(place, sum(inside[0]) + len(curves) * sum(inside[1]))
        chosen = min(crossed, key=crossed.__getitem__)
        if crossed[chosen]:
            continue  # on a phone its name could not be read
        names.append(
            (
                0.5 + 0.48 * (1 if chosen[1] == "right" else -1),
                value + height * (0.5 if chosen[0] == "top" else -0.5),
            )
        )
        line = {"color": NEUTRAL, "width": 1, "dash": VERSIONS[version]}
        label = {"text": f"{name} {value:.4f} ({version})", "font": {"size": 11}}
        look: dict[str, Any] = {"line": line, "opacity": 0.6, "layer": "below"}
        figure.add_hline(value, annotation=label, annotation_position=" ".join(chosen), **look)
    figure.update_layout(yaxis_range=ends)


def curve_points(figure: go.Figure) -> list[Place]:
    """Where the curves of a figure run, between their points too."""
    lines = [sorted((x, y) for x, y in zip(t.x or (), t.y or (), strict=False) if None not in (x, y))
             for t in figure.data]  # fmt: skip
    ends = [x for line in lines for x, _ in line]
    if not ends or min(ends) == max(ends):
        return []
    grid = [min(ends) + i / 100 * (max(ends) - min(ends)) for i in range(101)]
    return [
        ((x - grid[0]) / (grid[-1] - grid[0]), a[1] + (b[1] - a[1]) * (x - a[0]) / (b[0] - a[0]))
        for line in lines for a, b in pairwise(line) if b[0] > a[0] for x in grid if a[0] <= x <= b[0]
    ]  # fmt: skip


def heat_figure(points: Sequence[Point]) -> go.Figure:
    """Centered accuracy of each task (rows) at each checkpoint (columns); a gap where a
    checkpoint lacks the task.
    """
    tasks, labels = tasks_of(points), [checkpoint_text(p) for p in points]
    z = {v: [[figure_of(p, task, f"centered_{v}") for p in points] for task in tasks] for v in VERSIONS}
    reach = max([0.1, *(abs(c) for row in z["v2"] for c in row if c is not None)])
    scale = [[0, BAD], [0.5, "rgba(138,148,166,0.12)"], [1, BETTER]]
    bar = {"thickness": 8, "outlinewidth": 0, "nticks": 5, "len": 1, "tickfont": {"size": 11}}
    figure = go.Figure(layout={**PLOT, "height": 64 + 21 * len(tasks)})
    figure.add_heatmap(
        z=z["v2"], y=tasks, customdata=[labels] * len(tasks), colorscale=scale, zmin=-reach, zmax=reach, colorbar=bar,
        hovertemplate="%{y}<br>%{customdata}<br>centered %{z:.4f}<extra></extra>", hoverongaps=False, ygap=1,
        xgap=int(len(points) < 60),
    )  # fmt: skip
    ticks = sorted({0, (len(points) - 1) // 2, len(points) - 1})
    still = {"fixedrange": True, "showgrid": False, "zeroline": False}
    figure.update_xaxes(tickvals=ticks, ticktext=[labels[i] for i in ticks], tickangle=0, **still)
    figure.update_yaxes(autorange="reversed", tickvals=tasks, tickfont={"size": 11}, automargin=True, **still)
    figure.data[0].meta = {"baselines": {"v1": {"z": z["v1"]}}}
    figure.update_layout(hovermode="closest", margin_t=8)
    add_choice(figure, "baselines", {v: {} for v in reversed(VERSIONS)}, "v2")
    return figure


def core_card(run: Run) -> str:
    """CORE over the run, above loss and learning rate; "" where no checkpoint has one."""
    curves = drawn_of(core_curves([run]))
    if not curves:
        return ""
    legend = legend_of(curves, [TINT, *(colour(i) for i in range(4, 99))])
    legend.append(legend_entry("validation", VALID, "validation loss"))
    caption = (
        "The mean of 22 centered accuracies, bars are one standard error. v2 has DCLM's corrected baselines; grey "
        "lines are published values in the version that they name. Drag to zoom."
    )
    figure = chart(along_figure(run, curves), f"core-{run.name}", legend)
    return card("CORE along the run", "".join(last_core(c.last) for c in curves) + figure, caption)


def tasks_card(run: Run) -> str:
    """The tasks of CORE: by checkpoint, by category, and the newest in full."""
    curves = core_curves([run])
    if not curves:
        return ""
    points, last = curves[-1].points, curves[-1].last
    toy, body = last.get("not_core"), ""
    if toy:
        rest = len(last.get("missing") or {})
        body = f"<p>{escape(str(toy))}</p><p class='caption'>The other {rest} tasks of CORE are not in this bundle.</p>"
    if len(points) > 1 and tasks_of(points):
        heat = chart(heat_figure(points), f"heat-{run.name}")
        body += f'<h3>Centered accuracy by checkpoint (tokens seen)</h3><div class="scroll wide">{heat}</div>'
    if not toy:
        body += categories_part(points, f"categories-{run.name}")
    opened = " open" if len(last["tasks"]) <= FEW else ""
    words = f"Accuracy of each task, {escape(settings_text({**last, 'not_core': None}))}"
    body += f"<details{opened}><summary>{words}</summary>{task_table(last)}</details>{missing_part(last)}"
    hashes = (("data", "data_sha256"), ("tokenizer", "tokenizer_sha256"), ("code", "code_version"))
    made = [
        f"seed {escape(str(last.get('seed')))}",
        *(f"{name} {code(last.get(key))}" for name, key in hashes),
    ]
    title = "Tasks of a toy bundle, not CORE" if toy else "CORE by task"
    return card(title, body, f"{escape(where_evaluated(last))}: {', '.join(made)}.")


def core_tile(run: Run) -> tuple[str, str, str]:
    """The newest CORE, v2 first; or why there is none."""
    curves = core_curves([run])
    for last in (c.last for c in reversed(drawn_of(curves))):
        error = number(last.get("core_v2_se"))
        note = f"{f'± {error:.4f}, ' if error else ''}corrected baselines (v2); v1 {measured(last['core_v1'], '.4f')}"
        return "CORE", measured(last.get("core_v2"), ".4f"), note
    known = len(curves[-1].last["tasks"]) if curves else 0
    return "CORE", measured(None), f"{known} of its 22 tasks evaluated" if known else "no evaluation yet"


def last_core(last: Point) -> str:
    """The CORE of a record in both versions."""
    said = []
    for version in VERSIONS:
        error = number(last.get(f"core_{version}_se"))
        said.append(
            f"CORE {version} {aggregate(last, version)}" + ("" if error is None else f" ± {error:.4f}")
        )
    where = escape(f"{where_evaluated(last)} ({settings_text(last)})")
    return f'<p class="chips"><span>{" · ".join(said)}</span><span>{where}</span></p>'


def aggregate(point: Point, version: str) -> str:
    value = number(point.get(f"core_{version}"))
    return '<b class="missing">N/A</b>' if value is None else f"<b>{value:.4f}</b>"


def drawn_of(curves: Sequence[Curve]) -> list[Curve]:
    """Those that have an aggregate."""
    return [c for c in curves if any(number(p.get("core_v1")) is not None for p in c.points)]


def legend_of(curves: Sequence[Curve], tints: Sequence[str], named: bool = False) -> list[str]:
    named |= len(curves) > 1
    return [legend_entry(f"{each.name}, {v}", tint, f"{each.name}, {v}" if named else v, dashes)
            for each, tint in zip(curves, tints, strict=False) for v, dashes in VERSIONS.items()]  # fmt: skip


def checkpoint_text(point: Point) -> str:
    return (
        where_evaluated(point) if number(point.get("tokens_total")) is None else short(point["tokens_total"])
    )


def categories_part(points: Sequence[Point], name: str) -> str:
    """The means by category over checkpoints; a category that lacks a task has none."""

    def mean(point: Point, category: str) -> float | None:
        return number((point.get("categories") or {}).get(category, {}).get("centered_v2"))

    means = {category: mean(points[-1], category) for category in points[-1].get("categories") or {}}
    if all(mean is None for mean in means.values()):
        return ""
    known = [category for category, m in means.items() if m is not None]
    legend = [legend_entry(c, i) for i, c in enumerate(known)]
    figure = checkpoint_figure(points, known, mean)
    figure.update_yaxes(zeroline=True, zerolinecolor=NEUTRAL)  # the baseline
    absent = [category for category, m in means.items() if m is None]
    words = f'<p class="caption">{missing("N/A")}: {escape(", ".join(absent))}</p>' if absent else ""
    return f"<h3>Means by category, centered on v2</h3>{chart(figure, name, legend)}{words}"


def task_table(point: Point) -> str:
    """The scored tasks of one record with how they were asked."""
    rows, gold = [], any("gold_bits_per_byte" in found for found in point["tasks"].values())
    for task, found in point["tasks"].items():
        accuracy, n = number(found.get("accuracy")) or 0.0, number(found.get("n")) or 0.0
        likely = (accuracy * n + 0.5) / (n + 1)  # none right of four is no certainty
        noisy = " <small>noisy</small>" if (likely * (1 - likely) / (n + 1)) ** 0.5 > NOISY else ""
        ends = found.get("interval")
        error = f" ± {measured(found.get('standard_error'), '.4f')}"
        error = f" ({' – '.join(measured(end, '.3f') for end in ends)})" if isinstance(ends, list) else error
        bases = " / ".join(dict.fromkeys(measured(found.get(f"baseline_{v}"), "g") for v in VERSIONS))
        rows.append([
            *(escape(str(text)) for text in (task, found.get("category", ""), found.get("type", ""))),
            short(found.get("shots")), f"{short(found.get('n'))} of {short(found.get('n_total'))}",
            f"{measured(found.get('accuracy'), '.4f')}{error}{noisy}", f"{bases} %",
            *(measured(found.get(f"centered_{v}"), ".4f") for v in VERSIONS),
            *([measured(found.get("gold_bits_per_byte"), ".3f")] if gold else []),
        ])  # fmt: skip
    head = ("task", "category", "type", "shots", "items", "accuracy", "baseline", "centered v1", "centered v2",
            *(["gold bits per byte"] if gold else []))  # fmt: skip
    return table(head, rows) if rows else ""


def missing_part(point: Point) -> str:
    """One line for the tasks that a record lacks, with their reasons; of a toy bundle the card has said it."""
    reasons = {} if point.get("not_core") else point.get("missing") or {}
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
    return f"{text}<details><summary>{words}, hence no CORE: {names}</summary><pre>{why}</pre></details>"


def core_of_all(runs: Sequence[Run]) -> str:
    """CORE of several runs in one figure, and the newest accuracy of every task side by side."""
    curves = core_curves(runs)
    if not curves:
        return ""
    rows = [["CORE v1 / v2", *(" / ".join(aggregate(c.last, v) for v in VERSIONS) for c in curves)]]
    for task in tasks_of(point for c in curves for point in c.points):
        found = [figure_of(c.last, task, "accuracy") for c in curves]
        rows.append(
            [escape(task), *(missing("missing") if value is None else f"{value:.4f}" for value in found)]
        )
    head = ("accuracy at the last checkpoint", *(c.name for c in curves))
    drawn = drawn_of(curves)
    legend = legend_of(drawn, [colour(each.place) for each in drawn], named=True)
    figure = chart(core_figure(drawn), "core-comparison", legend)
    every = f"<details><summary>Every task at the last checkpoint</summary>{table(head, rows[1:])}</details>"
    return card("CORE of all runs", (figure if drawn else "") + table(head, rows[:1]) + every)
