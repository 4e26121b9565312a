"""Write the cards of a run's training: losses, the machine, incidents, and where its figures come from."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape

from records.events import DONE, STOPPED
from records.run import Record, Run
from tools.dashboard.charts import (
    LOSS,
    MACHINE,
    TRAINING,
    Json,
    Panel,
    Points,
    curve,
    figure,
    list_sources,
    make_loss_part,
    make_rows_part,
    places_of,
    select_points,
    series,
    smooth_loss,
)
from tools.dashboard.evaluations import name_checkpoint
from tools.dashboard.page import card, colour, missing, table, utc, write_chart_card

# incidents on the page, of which a run can have thousands
LISTED = 40
# in an event's kind, also of kinds that are not known here
TROUBLE = re.compile(
    "unclean|fail|crash|kill|hang|spike|nan|finite|damage|corrupt|quaran|roll|lost|bad|stop|error|exit"
)
# fields that say where and when an event was, not what
PLACES = {
    "phase",
    "kind",
    "step",
    "attempt",
    "time",
    "x_step",
    "x_tokens",
    "x_time",
    "rank",
    "host",
}
READING = (
    "Bold: the exponential mean; faint: the logged loss; ↻: another attempt took over; ▾ above the loss: an event "
    "of the job (red: trouble). A triangle at the edge of an axis is a value beyond it, and a steep beginning may "
    'start there: "everything" shows both. Drag to zoom, double-click to reset; a click in a legend hides a curve, '
    "a double click isolates it."
)


def write_training_card(run: Run) -> str:
    parts = [make_loss_part(run), *(make_rows_part(run, panel) for panel in TRAINING)]
    caption = f"{count(len(run.rows), 'logged step')}. {READING}"
    if again := sum(len(segment.rows) for segment in run.segments if not segment.is_counted):
        caption += f" Dotted: {count(again, 'step')} that a restart or roll-back repeated."
    content = figure(parts, run, events=make_event_marks(run))
    return write_chart_card("Training", content, f"training-{run.name}", caption)


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def write_sources_card(run: Run) -> str:
    trained, validated = dict[str, Points](), dict[str, Points]()
    for name in list_sources(run):
        means = [
            point for phase in run.phases for point in smooth_loss(run, run.rows_of(phase), name)
        ]
        trained[name] = [(row, mean) for row, mean in means if mean is not None]
        validated[name] = select_points(run.rows, "valid_loss_by_source", name)
    look: Json = {"height": 200, "form": ".4f", "zero": False, "log": True}
    held_out = Panel("Validation loss by source", "the same windows each time", **look)
    parts = [
        (Panel("Training loss by source", "nats per token, smoothed", **look), series(trained)),
        (held_out, series(validated, symbol="diamond")),
    ]
    return write_chart_card("Loss by source", figure(parts, run), f"sources-{run.name}")


def write_positions_card(run: Run) -> str:
    """Write what more context is worth."""
    rows = [row for row in run.rows if row["valid_loss_by_position"]]
    if not rows:
        return ""
    # the newest validation beside the first one of its phase
    last, first = rows[-1], next(row for row in rows if row["phase"] == rows[-1]["phase"])
    places, curves, octaves = list_sources(run), list[Json](), set[int]()
    for row, look in ((last, {"symbol": "circle"}), (first, {"dash": "dot", "opacity": 0.6})):
        for name, losses in row["valid_loss_by_position"].items():
            points: Points = [({}, loss) for loss in losses.values()]
            by_octave = curve(name, points, colour(places.index(name)), **look)
            curves.append({**by_octave, "x": {"first position of an octave, tokens": list(losses)}})
            # the axis is that of the newest validation
            octaves |= set(map(int, losses)) if row is last else set()
    panel = Panel(
        "Validation loss by position", "nats per token", height=280, form=".4f", zero=False
    )
    caption = (
        "By how many tokens of its document (or window) a token has before it. Bold: step "
        f"{last['step']:,}; dotted: step {first['step']:,}. Longer documents are other text: compare a source "
        "with its own dotted curve."
    )
    content = figure([(panel, curves)], categories=list(map(str, sorted(octaves))))
    return write_chart_card("Loss by position", content, f"positions-{run.name}", caption)


def write_machine_card(run: Run) -> str:
    content = figure([make_rows_part(run, panel) for panel in MACHINE], run)
    caption = (
        "Waiting and memory are rank 0's; checkpoint seconds stand in the first row after the save."
    )
    return write_chart_card("Statistics and machine", content, f"machine-{run.name}", caption)


def group_events(run: Run) -> list[list[Record]]:
    """Group the events of all ranks that are one."""
    groups: dict[tuple[str, ...], list[Record]] = {}
    for event in run.events:
        key = tuple(str(event[name]) for name in ("phase", "attempt", "x_step", "kind", "text"))
        groups.setdefault(key, []).append(event)
    return list(groups.values())


def is_trouble(event: Record) -> bool:
    """Tell whether an event is trouble, by its kind or exit code."""
    return bool(TROUBLE.search(str(event["kind"]).lower())) or event["code"] not in (
        None,
        DONE,
        STOPPED,
    )


def describe_event(event: Record) -> str:
    """Return the text or reason of an event, else its other facts."""
    facts = {key: value for key, value in event.items() if key not in PLACES and value is not None}
    listed = ", ".join(
        f"{key} {v if isinstance(v, str) else json.dumps(v)}" for key, v in facts.items()
    )
    return str(event["text"] or event["reason"] or listed)


def make_event_marks(run: Run) -> list[Json]:
    """Make marks above the loss: faults, roll-backs and starts."""
    marks = []
    for first, *more in group_events(run):
        if first["x_step"] is not None:
            times = f", {len(more) + 1} times" if more else ""
            text = f"{first['kind']}, step {first['x_step']:,.0f}{times}<br>{escape(describe_event(first)[:300])}"
            marks.append({"x": places_of([first]), "text": text, "trouble": is_trouble(first)})
    return marks


def write_incidents_card(run: Run) -> str:
    rows = []
    for first, *more in reversed(group_events(run)):
        kind = str(first["kind"] or "event").removeprefix("supervisor_").replace("_", " ")
        times = f" <small>{len(more) + 1} times</small>" if more else ""
        hosts = ", ".join(
            sorted({str(event["host"]) for event in (first, *more) if event["host"]})[:3]
        )
        name = (missing if is_trouble(first) else escape)(kind) + times
        where = name_checkpoint(first) if first["step"] is not None else str(first["phase"])
        rows.append([utc(first["time"]), name, *map(escape, (where, hosts, describe_event(first)))])
    if not rows:
        return ""
    head = ("time (UTC)", "event", "where", "host", "what")
    caption = f"The newest {LISTED} of {len(rows):,}." if len(rows) > LISTED else ""
    return card("Incidents", table(head, rows[:LISTED], "events"), caption)


def write_overlay_card(runs: Sequence[Run]) -> str:
    curves = []
    for index, run in enumerate(runs):
        look: Json = {"group": run.name, "width": 1.5}
        tint, rows = colour(index), run.rows
        curves.append(curve(run.name, smooth_loss(run, rows), tint, **look))
        name = f"{run.name}, validation"
        curves.append(
            curve(name, select_points(rows, "valid_loss"), tint, symbol="diamond", **look)
        )
    return write_chart_card("Loss of all runs, smoothed", figure([(LOSS, curves)]), "comparison")
