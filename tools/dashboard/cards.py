"""The cards of one run: header and tiles, training charts, loss by source, bits per
byte, decode speed, provenance.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from statistics import median
from typing import Any

from laneformer import LaneformerConfig
from records.page import (
    card,
    chart,
    code,
    colour,
    fold,
    measured,
    none,
    percent,
    short,
    table,
    tiles,
    utc,
)
from records.run import Record, Run, number
from records.usage import RECENT
from tools.dashboard import figures, panels
from tools.dashboard.core import core_tile, points_of, where_evaluated
from tools.dashboard.health import usage_tiles
from tools.dashboard.rows import width_of


def planned_steps(run: Run) -> dict[str, int | None]:
    """Steps that each phase is configured for, in the order of the run; None where no config says it."""
    phases = list(dict.fromkeys([*run.phases, *run.configs]))
    return {phase: run.configs.get(phase, {}).get("training", {}).get("steps") for phase in phases}


def state(run: Run, now: float) -> tuple[str, str]:
    """(CSS class, words) for where the run stands, from its last logged step and its configs."""
    if not run.kept_rows:
        return "idle", "no step logged yet"
    row, planned = run.kept_rows[-1], planned_steps(run)
    steps = planned[row["phase"]]
    where = f"{row['phase']}, step {row['step']:,}" + (f" of {steps:,}" if steps else "")
    if steps == row["step"] and row["phase"] == list(planned)[-1]:
        return "done", f"finished: {where}"
    if row["time"] is None:
        return "idle", where
    age_s = max(0.0, now - row["time"])
    return (
        ("live", f"training: {where}")
        if age_s < 600
        else ("idle", f"quiet since {utc(row['time'])} UTC: {where}")
    )


def header(run: Run, now: float) -> str:
    kind, words = state(run, now)
    versions = [str(r["code_version"]) for r in (*run.evals, *run.attempts) if r["code_version"]]
    facts = [*model_facts(run), *(f"git {version}" for version in list(dict.fromkeys(versions))[-1:])]
    if run.kept_rows and run.kept_rows[-1]["x_tokens"] is not None:
        facts.append(f"{short(run.kept_rows[-1]['x_tokens'])} tokens")
    bars = ""
    for index, (phase, steps) in enumerate(planned_steps(run).items()):
        done = max((row["step"] for row in run.rows_of(phase)), default=0)
        label = f"{escape(phase)} <b>{done:,}</b>" + (f" / {steps:,}" if steps else "")
        filled = bar(done / steps if steps else 1, colour(index))
        bars += f'<div style="flex:{steps or done or 1}">{filled}<small>{label}</small></div>'
    title = f'<h1>{escape(run.name)}</h1><span class="state {kind}">{escape(words)}</span>'
    line = "".join(f"<span>{escape(fact)}</span>" for fact in facts)
    note = f'<p class="note">{escape(run.note)}</p>' if run.note else ""
    below = f'{note}<p class="facts">{line}</p><div class="progress">{bars}</div>'
    return f'<header><div class="title">{title}</div>{below}</header>'


def bar(share: float, tint: str) -> str:
    """A bar of which `share`, at most 1, is filled."""
    return f'<div class="bar"><i style="width:{100 * min(share, 1):.2f}%;background:{tint}"></i></div>'


def model_facts(run: Run) -> list[str]:
    flavor = next(
        (c["model"]["flavor"] for c in run.configs.values() if c.get("model", {}).get("flavor")), ""
    )
    name = f"Laneformer {flavor}".strip()
    if not run.model:
        return [name]
    try:
        model = LaneformerConfig.from_dict(run.model)
    except (TypeError, ValueError) as error:
        told = f"model.json does not describe a Laneformer: {error}"
        run.problems += [told] if told not in run.problems else []
        return [name]
    total, lanes = model.parameter_count()["total"], f"{model.num_lanes} lanes, delay {model.broadcast_delay}"
    return [
        name,
        f"{short(total)} parameters",
        f"{model.num_hidden_layers} layers × {model.hidden_size}",
        lanes,
    ]


def tiles_of(run: Run) -> str:
    losses = [r for r in run.kept_rows if r["loss"] is not None]
    bits, decode = ([Record(), *run.evals_of(kind)][-1] for kind in ("bits_per_byte", "decode_speed"))
    first = f"from {losses[0]['loss']:.3f} at step {losses[0]['x_step']:,.0f}" if losses else "nothing logged"
    speed, used, mfu = (
        number(decode["tokens_per_s"]),
        number(decode["percent_of_probe"]),
        recent(run, "mfu"),
    )
    of_decode = "tokens per second at batch 1"
    if used:  # beyond what memory gives only where it is not read
        of_decode += (
            f", {used:.0f} % of the read bandwidth" if used <= 100 else ", from weights in the caches"
        )
    return tiles((
        core_tile(run),
        ("loss", measured(losses[-1]["loss"] if losses else None, ".4f"), first),
        ("bits per byte", measured(bits["bits_per_byte"], ".4f"), "held-out text, all sources"),
        ("training speed", short(recent(run, "tokens_per_s")), "tokens per second, median"),
        *usage_tiles(run),
        ("MFU", measured(mfu, ".1f", " %"), "of the hardware's peak FLOP/s, median"),
        ("decode", measured(speed, ",.0f" if (speed or 0) >= 100 else ".3g"), of_decode),
    ))  # fmt: skip


def recent(run: Run, key: str) -> float | None:
    """The median of the last rows, which a restart or a slow node does not move."""
    known = [row[key] for row in run.kept_rows[-RECENT:] if row[key] is not None]
    return median(known) if known else None


def training_card(run: Run) -> str:
    if len(panels.not_measured(run, panels.TRAINING)) == len(panels.TRAINING):
        return card("Training", none("not measured: metrics.jsonl has no figures yet"))
    return card("Training", chart(panels.training_figure(run), f"training-{run.name}"), training_caption(run))


def machine_card(run: Run) -> str:
    absent = panels.not_measured(run, panels.MACHINE)
    if not run.kept_rows or len(absent) == len(panels.MACHINE):
        return ""
    caption = "Waiting and memory are rank 0's; checkpoint seconds stand in the first row after the save."
    caption += f" Not measured: {escape(', '.join(absent))}." if absent else ""
    drawn = [panel.title for panel in panels.MACHINE if panel.title not in absent]
    figure = chart(panels.machine_figure(run), f"machine-{run.name}") + f'<p class="caption">{caption}</p>'
    return card("Statistics and machine", fold(escape(", ".join(drawn)), figure))


def training_caption(run: Run) -> str:
    logged, again = (
        sum(s.logged for s in run.segments if s.kept in which) for which in ((True, False), (False,))
    )
    absent = panels.not_measured(run, panels.TRAINING)
    width = width_of(run)
    groups = (
        f"drawn from groups of {width} neighbouring logged steps with the extremes of each"
        if width > 1
        else "all drawn"
    )
    text = (
        f"{logged:,} logged steps, {groups}. "
        f"Bold: the exponential mean (half-life {run.half_life} logged steps); faint: the logged value; dotted: "
        f"{again:,} steps that a restart or roll-back repeated and that no longer count. ↻ marks where an attempt took "
        "over, ▾ an event of the job. The loss axis leaves out the steepest start and the tips of spikes. Drag to zoom "
        "either axis, double-click to reset; a click in a legend hides, a double click isolates."
    )
    return text + (f" Not measured: {escape(', '.join(absent))}." if absent else "")


def sources_card(run: Run) -> str:
    """What each source contributed, and how well it is predicted, in training and on held-out windows."""
    if not any(row["loss_by_source"] for row in run.kept_rows):
        return ""
    counts, losses, valid_losses = Record(), Record(), Record()  # the last ones of each source
    for row in run.kept_rows:
        counts |= row["tokens_by_source"]
        losses |= row["loss_by_source"]
        valid_losses |= row["valid_loss_by_source"]
    total = sum(number(count) or 0.0 for count in counts.values()) or 1.0
    rows = []
    for name in figures.sources_of(run):
        count = number(counts[name])
        logged = [measured(by_source[name], ".4f") for by_source in (losses, valid_losses)]
        rows.append([escape(name), short(count), percent(count and count / total), *logged])
    head = ("source", "tokens seen", "share", "last logged loss", "last validation loss")
    caption = "Lines: smoothed loss of the training batches. Diamonds: the same held-out windows each time."
    figure = chart(figures.sources_figure(run), f"sources-{run.name}")
    return card("Loss by source", figure + table(head, rows, "numbers"), caption)


def positions_card(run: Run) -> str:
    """What more context is worth: the newest validation by position, beside the first one of its phase."""
    rows = [row for row in run.kept_rows if row["valid_loss_by_position"]]
    if not rows:
        return ""
    first = next(row for row in rows if row["phase"] == rows[-1]["phase"])
    caption = (
        "Validation loss by how many tokens of its document a token has before it, or of its window where the "
        f"mixture does not mark documents. Bold: step {rows[-1]['step']:,}; dotted: step {first['step']:,}, the "
        "same tokens. Longer documents are other text, so read a source against its dotted curve: where only "
        "the far end stays behind, the model does not use what is so far away."
    )
    figure = chart(figures.positions_figure(run, first, rows[-1]), f"positions-{run.name}")
    return card("Loss by position", figure, caption)


def bits_card(run: Run) -> str:
    points = [p for p in points_of(run, "bits_per_byte") if isinstance(p["sources"], dict)]
    if not points:
        return ""

    def bits_of(point: Record, source: str) -> float | None:
        return number((point["sources"][source] or {}).get("bits_per_byte"))

    last = points[-1]
    names = sorted(last["sources"], key=lambda name: bits_of(last, name) or 0.0)
    rows = [
        [
            escape(name),
            escape(str(last["sources"][name]["category"] or "")),
            measured(bits_of(last, name), ".3f"),
        ]
        for name in names
    ]
    body = table(("source", "category", "bits per byte"), rows)
    if len(points) > 1:
        places = figures.source_places(run)
        series = [figures.Series(name, [(p, bits_of(p, name)) for p in points]) for name in names]
        figure = figures.checkpoint_figure(series, [places[name] for name in names])
        body = f'<div class="beside">{body}{chart(figure, f"bits-{run.name}")}</div>'
    caption = f"Held-out text, {escape(where_evaluated(last))}. Lower is better."
    return card("Bits per byte", body, caption)


def decode_card(run: Run) -> str:
    """The last two decode speeds, beside what reading the weights at the measured bandwidth would allow."""
    records = run.evals_of("decode_speed")[:-3:-1]
    if not records:
        return ""
    caption = "Batch 1. At full bandwidth every byte of a token is read once, as fast as a probe read in the same run."
    if any((number(record["percent_of_probe"]) or 0) > 100 for record in records):
        caption += " Above 100 %, weights come from the processor's caches, which the probe's buffer does not fit into."
    head = [""]
    for record in records:
        names = [str(record[key]) for key in ("device", "cpu", "dtype", "isa") if record[key]]
        names += [f"{record['threads']} threads"] if record["threads"] else []
        head.append(" · ".join([*names, where_evaluated(record)]))
    columns = [decode_figures(record) for record in records]
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    return card("Decode speed", table(head, rows, "wrap"), caption)


def decode_figures(record: Record) -> dict[str, str]:
    keys = ("tokens_per_s", "percent_of_probe", "ttft_s", "bytes_per_token", "probe_bytes_per_s")
    speed, share, ttft_s, per_token, bandwidth = (number(record[key]) for key in keys)
    slow, fast = record["tokens_per_s_p10"], record["tokens_per_s_p90"]
    return {
        "of the read bandwidth": f"<b>{measured(share, '.1f', ' %')}</b>{bar((share or 0) / 100, colour(0))}",
        "tokens per second": f"<b>{short(speed)}</b>",
        "10th to 90th percentile": none() if slow is None else f"{short(slow)} – {short(fast)}",
        "at full bandwidth": short(bandwidth / per_token if bandwidth and per_token else None),
        "read bandwidth": short(bandwidth, "B/s"),
        "bytes read per token": short(per_token, "B"),
        "one token": measured(speed and 1000 / speed, ".3g", " ms"),
        "first token after": measured(ttft_s and 1000 * ttft_s, ".3g", " ms"),
        "prefill": short(record["prefill_tokens_per_s"], " tok/s"),
    }


def provenance_card(run: Run) -> str:
    """Where the figures come from: data, tokenizer and code by hash, the starts of the job,
    its settings by phase.
    """
    sources = (("tokenizer", run.evals, "tokenizer_sha256"), ("evaluation data", run.evals, "data_sha256"),
               ("evaluation code", run.evals, "code_version"),
               ("mixture", run.attempts, "mixture_fingerprint"))  # fmt: skip
    facts = {title: [str(each[key]) for each in records if each[key]] for title, records, key in sources}
    for phase, lineage in run.lineages.items():
        facts |= {f"{key} of {phase}": [str(value)] for key, value in lineage.items() if value is not None}
    rows = [
        [escape(name), " ".join(map(code, dict.fromkeys(values))) or code(None)]
        for name, values in facts.items()
    ]
    body = table(("identity", "sha256 or version"), rows)
    keys = ("phase", "attempt", "step", "world_size", "started_from", "torch", "code_version")
    if run.attempts:
        starts = [[*(code(start[key]) for key in keys), utc(start["time"])] for start in run.attempts]
        body += table(("phase", "attempt", "at step", "ranks", "from", "torch", "code", "time (UTC)"), starts)
    if run.configs:
        settings = [dict(flat(config)) for config in run.configs.values()]
        names = sorted({name for of_phase in settings for name in of_phase})
        rows = [[escape(name), *(code(of_phase.get(name)) for of_phase in settings)] for name in names]
        body += fold("Settings of the job by phase", table(("setting", *run.configs), rows))
    return card("Provenance", body)


def flat(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """("section.key", value) of a job file."""
    for section, values in config.items():
        if isinstance(values, dict):
            yield from ((f"{section}.{key}", value) for key, value in values.items())
