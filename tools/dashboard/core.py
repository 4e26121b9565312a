"""CORE on the page: the aggregate over tokens, steps or FLOPs, the heat map of its tasks, means by category, the table.

A `core` record that lacks a task has no aggregate (null): the mean of the others would be another number. It has no
point in the first figure; the tasks that it has are drawn all the same. Records of different protocols or numbers of
items are curves of their own: they cannot be compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise, product
from typing import Any, NamedTuple

import plotly.graph_objects as go

from laneformer.config import LaneformerConfig, flops_per_token
from records.page import BAD, NEUTRAL, PLOT, card, chart, code, colour, line_chip, measured, missing, short, table
from records.run import Run, number
from tools.dashboard.figures import BUTTONS, MARKS, checkpoint_figure, curve, lines_figure, span
from tools.dashboard.published import CORE_REFERENCES

VERSIONS = {"v1": "solid", "v2": "dash"}  # of the baselines, and how its line is drawn
BETTER = "#2f6fe0"  # than the baseline; BAD is worse
NOISY = 0.03  # a standard error of the accuracy above which a task alone says little
Place = tuple[float, float]  # share of the width, value
Point = dict[str, Any]  # a record with `x_tokens`, `x_step`, `x_flops`: its place on each axis, None where not known


class Curve(NamedTuple):
    """Records of one run that can be compared, in the order of the run."""

    name: str
    points: list[Point]

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


def flops_of(run: Run) -> int | None:
    """Training FLOPs of a token, at the sequence length of the run's first phase."""
    try:
        model = LaneformerConfig.from_dict(run.model)
    except (TypeError, ValueError):
        return None
    lengths = [config.get("training", {}).get("seq_len") for config in run.configs.values()]
    return flops_per_token(model, next((n for n in lengths if n), model.max_position_embeddings))


def where_evaluated(record: Point) -> str:
    parts = [str(record["phase"])] if record.get("phase") else []
    parts += [f"step {record['step']:,}"] if number(record.get("step")) is not None else []
    return " ".join(parts) or "checkpoint not recorded"


def settings_of(record: Point) -> tuple[Any, ...]:
    """What two CORE records must share to be compared."""
    return tuple(record.get(key) for key in ("protocol", "max_per_task", "seed", "not_core"))


def settings_text(record: Point) -> str:
    most = record.get("max_per_task")
    text = f"{record.get('protocol') or 'protocol not recorded'}, {f'{most} items a task' if most else 'all items'}"
    return f"{text}, {record['not_core']}" if record.get("not_core") else text


def core_curves(runs: Sequence[Run]) -> list[Curve]:
    """One curve per run and kind of setting."""
    curves = []
    for run in runs:
        points = [p for p in points_of(run, "core") if isinstance(p.get("tasks"), dict)]
        for settings in dict.fromkeys(map(settings_of, points)):
            same = newest([p for p in points if settings_of(p) == settings], "phase", "step", "tokens_total")
            name = f"{run.name}: {settings_text(same[0])}" if len(runs) > 1 else settings_text(same[0])
            curves.append(Curve(name, same))
    return curves


def tasks_of(points: Iterable[Point]) -> list[str]:
    """All tasks that any record has scored, in the order of the records."""
    return list(dict.fromkeys(task for point in points for task in point["tasks"]))


def figure_of(point: Point, task: str, key: str) -> float | None:
    found = point["tasks"].get(task)
    value = number(found.get(key)) if isinstance(found, dict) else None
    return None if value is None else round(value, 5)


def core_figure(curves: Sequence[Curve]) -> go.Figure:
    """CORE v1 (solid) and v2 (dashed) with one standard error, and the references that lie within reach."""
    traces, values = [], list[float]()
    for index, each in enumerate(curves):
        for version, dashes in VERSIONS.items():
            known = [(p, y) for p in each.points if (y := number(p.get(f"core_{version}"))) is not None]
            errors = [number(p.get(f"core_{version}_se")) or 0.0 for p, _ in known]
            bars: dict[str, Any] = {"type": "data", "array": errors, "thickness": 1, "width": 3}
            if len(known) > MARKS:  # a dashed line would not be seen among as many marks
                bars |= {"width": 0, "color": f"{colour(index)}55"}
            look = {"name": f"{each.name}, {version}", "hovertemplate": "%{y:.4f} ± %{error_y.array:.4f}"}
            traces.append(curve(known, colour(index), 2, "circle", line_dash=dashes, error_y=bars).update(look))
            values += [y + sign * e for (_, y), e in zip(known, errors, strict=True) for sign in (1, -1)]
    figure = lines_figure(traces, hoverformat=".4f")
    draw_references(figure, values)
    return figure


