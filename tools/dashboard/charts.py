"""Make charts as data, which page.js draws: panels over one axis of x, and the curves in each of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from records.run import Run, number
from tools.dashboard.page import colour, dash

# a reader's choice: key of a row
AXES = {"tokens": "x_tokens", "steps": "x_step", "time": "x_time"}
# points of a curve: as many as a wide screen has columns
MOST = 2000
VALIDATION = "#a03fb8"
Json = dict[str, Any]
Points = Sequence[tuple[Json, Any]]
Interval = tuple[float, float]


class Panel(NamedTuple):
    """One of several plots over the same axis of x."""

    title: str
    unit: str = ""
    # of a row, where the panel is a figure of logged rows
    key: str = ""
    # pixels
    height: int = 90
    # of its figures, as d3 writes formats
    form: str = ".3g"
    # whether the axis begins at 0
    zero: bool = True
    # whether a reader may choose a logarithmic axis
    log: bool = False


LOSS = Panel("Loss", "nats per token", "loss", 344, ".4f", zero=False, log=True)
RATE = Panel("Learning rate", "", "lr", 72)
TRAINING = (
    RATE,
    Panel("Gradient norm", "before clipping", "grad_norm", 96, log=True),
    Panel("Tokens per second", "all devices", "tokens_per_s", 104, ",.0f"),
)
MACHINE = (
    Panel("z-score of the loss", "robust deviations", "loss_z", form=".2f"),
    Panel("z-score of the gradient norm", "robust deviations", "grad_norm_z", form=".2f"),
    Panel("z-loss", "mean of (log Z)²", "z_loss"),
    Panel("Largest logit", "of the batch", "max_logit"),
    Panel("Largest gradient norm of a layer", "before clipping", "layer_peak", log=True),
    Panel("Tokens per second and device", "", "tokens_per_s_per_device", form=",.0f"),
    Panel("MFU", "% of the peak", "mfu", form=".1f"),
    Panel("Waiting for data", "% of the time", "data_percent", form=".2f"),
    Panel("Waiting for checkpoints", "s", "checkpoint_s", form=".2f"),
    Panel("Peak memory", "GiB", "memory_gib", form=".2f"),
)


def dig(value: Any, *path: str) -> Any:
    """Return what stands at a path of nested objects; None where anything on the way is missing."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def list_items(value: Any) -> list[tuple[str, Any]]:
    """Return the names and values of a JSON object; [] for any other value."""
    return list(value.items()) if isinstance(value, dict) else []


def select_points(records: Sequence[Json], *path: str) -> Points:
    """Return the records that have a number at a path."""
    values = [(record, dig(record, *path)) for record in records]
    return [(record, value) for record, value in values if number(value) is not None]


def thin(points: Points) -> Points:
    """Keep at most MOST points."""
    if len(points) <= MOST:
        return points
    width = math.ceil(2 * len(points) / (MOST - 2))
    chosen = {0, len(points) - 1}
    for start in range(0, len(points), width):
        # the lowest and the highest of neighbours, so that no spike is lost
        bucket = range(start, min(start + width, len(points)))
        measured = [i for i in bucket if points[i][1] is not None]
        # a bucket without any figure stays a gap
        chosen |= (
            {choose(measured, key=lambda i: points[i][1]) for choose in (min, max)}
            if measured
            else {start}
        )
    return [points[i] for i in sorted(chosen)]


def smooth(values: Iterable[float | None], half_life: float) -> Iterator[float | None]:
    """Yield the exponential mean up to each value, None where there is none."""
    total = weight = 0.0
    for count, value in enumerate(values):
        # the half-life grows to its full length: a mean over a fixed span would lie far above the
        # steep beginning
        keep = 0.5 ** (1 / max(1.0, min(half_life, count / 25)))
        if value is not None:
            mean = total / weight if weight else value
            # one value far outside must not carry the mean away for a half-life
            bounded = min(max(value, mean / 2), 2 * mean)
            total, weight = keep * total + bounded, keep * weight + 1
        yield None if value is None else total / weight


def places_of(rows: Sequence[Json]) -> Json:
    """Return where rows stand on every axis; times in milliseconds, as in JavaScript."""
    places = {axis: [number(row.get(key)) for row in rows] for axis, key in AXES.items()}
    return places | {
        "time": [None if second is None else 1000 * second for second in places["time"]]
    }


def curve(
    name: str, points: Points, tint: str, ends: Sequence[Interval | None] = (), **look: Any
) -> Json:
    """Make one curve.

    Args:
        ends: intervals of 95 %.
        look: group in the legend, width, dash, opacity, symbol.
    """
    measured = [(row, number(value)) for row, value in points]
    # intervals are by position in `points`, so a curve that has them keeps all
    chosen = measured if ends else thin(measured)
    values = [None if value is None else float(f"{value:.6g}") for _, value in chosen]
    places = places_of([row for row, _ in chosen])
    line = {"name": name, "group": name, "colour": tint, "x": places, "y": values}
    return line | ({"ends": ends} if any(ends) else {}) | look


