"""The header of a run, and the cards of its training: losses, machine, time and cost, incidents, provenance."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from statistics import median

from laneformer import LaneformerConfig
from records.events import DONE, STOPPED
from records.page import (
    card,
    chart,
    code,
    colour,
    fold,
    measured,
    missing,
    none,
    short,
    table,
    tiles,
    utc,
)
from records.run import Record, Run
from records.usage import RECENT, duration, money, usage_of, whole
from tools.dashboard.charts import (
    LOSS,
    MACHINE,
    TRAINING,
    Json,
    Panel,
    Points,
    curve,
    dig,
    figure,
    loss_part,
    places_of,
    rows_part,
    series,
    smoothed,
    sources_of,
)
from tools.dashboard.evaluations import core_tile, where_evaluated

RISE = 1.0  # nats above the lowest loss of a phase, from which a run has diverged
LISTED = 40  # incidents
TROUBLE = re.compile(
    "unclean|fail|crash|kill|hang|spike|nan|finite|damage|corrupt|quaran|roll|lost|bad|stop|error|exit"
)
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
}  # of an event


def planned_steps(run: Run) -> dict[str, int | None]:
    """Steps that each phase is configured for, in the order of the run; None where no config says it."""
    return {phase: dig(run.configs, phase, "training", "steps") for phase in [*run.phases, *run.configs]}


def divergence(run: Run) -> str:
    """How the loss of the newest phase has diverged, or ""."""
    rows = run.rows_of(run.kept_rows[-1]["phase"])
    if rows[-1]["loss"] is None and "averaged" not in rows[-1]:
        return "the loss is not a finite number"
    means = [mean for _, mean in smoothed(run, rows) if mean is not None]
    newest = [row["loss"] for row in rows[-16:] if row["loss"] is not None]
    if not newest:
        return ""
    lowest, now = min(means), median(newest)
    risen = now - lowest > max(RISE, (means[0] - lowest) / 2)
    return f"the loss rose from {lowest:.2f} to {now:.2f}" if risen else ""


def state(run: Run, now: float) -> tuple[str, str]:
    """(CSS class, words) for where the run stands, from its last logged rows and its configs."""
    if not run.kept_rows:
        return "idle", "no step logged yet"
    row, planned = run.kept_rows[-1], planned_steps(run)
    steps = planned[row["phase"]]
    where = f"{row['phase']}, step {row['step']:,}" + (f" of {steps:,}" if steps else "")
    if reason := divergence(run):
        return "bad", f"diverged: {where}: {reason}"
    if steps == row["step"] and row["phase"] == list(planned)[-1]:
        return "done", f"finished: {where}"
    if row["time"] is None:
        return "idle", where
    if now - row["time"] < 600:  # seconds
        return "live", f"training: {where}"
    return "idle", f"quiet since {utc(row['time'])} UTC: {where}"


def header(run: Run, now: float) -> str:
    kind, words = state(run, now)
    facts = model_facts(run) + [f"git {start['code_version']}" for start in run.attempts[-1:]]
    if run.kept_rows and run.kept_rows[-1]["x_tokens"] is not None:
        facts.append(f"{short(run.kept_rows[-1]['x_tokens'])} tokens")
    bars = ""
    for index, (phase, steps) in enumerate(planned_steps(run).items()):
        done = max((row["step"] for row in run.rows_of(phase)), default=0)
        label = f"{escape(phase)} <b>{done:,}</b>" + (f" / {steps:,}" if steps else "")
        filled = bar(done / steps if steps else 1, colour(index))
        bars += f'<div style="flex:{steps or done or 1}">{filled}<small>{label}</small></div>'
    note = f'<p class="note">{escape(run.note)}</p>' if run.note else ""
    line = "".join(f"<span>{escape(fact)}</span>" for fact in facts)
    title = f'<h1>{escape(run.name)}</h1><span class="state {kind}">{escape(words)}</span>'
    progress = f'<p class="facts">{line}</p><div class="progress">{bars}</div>'
    return f'<header><div class="title">{title}</div>{note}{progress}</header>'


def bar(share: float, tint: str) -> str:
    """A bar of which `share`, at most 1, is filled."""
    return f'<div class="bar"><i style="width:{100 * min(share, 1):.2f}%;background:{tint}"></i></div>'


def model_facts(run: Run) -> list[str]:
    flavors = [dig(config, "model", "flavor") for config in run.configs.values()]
    name = f"Laneformer {next(filter(None, flavors), '')}".strip()
    if not run.model:
        return [name]
    try:
        model = LaneformerConfig.from_dict(run.model)
    except (TypeError, ValueError) as error:
        run.problems.append(f"model.json does not describe a Laneformer: {error}")
        return [name]
    size = f"{model.num_hidden_layers} layers × {model.hidden_size}"
    lanes = f"{model.num_lanes} lanes, delay {model.broadcast_delay}"
    return [name, f"{short(model.parameter_count()['total'])} parameters", size, lanes]


def tiles_of(run: Run) -> str:
    """The newest figures; what has none takes no room."""
    bits, decode = ([Record(), *run.evals_of(kind)][-1] for kind in ("bits_per_byte", "decode_speed"))
    share = measured(decode["percent_of_probe"], ".0f", " % of the memory's limit")
    entries = [
        core_tile(run),
        loss_tile(run),
        (
            "bits per byte",
            measured(bits["bits_per_byte"], ".4f"),
            f"held-out text, {escape(where_evaluated(bits))}",
        ),
        ("training speed", short(recent(run, "tokens_per_s")), "tokens per second, median"),
        *usage_tiles(run),
        ("MFU", measured(recent(run, "mfu"), ".1f", " %"), "of the hardware's peak FLOP/s, median"),
        ("decode", measured(decode["tokens_per_s"], ".4g"), f"tokens per second at batch 1, {share}"),
    ]
    return tiles(entry for entry in entries if 'class="none"' not in entry[1])


def loss_tile(run: Run) -> tuple[str, str, str]:
    """The smoothed loss of the newest phase, beside where this phase began: another phase has another text."""
    for phase in reversed(run.phases):
        points = smoothed(run, run.rows_of(phase))
        known = [(row, mean) for row, mean in points if mean is not None]
        if known:
            (first, began), (_, last) = known[0], known[-1]
            return (
                "loss",
                f"{last:.4f}",
                f"smoothed; {escape(phase)} began with {began:.3f} at step {first['step']:,}",
            )
    return "loss", none(), ""


def recent(run: Run, key: str) -> float | None:
    """The median of the last rows, which a restart or a slow node does not move."""
    known = [row[key] for row in run.kept_rows[-RECENT:] if row[key] is not None]
    return median(known) if known else None


def usage_tiles(run: Run) -> list[tuple[str, str, str]]:
    usage = whole(usage_of(run))
    if not run.kept_rows or run.kept_rows[-1]["time"] is None:
        return []
    left = usage.gpu_hours_left
    total = "so far" if not left else f"of {short(usage.gpu_hours + left)}"
    prices: Json = next((config.get("metrics", {}) for config in reversed(run.configs.values())), {})
    note = ", ".join(filter(None, (total, money(usage.gpu_hours, prices))))
    shown = ("device-hours", short(usage.gpu_hours), note)
    if usage.finish_time is None:
        return [shown]
    left_s = usage.finish_time - run.kept_rows[-1]["time"]
    if left_s <= 0:
        return [("time left", "done", "training.steps reached"), shown]
    return [("time left", duration(left_s), f"until {utc(usage.finish_time)} UTC"), shown]


def training_card(run: Run) -> str:
    drawn = figure(
        [loss_part(run), *(rows_part(run, panel) for panel in TRAINING)], run, events=events_of(run)
    )
    if not drawn:
        return ""
    caption = (
        f"{count(len(run.kept_rows), 'logged step')}. Bold: the exponential mean; faint: the logged loss; "
        "↻: another attempt took over; ▾: an event of the job (red: trouble); ▴: a figure above the axis. "
        "Drag to zoom, double-click to reset; a click in a legend hides a curve, a double click isolates it."
    )
    again = sum(len(segment.rows) for segment in run.segments if not segment.kept)
    caption += f" Dotted: {count(again, 'step')} that a restart or roll-back repeated." if again else ""
    return card("Training", chart(drawn, f"training-{run.name}"), caption)


def count(number_of: int, thing: str) -> str:
    return f"{number_of:,} {thing}{'' if number_of == 1 else 's'}"


def sources_card(run: Run) -> str:
    """Loss by source, in training and on held-out windows, and the validation loss by position."""
    rows, places = run.kept_rows, sources_of(run)
    means: dict[str, Points] = {}
    for name in places:
        for phase in run.phases:
            points = smoothed(run, run.rows_of(phase), name)
            means[name] = [*means.get(name, ()), *(each for each in points if each[1] is not None)]
    validated = {
        name: [(row, loss) for row in rows if (loss := dig(row, "valid_loss_by_source", name)) is not None]
        for name in places
    }
    look: Json = {"height": 200, "form": ".4f", "zero": False, "log": True}
    drawn = figure(
        [
            (Panel("Training loss by source", "nats per token, smoothed", **look), series(means, places)),
            (Panel("Validation loss by source", "the same windows each time", **look),
             series(validated, places, symbol="diamond")),
        ],
        run,
    )  # fmt: skip
    return card("Loss by source", chart(drawn, f"sources-{run.name}")) if drawn else ""


def positions_card(run: Run) -> str:
    """What more context is worth: the newest validation by position, beside the first one of its phase."""
    rows = [row for row in run.kept_rows if row["valid_loss_by_position"]]
    if not rows:
        return ""
    last, first = rows[-1], next(row for row in rows if row["phase"] == rows[-1]["phase"])
    places, curves = sources_of(run), list[Json]()
    for row, look in ((last, {"symbol": "circle"}), (first, {"dash": "dot", "opacity": 0.6})):
        for name, losses in row["valid_loss_by_position"].items():
            points: Points = [({}, loss) for loss in losses.values()]
            drawn = curve(name, points, colour(places.index(name)), **look)
            curves.append({**drawn, "x": {"first position of an octave, tokens": list(losses)}})
    panel = Panel("Validation loss by position", "nats per token", height=280, form=".4f", zero=False)
    caption = (
        "By how many tokens of its document (or window) a token has before it. Bold: step "
        f"{last['step']:,}; dotted: step {first['step']:,}. Longer documents are other text: compare a source "
        "with its own dotted curve."
    )
    known = sorted({int(octave) for losses in last["valid_loss_by_position"].values() for octave in losses})
    spec = figure([(panel, curves)], categories=list(map(str, known)))
    return card("Loss by position", chart(spec, f"positions-{run.name}"), caption) if spec else ""


def machine_card(run: Run) -> str:
    drawn = figure([rows_part(run, panel) for panel in MACHINE], run)
    caption = "Waiting and memory are rank 0's; checkpoint seconds stand in the first row after the save."
    return card("Statistics and machine", chart(drawn, f"machine-{run.name}"), caption) if drawn else ""


def event_groups(run: Run) -> list[list[Record]]:
    """Events of all ranks that are one: of the same kind and text at the same place of the same attempt."""
    groups: dict[tuple[str, ...], list[Record]] = {}
    for event in run.events:
        key = tuple(str(event[name]) for name in ("phase", "attempt", "x_step", "kind", "text"))
        groups.setdefault(key, []).append(event)
    return list(groups.values())


def is_trouble(event: Record) -> bool:
    """Whether its kind sounds like trouble, or it has an exit code that no run should end with."""
    return bool(TROUBLE.search(str(event["kind"]).lower())) or event["code"] not in (None, DONE, STOPPED)


def text_of(event: Record) -> str:
    """The text or reason of an event, else its other facts."""
    facts = {key: value for key, value in event.items() if key not in PLACES and value is not None}
    listed = ", ".join(f"{key} {v if isinstance(v, str) else json.dumps(v)}" for key, v in facts.items())
    return str(event["text"] or event["reason"] or listed)


def events_of(run: Run) -> list[Json]:
    """Faults, roll-backs and starts, as marks above the loss."""
    marks = []
    for first, *more in event_groups(run):
        if first["x_step"] is not None:
            times = f", {len(more) + 1} times" if more else ""
            text = f"{first['kind']}, step {first['x_step']:,.0f}{times}<br>{escape(text_of(first)[:300])}"
            marks.append({"x": places_of([first]), "text": text, "trouble": is_trouble(first)})
    return marks


def incidents_card(run: Run) -> str:
    """The events of the run, the newest first; trouble is red."""
    rows = []
    for group in reversed(event_groups(run)):
        first = group[0]
        kind = str(first["kind"] or "event").removeprefix("supervisor_").replace("_", " ")
        many = f" <small>{len(group)} times</small>" if len(group) > 1 else ""
        hosts = ", ".join(sorted({str(event["host"]) for event in group if event["host"]})[:3])
        name = (missing if is_trouble(first) else escape)(kind) + many
        where = escape(where_evaluated(first)) if first["step"] is not None else escape(str(first["phase"]))
        rows.append([utc(first["time"]), name, where, escape(hosts), escape(text_of(first))])
    if not rows:
        return ""
    head = ("time (UTC)", "event", "where", "host", "what")
    caption = f"The newest {LISTED} of {len(rows):,}." if len(rows) > LISTED else ""
    return card("Incidents", table(head, rows[:LISTED], "events"), caption)


def provenance_card(run: Run) -> str:
    """Where the figures come from: data, tokenizer and code by hash, the starts of the job, settings by phase."""
    sources: tuple[tuple[str, Sequence[Record], str], ...] = (
        ("tokenizer", run.evals, "tokenizer_sha256"),
        ("evaluation data", run.evals, "data_sha256"),
        ("code of evaluations", run.evals, "code_version"),
        ("mixture", run.attempts, "mixture_fingerprint"),
        ("code of training", run.attempts, "code_version"),
        ("torch", run.attempts, "torch"),
        ("ranks", run.attempts, "world_size"),
    )
    facts = {title: [str(each[key]) for each in records if each[key]] for title, records, key in sources}
    for phase, lineage in run.lineages.items():
        facts |= {f"{key} of {phase}": [str(value)] for key, value in lineage.items() if value is not None}
    rows = [
        [escape(name), " ".join(map(code, dict.fromkeys(values)))] for name, values in facts.items() if values
    ]
    body = table(("identity", "sha256 or version"), rows, "wrap") if rows else ""
    settings = [
        {
            f"{section}.{key}": values[key]
            for section, values in config.items()
            if isinstance(values, dict)
            for key in values
        }
        for config in run.configs.values()
    ]
    names = sorted({name for of_phase in settings for name in of_phase})
    cells = [[escape(name), *(code(of_phase.get(name)) for of_phase in settings)] for name in names]
    body += fold("Settings of the job by phase", table(("setting", *run.configs), cells)) if cells else ""
    return card("Provenance", body) if body else ""


def overlay_card(runs: Sequence[Run]) -> str:
    """The smoothed losses of several runs over each other, and their validation losses."""
    curves = []
    for index, run in enumerate(runs):
        rows = run.kept_rows
        curves.append(curve(run.name, smoothed(run, rows), colour(index), width=1.5))
        validated = [(row, row["valid_loss"]) for row in rows if row["valid_loss"] is not None]
        look: Json = {"group": run.name, "width": 1.5, "symbol": "diamond"}
        curves.append(curve(f"{run.name}, validation", validated, colour(index), **look))
    drawn = figure([(LOSS, curves)])
    return card("Loss of all runs, smoothed", chart(drawn, "comparison")) if drawn else ""
