"""Write the header of a run: its state, progress by phase, and tiles of the newest figures."""

from __future__ import annotations

from html import escape
from statistics import median

from laneformer import LaneformerConfig
from records.run import Record, Run
from records.usage import RECENT, duration, money, usage_of
from tools.dashboard.charts import Json, dig, smooth_loss
from tools.dashboard.evaluations import make_core_tile, name_checkpoint
from tools.dashboard.page import Tile, colour, format_figure, none, short, tiles, utc

# nats above the lowest loss of a phase, from which a run has diverged
RISE = 1.0
# seconds without a logged step, after which a run is not called training
QUIET_S = 600


def header(run: Run, now: float) -> str:
    kind, words = state(run, now)
    facts = list_model_facts(run) + [f"git {start['code_version']}" for start in run.attempts[-1:]]
    if run.rows and run.rows[-1]["x_tokens"] is not None:
        facts.append(f"{short(run.rows[-1]['x_tokens'])} tokens")
    bars = ""
    for index, (phase, steps) in enumerate(read_planned_steps(run).items()):
        step = max((row["step"] for row in run.rows_of(phase)), default=0)
        label = f"{escape(phase)} <b>{step:,}</b>" + (f" / {steps:,}" if steps else "")
        percent = 100 * min(step / steps, 1) if steps else 100
        filled = f'<div class="bar"><i style="width:{percent:.2f}%;background:{colour(index)}"></i></div>'
        bars += f'<div style="flex:{steps or step or 1}">{filled}<small>{label}</small></div>'
    note = f'<p class="note">{escape(run.note)}</p>' if run.note else ""
    line = "".join(f"<span>{escape(fact)}</span>" for fact in facts)
    title = f'<h1>{escape(run.name)}</h1><span class="state {kind}">{escape(words)}</span>'
    progress = f'<p class="facts">{line}</p><div class="progress">{bars}</div>'
    return f'<header><div class="title">{title}</div>{note}{progress}</header>'


def read_planned_steps(run: Run) -> dict[str, int | None]:
    """Read the steps of each phase; None where no config says it."""
    return {
        phase: dig(run.configs, phase, "training", "steps") for phase in [*run.phases, *run.configs]
    }


def state(run: Run, now: float) -> tuple[str, str]:
    """Describe where the run stands: (CSS class, words)."""
    if not run.rows:
        return "idle", "no step logged yet"
    row, planned = run.rows[-1], read_planned_steps(run)
    steps = planned[row["phase"]]
    where = f"{row['phase']}, step {row['step']:,}" + (f" of {steps:,}" if steps else "")
    if reason := divergence(run):
        return "bad", f"diverged: {where}: {reason}"
    if steps == row["step"] and row["phase"] == list(planned)[-1]:
        return "done", f"finished: {where}"
    if row["time"] is None:
        return "idle", where
    if now - row["time"] < QUIET_S:
        return "live", f"training: {where}"
    return "idle", f"quiet since {utc(row['time'])} UTC: {where}"


def divergence(run: Run) -> str:
    """Say how the loss of the newest phase has diverged, or ""."""
    rows = run.rows_of(run.rows[-1]["phase"])
    if rows[-1]["loss"] is None and "averaged" not in rows[-1]:
        return "the loss is not a finite number"
    means = [mean for _, mean in smooth_loss(run, rows) if mean is not None]
    # a median of several: one spike is no divergence
    newest = [row["loss"] for row in rows[-16:] if row["loss"] is not None]
    if not newest:
        return ""
    lowest, now = min(means), median(newest)
    # half of what was learnt must be lost as well
    risen = now - lowest > max(RISE, (means[0] - lowest) / 2)
    return f"the loss rose from {lowest:.2f} to {now:.2f}" if risen else ""


def list_model_facts(run: Run) -> list[str]:
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


def write_tiles(run: Run) -> str:
    bits, decode = (
        [Record(), *run.evals_of(kind)][-1] for kind in ("bits_per_byte", "decode_speed")
    )
    where = f"held-out text, {escape(name_checkpoint(bits))}"
    share = format_figure(decode["percent_of_probe"], ".0f", " % of the memory's limit")
    speed, mfu = recent(run, "tokens_per_s"), recent(run, "mfu")
    entries = [
        make_core_tile(run),
        make_loss_tile(run),
        ("bits per byte", format_figure(bits["bits_per_byte"], ".4f"), where),
        ("training speed", short(speed), "tokens per second, median"),
        *make_usage_tiles(run),
        ("MFU", format_figure(mfu, ".1f", " %"), "of the hardware's peak FLOP/s, median"),
        (
            "decode",
            format_figure(decode["tokens_per_s"], ".4g"),
            f"tokens per second at batch 1, {share}",
        ),
    ]
    # a figure that was not measured takes no room
    return tiles(entry for entry in entries if 'class="none"' not in entry[1])


def recent(run: Run, key: str) -> float | None:
    values = [row[key] for row in run.rows[-RECENT:] if row[key] is not None]
    # a restart or a slow node does not move it
    return median(values) if values else None


def make_loss_tile(run: Run) -> Tile:
    for phase in reversed(run.phases):
        means = [
            (row, mean) for row, mean in smooth_loss(run, run.rows_of(phase)) if mean is not None
        ]
        if means:
            # beside where this phase began: another phase has another text
            (first, began), (_, last) = means[0], means[-1]
            note = f"smoothed; {escape(phase)} began with {began:.3f} at step {first['step']:,}"
            return "loss", f"{last:.4f}", note
    return "loss", none(), ""


def make_usage_tiles(run: Run) -> list[Tile]:
    if not run.rows or run.rows[-1]["time"] is None:
        return []
    usage = usage_of(run)
    remaining = usage.gpu_hours_left
    total = f"of {short(usage.gpu_hours + remaining)}" if remaining else "so far"
    prices: Json = next(
        (config.get("metrics", {}) for config in reversed(run.configs.values())), {}
    )
    price = money(usage.gpu_hours, prices)
    hours = "device-hours", short(usage.gpu_hours or None), f"{total}, {price}" if price else total
    if usage.finish_time is None:
        return [hours]
    left_s = usage.finish_time - run.rows[-1]["time"]
    if left_s <= 0:
        return [("time left", "done", "training.steps reached"), hours]
    return [("time left", duration(left_s), f"until {utc(usage.finish_time)} UTC"), hours]
