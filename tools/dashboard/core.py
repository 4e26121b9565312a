"""CORE as figures: the aggregate over tokens, steps or FLOPs, the heat map of its tasks, and the means by category.

A `core` record that lacks a task has no aggregate (null) and no point in the first figure; its tasks are drawn all the
same. Records of different protocols or numbers of items are curves of their own: they cannot be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import plotly.graph_objects as go

from laneformer.config import LaneformerConfig, flops_per_token
from records.run import Run, number
from tools.dashboard.charts import MARKS, NEUTRAL, TROUBLE_TINT, bare_figure, colour
from tools.dashboard.overlays import DASHES, line_of, span
from tools.dashboard.published import CORE_REFERENCES

VERSIONS = ("v1", "v2")
AXES = {"tokens": "tokens seen, all phases", "steps": "step, all phases", "FLOPs": "training FLOPs, all phases"}
BUTTONS = {
    "type": "buttons", "direction": "right", "bgcolor": "rgba(0,0,0,0)", "font": {"size": 11}, "x": 1,
    "xanchor": "right", "y": 1, "yanchor": "bottom", "pad": {"b": 4},
}  # fmt: skip
WORSE, BETTER = TROUBLE_TINT, "#2f6fe0"
Point = dict[str, Any]  # a record; `at` says where it stands on each of AXES, None where that is not known


class Curve(NamedTuple):
    """Records of one run that can be compared, in the order of the run."""

    name: str
    points: list[Point]

    @property
    def last(self) -> Point:
        return self.points[-1]


def points_of(run: Run, kind: str) -> list[Point]:
    """The records of a kind, each with its place `at`, in the order of the run."""
    flops, points = flops_of(run), []
    for record in run.evals_of(kind):
        step, tokens = number(record.get("step")), number(record.get("tokens_total"))
        steps_before = run.origins.get(str(record.get("phase")), (0.0, 0.0))[0]
        at = {
            "tokens": tokens,
            "steps": None if step is None else steps_before + step,
            "FLOPs": None if tokens is None or flops is None else tokens * flops,
        }
        points.append({**record, "at": at})
    return sorted(points, key=lambda p: (p["at"]["steps"] or 0.0, p["at"]["tokens"] or 0.0))


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


def settings_of(record: Point) -> tuple[Any, ...]:
    """What two CORE records must share to be compared."""
    return tuple(record.get(key) for key in ("protocol", "max_per_task", "seed", "not_core"))


def settings_text(record: Point) -> str:
    most = record.get("max_per_task")
    text = f"{record.get('protocol') or 'protocol not recorded'}, {f'{most} items a task' if most else 'all items'}"
    return f"{text}, {record['not_core']}" if record.get("not_core") else text


def core_curves(runs: Sequence[Run]) -> list[Curve]:
    """One curve a run and kind of setting."""
    curves = []
    for run in runs:
        points = [p for p in points_of(run, "core") if isinstance(p.get("tasks"), dict)]
        for settings in dict.fromkeys(map(settings_of, points)):
            same = newest([p for p in points if settings_of(p) == settings], "phase", "step", "tokens_total")
            name = f"{run.name}: {settings_text(same[0])}" if len(runs) > 1 else settings_text(same[0])
            curves.append(Curve(name, same))
    return curves


def core_figure(curves: Sequence[Curve]) -> go.Figure:
    """CORE v1 (solid) and v2 (dashed) with one standard error, and the references that lie within reach."""
    figure, values, places = bare_figure(), [], []
    for index, curve in enumerate(curves):
        for version, dash in zip(VERSIONS, DASHES, strict=False):
            known = [p for p in curve.points if number(p.get(f"core_{version}")) is not None]
            errors = [number(p.get(f"core_{version}_se")) or 0.0 for p in known]
            y = [p[f"core_{version}"] for p in known]
            look: dict[str, Any] = {"mode": "lines+markers", "marker": {"size": 6, "color": colour(index)}}
            bars = {"type": "data", "array": errors, "thickness": 1, "width": 3}
            if len(known) > MARKS:  # a dashed line would not be seen among as many marks
                look, bars = {"mode": "lines"}, {**bars, "width": 0, "color": f"{colour(index)}55"}
            line = {**line_of(index), "dash": dash}
            figure.add_trace(
                go.Scatter(y=y, name=f"{curve.name}, {version}", line=line, error_y=bars, **look)
                .update(hovertemplate="%{y:.4f} ± %{error_y.array:.4f}")
            )  # fmt: skip
            places.append([p["at"] for p in known])
            values += [v + sign * e for v, e in zip(y, errors, strict=True) for sign in (1, -1)]
    switch_x(figure, places)
    draw_references(figure, values)
    figure.update_layout(margin={"t": 36})
    return figure


def draw_references(figure: go.Figure, values: Sequence[float]) -> None:
    """Lines at the CORE of known models: those below the curves, and the next one above; values: the curves' own.

    A name stands where no curve is: far below their ends on the right, else on the left; that of a v2, the lower of
    two, below its line.
    """
    ends, last = span(values) or [0.0, 0.3], values[-1] if values else 0.0
    above = [r.value for r in CORE_REFERENCES if ends[1] < r.value < 1.4 * ends[1]][:1]
    ends = [min(ends[0], 0.0), max([ends[1], *(1.08 * value for value in above)])]
    for reference in CORE_REFERENCES:
        if not ends[0] <= reference.value <= ends[1]:
            continue
        dash = DASHES[VERSIONS.index(reference.version)]
        across = {"xref": "paper", "x0": 0, "x1": 1, "y0": reference.value, "y1": reference.value, "layer": "below"}
        figure.add_shape(type="line", line={"color": NEUTRAL, "width": 1, "dash": dash}, opacity=0.6, **across)
        text = f"{reference.name} {reference.value:.4f} ({reference.version})"
        side = {"x": 0.995, "xanchor": "right"} if reference.value < 0.85 * last else {"x": 0.005, "xanchor": "left"}
        above_it = "bottom" if reference.version == "v1" else "top"
        place = {"xref": "paper", "y": reference.value, "yanchor": above_it, **side}
        figure.add_annotation(text=text, showarrow=False, font={"size": 11}, **place)
    figure.update_yaxes(fixedrange=True, nticks=7, hoverformat=".4f", range=ends, zeroline=False)


def switch_x(figure: go.Figure, places: Sequence[Sequence[dict[str, Any]]]) -> None:
    """Give every trace its x, with a button for each axis on which all points have a place."""
    known = [axis for axis in AXES if all(at[axis] is not None for trace in places for at in trace)] or ["steps"]
    buttons: list[dict[str, Any]] = []
    for axis in known:
        x = [[at[axis] for at in trace] for trace in places]
        change = {"xaxis.title.text": AXES[axis], "xaxis.autorange": True}
        buttons.append({"label": axis, "method": "update", "args": [{"x": x}, change]})
    for trace, x in zip(figure.data, buttons[0]["args"][0]["x"], strict=True):
        trace.x = x
    figure.update_xaxes(title_text=AXES[known[0]], title_font_size=12, exponentformat="SI", nticks=7, zeroline=False)
    if len(known) > 1:
        figure.update_layout(updatemenus=[{**BUTTONS, "buttons": buttons}])


def labels_of(points: Sequence[Point]) -> list[str]:
    """All tasks that any record has or misses, in the order of the records."""
    names: dict[str, None] = {}
    for point in points:
        names |= dict.fromkeys(point["tasks"]) | dict.fromkeys(point.get("missing") or {})
    return list(names)


def figure_of(point: Point, task: str, key: str) -> float | None:
    found = point["tasks"].get(task)
    return number(found.get(key)) if isinstance(found, dict) else None


def heat_figure(points: Sequence[Point], x_texts: Sequence[str]) -> go.Figure:
    """Centered accuracy of each task (rows) at each checkpoint (columns); a gap where it is missing."""
    figure, labels = bare_figure(), labels_of(points)
    by_version = {v: [[figure_of(p, task, f"centered_{v}") for p in points] for task in labels] for v in VERSIONS}
    known = [value for row in by_version["v2"] for value in row if value is not None]
    scale = [[0, WORSE], [0.5, "rgba(138,148,166,0.12)"], [1, BETTER]]
    reach = max([0.1, *(abs(value) for value in known)])
    hover = "%{y}<br>%{customdata}<br>centered %{z:.4f}<extra></extra>"
    figure.add_trace(
        go.Heatmap(
            z=rounded(by_version["v2"]), y=labels, customdata=[list(x_texts)] * len(labels), colorscale=scale,
            zmin=-reach, zmax=reach, hovertemplate=hover, hoverongaps=False, xgap=len(points) < 60 and 1, ygap=1,
            colorbar={"thickness": 8, "outlinewidth": 0, "nticks": 5, "len": 1, "tickfont": {"size": 11}},
        )
    )  # fmt: skip
    ticks = sorted({0, (len(points) - 1) // 2, len(points) - 1})
    texts = [x_texts[i] for i in ticks]
    figure.update_xaxes(tickvals=ticks, ticktext=texts, tickangle=0, fixedrange=True, zeroline=False, showgrid=False)
    missing = points[-1].get("missing") or {}
    red = [f'<span style="color:{TROUBLE_TINT}">{t}</span>' if t in missing else t for t in labels]
    figure.update_yaxes(
        autorange="reversed",
        fixedrange=True,
        showgrid=False,
        tickvals=labels,
        ticktext=red,
        tickfont={"size": 11},
        automargin=True,
    )
    buttons = [
        {"label": f"baselines {v}", "method": "restyle", "args": [{"z": [rounded(by_version[v])]}]}
        for v in reversed(VERSIONS)
    ]
    menu = {**BUTTONS, "x": 0, "xanchor": "left", "buttons": buttons}  # on a phone the right end is out of sight
    figure.update_layout(hovermode="closest", margin={"t": 36}, updatemenus=[menu])
    return figure


def rounded(rows: Sequence[Sequence[float | None]]) -> list[list[float | None]]:
    return [[None if value is None else round(value, 5) for value in row] for row in rows]


def categories_figure(points: Sequence[Point]) -> go.Figure:
    """Mean centered accuracy (v2) by category, where all tasks of it were scored."""
    figure, places = bare_figure(), []
    names = dict.fromkeys(name for p in points for name in (p.get("categories") or {}))
    for index, name in enumerate(names):
        found = [(p["at"], number(p["categories"].get(name, {}).get("centered_v2"))) for p in points]
        known = [(at, value) for at, value in found if value is not None]
        mode = "lines+markers" if len(known) <= MARKS else "lines"
        y = [round(value, 5) for _, value in known]
        figure.add_trace(go.Scatter(y=y, name=name, mode=mode, line=line_of(index), marker={"size": 6}))
        places.append([at for at, _ in known])
    switch_x(figure, places)
    figure.update_yaxes(fixedrange=True, nticks=6, zeroline=True, zerolinecolor=NEUTRAL, hoverformat=".4f")
    figure.update_layout(margin={"t": 36})
    return figure