def series(points_by_source: Mapping[str, Points], **look: Any) -> list[Json]:
    # in colours that are the same in every chart of all sources
    return [
        curve(name, points, colour(place), dash=dash(place), **look)
        for place, (name, points) in enumerate(points_by_source.items())
    ]


def figure(
    parts: Iterable[tuple[Panel, list[Json]]], run: Run | None = None, columns: int = 1, **more: Any
) -> Json | None:
    """Make a chart of the panels and curves that have a figure; None if there are none."""
    panels, curves = list[Json](), list[Json]()
    for panel, lines in parts:
        filled = [line for line in lines if any(value is not None for value in line["y"])]
        if filled:
            curves += [{**line, "panel": len(panels)} for line in filled]
            panels.append(panel._asdict())
    if not curves:
        return None
    places = {
        axis: [place for each in curves for place in each["x"][axis]] for axis in curves[0]["x"]
    }
    axes = [axis for axis in places if any(place is not None for place in places[axis])]
    # the first is shown: one on which every point has its place
    axes = sorted(axes or [*places][-1:], key=lambda axis: None in places[axis])
    chart = {"panels": panels, "curves": curves, "axes": axes, "columns": columns, **more}
    return chart | (make_marks(run) if run else {})


def make_marks(run: Run) -> Json:
    """Mark the phases of a run, and where an attempt took over, on every axis."""
    phases = []
    for index, phase in enumerate(run.phases):
        if rows := run.rows_of(phase):
            phases.append(
                {"name": phase, "colour": colour(index), "x": places_of([rows[0], rows[-1]])}
            )
    pairs = [(a.rows[-1], b.rows[0]) for a, b in pairwise(run.segments) if a.phase == b.phase]
    # without a new attempt, steps that go back are a roll-back
    firsts = [
        row
        for last, row in pairs
        if row["attempt"] != last["attempt"] or row["step"] <= last["step"]
    ]
    labels = [f"↻{row['attempt']}" for row in firsts]
    return {"phases": phases, "restarts": {"labels": labels, "x": places_of(firsts)}}


def make_rows_part(run: Run, panel: Panel, **look: Any) -> tuple[Panel, list[Json]]:
    """Make the panel of a figure of logged rows, by phase."""
    return panel, [
        curve(
            panel.title,
            [(row, row.get(panel.key)) for row in run.rows_of(phase)],
            colour(i),
            group=phase,
            width=1.2,
            **look,
        )
        for i, phase in enumerate(run.phases)
    ]


def smooth_loss(run: Run, rows: Sequence[Json], source: str = "") -> Points:
    """Smooth the loss of logged rows, or of a source in them."""
    values = [number(dig(row, "loss_by_source", source) if source else row["loss"]) for row in rows]
    # half-life: a 150th of the run
    return list(zip(rows, smooth(values, len(run.rows) / 150), strict=True))


def make_loss_part(run: Run, panel: Panel = LOSS, logged: bool = True) -> tuple[Panel, list[Json]]:
    """Make the panel of the loss: smoothed, logged, repeated, and in validation."""
    curves = make_rows_part(run, panel, opacity=0.3)[1] if logged else []
    for segment in run.segments if logged else ():
        if not segment.is_counted:
            again = [(row, row["loss"]) for row in segment.rows]
            look: Json = {"group": "repeated later", "dash": "dot", "opacity": 0.6, "width": 1.2}
            curves.append(
                curve("repeated later", again, colour(run.phases.index(segment.phase)), **look)
            )
    for index, phase in enumerate(run.phases):
        # one mean for each phase: another mixture has another loss
        points = smooth_loss(run, run.rows_of(phase))
        curves.append(curve("Loss, smoothed", points, colour(index), group=phase, width=2.4))
        validated = select_points(run.rows_of(phase), "valid_loss")
        curves.append(curve("validation loss", validated, VALIDATION, width=1.4, symbol="diamond"))
    return panel, curves


def list_sources(run: Run) -> list[str]:
    """List all sources of training and of held-out text."""
    keys = ("loss_by_source", "valid_loss_by_source", "valid_loss_by_position")
    by_source = [row.get(key) for row in run.rows for key in keys]
    by_source += [record["sources"] for record in run.evals_of("bits_per_byte")]
    # the place of a source is its colour on the whole page
    return list(dict.fromkeys(name for table in by_source for name, _ in list_items(table)))