def draw_references(figure: go.Figure, values: Sequence[float]) -> None:
    """Lines at the CORE of known models: those below the curves, and the next one above; values: the curves' own.

    A name stands on the right if it is far below their ends, else on the left; above its line, but that of a v2, the
    lower of two, below it. A curve or another name in the way moves it to one of the other places.
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
            inside = [[left <= x <= left + 0.46 and low <= y <= low + height for x, y in of] for of in (curves, names)]
            crossed.setdefault(place, sum(inside[0]) + len(curves) * sum(inside[1]))
        chosen = min(crossed, key=crossed.__getitem__)
        names.append(
            (0.5 + 0.48 * (1 if chosen[1] == "right" else -1), value + height * (0.5 if chosen[0] == "top" else -0.5))
        )
        line = {"color": NEUTRAL, "width": 1, "dash": VERSIONS[version]}
        label = {"text": f"{name} {value:.4f} ({version})", "font": {"size": 11}}
        look: dict[str, Any] = {"line": line, "opacity": 0.6, "layer": "below"}
        figure.add_hline(value, annotation=label, annotation_position=" ".join(chosen), **look)
    figure.update_yaxes(range=ends)


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
    """Centered accuracy of each task (rows) at each checkpoint (columns); a gap where a checkpoint lacks the task."""
    tasks, labels = tasks_of(points), [checkpoint_text(p) for p in points]
    z = {v: [[figure_of(p, task, f"centered_{v}") for p in points] for task in tasks] for v in VERSIONS}
    reach = max([0.1, *(abs(c) for row in z["v2"] for c in row if c is not None)])
    scale = [[0, BAD], [0.5, "rgba(138,148,166,0.12)"], [1, BETTER]]
    bar = {"thickness": 8, "outlinewidth": 0, "nticks": 5, "len": 1, "tickfont": {"size": 11}}
    figure = go.Figure(layout={**PLOT, "height": 100 + 21 * len(tasks)})
    figure.add_heatmap(
        z=z["v2"], y=tasks, customdata=[labels] * len(tasks), colorscale=scale, zmin=-reach, zmax=reach, colorbar=bar,
        hovertemplate="%{y}<br>%{customdata}<br>centered %{z:.4f}<extra></extra>", hoverongaps=False, ygap=1,
        xgap=int(len(points) < 60),
    )  # fmt: skip
    ticks = sorted({0, (len(points) - 1) // 2, len(points) - 1})
    still = {"fixedrange": True, "showgrid": False, "zeroline": False}
    figure.update_xaxes(tickvals=ticks, ticktext=[labels[i] for i in ticks], tickangle=0, **still)
    figure.update_yaxes(autorange="reversed", tickvals=tasks, tickfont={"size": 11}, automargin=True, **still)
    buttons = [{"label": f"baselines {v}", "method": "restyle", "args": [{"z": [z[v]]}]} for v in reversed(VERSIONS)]
    left = {"x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom", "pad": {"b": 4}}  # a phone does not show the right
    figure.update_layout(hovermode="closest", updatemenus=[{**BUTTONS, **left, "buttons": buttons}])
    return figure


def core_card(run: Run) -> str:
    curves = core_curves([run])
    if not curves:
        return ""
    notes = dict.fromkeys(str(c.last["not_core"]) for c in curves if c.last.get("not_core"))
    body = f'<ul class="warnings">{"".join(f"<li>{escape(n)}</li>" for n in notes)}</ul>' if notes else ""
    body += "".join(last_core(c.last) for c in curves) + aggregate_chart(curves, f"core-{run.name}")
    points, last = curves[-1].points, curves[-1].last
    body += f"<h3>Accuracy of each task, {escape(settings_text(last))}</h3>{task_table(last)}"
    if tasks_of(points):
        heat = chart(heat_figure(points), f"heat-{run.name}")
        body += f'<h3>Centered accuracy by checkpoint (tokens seen)</h3><div class="scroll wide">{heat}</div>'
    body += categories_part(points, f"categories-{run.name}")
    hashes = (("data", "data_sha256"), ("tokenizer", "tokenizer_sha256"), ("code", "code_version"))
    made = [f"seed {escape(str(last.get('seed')))}", *(f"{name} {code(last.get(key))}" for name, key in hashes)]
    caption = (
        "CORE is the mean of 22 centered accuracies; bars are one standard error. v2 has DCLM's corrected baselines; "
        f"grey lines are published values in the version that they name. {escape(where_evaluated(last))}: "
        f"{', '.join(made)}."
    )
    return card("CORE", body, caption)


def last_core(last: Point) -> str:
    """The CORE of a record in both versions."""
    said = []
    for version in VERSIONS:
        error = number(last.get(f"core_{version}_se"))
        said.append(f"CORE {version} {aggregate(last, version)}" + ("" if error is None else f" ± {error:.4f}"))
    where = escape(f"{where_evaluated(last)} ({settings_text(last)})")
    return f'<p class="chips"><span>{" · ".join(said)}</span><span>{where}</span></p>'


def aggregate(point: Point, version: str) -> str:
    value = number(point.get(f"core_{version}"))
    return '<b class="missing">N/A</b>' if value is None else f"<b>{value:.4f}</b>"


def aggregate_chart(curves: Sequence[Curve], name: str) -> str:
    drawn = [c for c in curves if any(number(p.get("core_v1")) is not None for p in c.points)]
    if not drawn:
        return ""
    chips = "".join(line_chip(i, c.name) for i, c in enumerate(drawn))
    return f'<p class="chips">{chips}<span>solid: v1, dashed: v2</span></p>{chart(core_figure(drawn), name)}'


def checkpoint_text(point: Point) -> str:
    return where_evaluated(point) if number(point.get("tokens_total")) is None else short(point["tokens_total"])


def categories_part(points: Sequence[Point], name: str) -> str:
    """The means by category over checkpoints; a category that lacks a task has none."""

    def mean(point: Point, category: str) -> float | None:
        return number((point.get("categories") or {}).get(category, {}).get("centered_v2"))

    means = {category: mean(points[-1], category) for category in points[-1].get("categories") or {}}
    if all(mean is None for mean in means.values()):
        return ""
    chips = [missing(f"{c}: N/A") if m is None else line_chip(i, c) for i, (c, m) in enumerate(means.items())]
    figure = checkpoint_figure(points, list(means), mean)
    figure.update_yaxes(zeroline=True, zerolinecolor=NEUTRAL)  # the baseline
    title = "<h3>Means by category, centered on v2</h3>"
    return f'{title}<p class="chips">{"".join(chips)}</p>{chart(figure, name)}'


def task_table(point: Point) -> str:
    """The scored tasks of one record with how they were asked, and one line for the missing ones with their reasons."""
    rows = []
    for task, found in point["tasks"].items():
        error = number(found.get("standard_error"))
        noisy = " <small>noisy</small>" if (error or 0) > NOISY else ""
        bases = " / ".join(dict.fromkeys(measured(found.get(f"baseline_{v}"), "g") for v in VERSIONS))
        rows.append([
            *(escape(str(text)) for text in (task, found.get("category", ""), found.get("type", ""))),
            short(found.get("shots")), f"{short(found.get('n'))} of {short(found.get('n_total'))}",
            f"{measured(found.get('accuracy'), '.4f')} ± {measured(error, '.4f')}{noisy}", f"{bases} %",
            *(measured(found.get(f"centered_{v}"), ".4f") for v in VERSIONS),
        ])  # fmt: skip
    head = ("task", "category", "type", "shots", "items", "accuracy ± SE", "baseline", "centered v1", "centered v2")
    reasons = point.get("missing") or {}
    if not reasons:
        return table(head, rows)
    why = escape("".join(f"{task}: {reason}\n" for task, reason in reasons.items()))
    words = missing(f"{len(reasons)} of {len(reasons) + len(rows)} tasks missing")
    rest = f"{words}, hence no CORE: {escape(', '.join(reasons))}</summary><pre>{why}</pre>"
    return (table(head, rows) if rows else "") + f"<details><summary>{rest}</details>"


def core_of_all(runs: Sequence[Run]) -> str:
    """CORE of several runs in one figure, and the newest accuracy of every task side by side."""
    curves = core_curves(runs)
    if not curves:
        return ""
    rows = [["CORE v1 / v2", *(" / ".join(aggregate(c.last, v) for v in VERSIONS) for c in curves)]]
    for task in tasks_of(point for c in curves for point in c.points):
        found = [figure_of(c.last, task, "accuracy") for c in curves]
        rows.append([escape(task), *(missing("missing") if value is None else f"{value:.4f}" for value in found)])
    head = ("accuracy at the last checkpoint", *(c.name for c in curves))
    return card("CORE of all runs", aggregate_chart(curves, "core-comparison") + table(head, rows))
