"""CORE on the page: above loss and learning rate, beside published values; of all runs in one figure.

A `core` record that lacks a task has no aggregate (null): the mean of the others would be another number. It
has no point in the first figure; the tasks that it has are drawn all the same. Records of different protocols
or numbers of items are curves of their own: they cannot be compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import count
from typing import Any, NamedTuple

import plotly.graph_objects as go

from evals.intervals import Z95
from records.evals import with_current_names
from records.page import (
    NEUTRAL,
    PLOT,
    card,
    chart,
    colour,
    measured,
    none,
    table,
)
from records.run import Record, Run, number
from tools.dashboard.figures import (
    MARKS,
    curve,
    lines_figure,
)
from tools.dashboard.panels import SETTLED, Panel, draw_panels, draw_validation, mark_x
from tools.dashboard.references import CORE_REFERENCES
from tools.dashboard.rows import flops_of

VERSIONS = ("v1", "v2")  # of the baselines; v2, DCLM's corrected ones, is the one that is drawn
TINT = "#8667f7"  # of CORE, apart from the colours of phases and sources
ALONG = (  # CORE and, on the same axis of x, what moves it
    Panel("CORE", "centered accuracy, mean of 22 tasks", (), 300, extremes=(), axis={"nticks": 7}),
    Panel("Loss", "nats per token, smoothed", ("smooth_loss",), 130, ".4f", axis={**SETTLED, "nticks": 4}),
    Panel("Learning rate", "", ("lr",), 60, extremes=(), axis={"exponentformat": "power"}),
)
Point = Record  # with `x_tokens`, `x_step`, `x_flops`: its place on each axis, None where not known


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
        step, tokens = number(record["step"]), number(record["tokens_total"])
        steps_before = run.origins.get(str(record["phase"]), (0.0, 0.0))[0]
        x_step = None if step is None else steps_before + step
        x_flops = tokens * flops if tokens is not None and flops else None
        points.append(Record(record, x_tokens=tokens, x_step=x_step, x_flops=x_flops))
    return sorted(points, key=lambda p: (p["x_step"] or 0.0, p["x_tokens"] or 0.0))


def newest(points: Sequence[Point], *keys: str) -> list[Point]:
    """Of records that agree in `keys` the last one."""
    return list({tuple(str(p[key]) for key in keys): p for p in points}.values())


def where_evaluated(record: Point) -> str:
    parts = [str(record["phase"])] if record["phase"] else []
    parts += [f"step {record['step']:,}"] if number(record["step"]) is not None else []
    return " ".join(parts) or "checkpoint not recorded"


def settings_of(record: Point) -> tuple[Any, ...]:
    """What two CORE records must share to be compared."""
    return tuple(with_current_names(record).get(key) for key in ("protocol", "limit", "seed", "not_core"))


def settings_text(record: Point) -> str:
    most = with_current_names(record).get("limit")
    text = (
        f"{record['protocol'] or 'protocol not recorded'}, {f'{most} items a task' if most else 'all items'}"
    )
    return f"{text}, {record['not_core']}" if record["not_core"] else text


def how_asked(point: Point) -> str:
    """What a record says of the way it asked, each part after a comma."""
    how = [f"{point['num_fewshot']}-shot"] if point["num_fewshot"] is not None else []
    how += [f"limit {point['limit']}"] if point["limit"] is not None else []
    how += ["chat template"] if point["chat_template"] else []
    how += ["without BOS"] if point["add_bos"] is False else []
    how += [f"{cut} prompts cut"] if (cut := point["cut_prompts"]) else []
    return "".join(f", {part}" for part in how)


def interval_text(ends: Sequence[float]) -> str:
    """ " ± half of it in percent", or "" where there is no interval."""
    return f" <small>± {50 * (ends[1] - ends[0]):.1f}</small>" if ends else ""


def normal(value: float | None, error: float | None) -> Sequence[float]:
    """The interval of 95 % of a mean with a standard error; () where that is not known."""
    return () if value is None or error is None else (value - Z95 * error, value + Z95 * error)


def core_curves(runs: Sequence[Run]) -> list[Curve]:
    """One curve per run and kind of setting."""
    curves, others = list[Curve](), count(len(runs))
    for place, run in enumerate(runs):
        points = [p for p in points_of(run, "core") if isinstance(p["tasks"], dict)]
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
    value = number(found[key]) if isinstance(found, dict) else None
    return None if value is None else round(value, 5)


def core_figure(curves: Sequence[Curve]) -> go.Figure:
    """CORE of several curves, with the references that lie within reach."""
    figure = lines_figure([core_trace(each, colour(each.place)) for each in curves], rangemode="tozero")
    draw_references(figure)
    return figure


def along_figure(run: Run, curves: Sequence[Curve]) -> go.Figure:
    """CORE of a run above its loss and learning rate, with its phases and restarts."""
    figure = go.Figure(layout=PLOT)
    figure.add_traces([core_trace(each, colour(i + 3) if i else TINT) for i, each in enumerate(curves)])
    draw_references(figure)
    panels = draw_panels(figure, run, ALONG)
    if "Loss" in (panel.title for panel in panels):
        draw_validation(figure, run, "y2")
    mark_x(figure, run)
    return figure


def core_trace(each: Curve, tint: str) -> go.Scatter:
    """One curve with one standard error."""
    known = [(p, y) for p in each.points if (y := number(p["core_v2"])) is not None]
    errors = [number(p["core_v2_se"]) or 0.0 for p, _ in known]
    bars: dict[str, Any] = {"type": "data", "array": errors, "thickness": 1, "width": 3}
    if len(known) > MARKS:
        bars |= {"width": 0, "color": f"{tint}44"}
    look: dict[str, Any] = {"legendgroup": each.name, "hovertemplate": "%{y:.4f} ± %{error_y.array:.4f}"}
    return curve(known, tint, 2, "circle", name=each.name, error_y=bars, **look)


def draw_references(figure: go.Figure) -> None:
    """Lines at the published CORE v2 that lie below the curves' tops or next above them; a curve rises from
    the lower left, so their names stand at the left above their lines.
    """
    top = max((y for trace in figure.data for y in trace.y), default=0.3)
    for each in CORE_REFERENCES:
        if each.version == "v2" and each.value < 1.4 * top:
            label = {"text": f"{each.name} {each.value:.4f}", "font": {"size": 11}}
            line = {"color": NEUTRAL, "width": 1, "dash": "dash"}
            look = {"annotation": label, "annotation_position": "top left", "layer": "below"}
            figure.add_hline(each.value, line=line, **look)


def core_card(run: Run) -> str:
    """CORE over the run, above loss and learning rate; "" where no checkpoint has one."""
    curves = drawn_of(core_curves([run]))
    if not curves:
        return ""
    caption = (
        "The mean of 22 centered accuracies, bars are one standard error; the curve is v2, which has DCLM's "
        "corrected baselines. A value is to be compared with others of its version only. Drag to zoom."
    )
    figure = chart(along_figure(run, curves), f"core-{run.name}")
    return card("CORE along the run", figure + reference_table(curves), caption)


def reference_table(curves: Sequence[Curve]) -> str:
    """The newest CORE of each curve among the published ones, in ascending order, by version."""
    found: dict[str, dict[str, Any]] = {}
    for each in CORE_REFERENCES:
        found.setdefault(escape(each.name), {})[each.version] = each.value, measured(each.value, ".4f")
    for one in curves:
        where = escape(f"{where_evaluated(one.last)} ({one.name})")
        found[f"<b>{where}</b>"] = {
            v: (number(one.last[f"core_{v}"]) or 0.0, aggregate(one.last, v)) for v in VERSIONS
        }
    rows = sorted(found.items(), key=lambda item: item[1]["v1"][0])
    cells = [[name, *(of[v][1] if v in of else none("not given") for v in VERSIONS)] for name, of in rows]
    return table(("", "CORE v1", "CORE v2"), cells, "numbers wrap")


def core_tile(run: Run) -> tuple[str, str, str]:
    """The newest CORE, or why there is none."""
    curves = core_curves([run])
    for last in (c.last for c in reversed(drawn_of(curves))):
        error = measured(last["core_v2_se"], ".4f")
        return "CORE", measured(last["core_v2"], ".4f"), f"± {error}, corrected baselines (v2)"
    known = len(curves[-1].last["tasks"]) if curves else 0
    return "CORE", measured(None), f"{known} of its 22 tasks evaluated" if known else "no evaluation yet"


def aggregate(point: Point, version: str) -> str:
    value, error = number(point[f"core_{version}"]), number(point[f"core_{version}_se"])
    known = "" if error is None else f" ± {error:.4f}"
    return '<b class="missing">N/A</b>' if value is None else f"<b>{value:.4f}</b>{known}"


def drawn_of(curves: Sequence[Curve]) -> list[Curve]:
    """Those that have an aggregate."""
    return [c for c in curves if any(number(p["core_v1"]) is not None for p in c.points)]


def core_of_all(runs: Sequence[Run]) -> str:
    """CORE of several runs in one figure, and the newest values."""
    curves = core_curves(runs)
    if not curves:
        return ""
    head = ("at the last checkpoint", *(c.name for c in curves))
    rows = [[f"CORE {v}", *(aggregate(c.last, v) for c in curves)] for v in VERSIONS]
    drawn = drawn_of(curves)
    figure = chart(core_figure(drawn), "core-comparison") if drawn else ""
    return card("CORE of all runs", figure + table(head, rows))
