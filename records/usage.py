"""GPU-hours, remaining time and cost of a run, for log, metrics.jsonl, dashboard and tools.plan."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from records.files import JsonObject
from records.run import Run, number

RECENT = 128  # rows whose speed counts


@dataclass
class Span:
    """The time for which one start of the workers held its GPUs, in seconds."""

    attempt: int
    began: float
    ended: float
    gpus: int | None = None  # None: the workers never came far enough to say it
    over: bool = False


@dataclass(frozen=True)
class Usage:
    """GPU-hours of one job, used and left."""

    gpu_hours: float
    gpu_hours_left: float | None
    finish_time: float | None  # seconds since the epoch


def spans_of(records: Iterable[JsonObject]) -> list[Span]:
    """Return the spans of one job.

    Args:
        records: the lines of attempts.jsonl, events.jsonl and metrics.jsonl in any order.
    """
    dated = [r for r in records if None not in (number(r.get("time")), number(r.get("attempt")))]
    spans: list[Span] = []
    for record in sorted(dated, key=lambda r: r["time"]):
        attempt = int(record["attempt"])
        time = float(record["time"])
        # only the line of attempts.jsonl, written by the workers, knows the number of GPUs
        starts = "world_size" in record
        last = spans[-1] if spans else Span(-1, time, time, over=True)
        restarted = starts and (last.over or last.gpus is not None)
        # an attempt that failed before its line in attempts.jsonl has a number that the next start has again
        if record.get("kind") == "supervisor_start" or attempt != last.attempt or restarted:
            spans.append(Span(attempt, time - (number(record.get("seconds")) or 0.0), time))
        elif last.over:
            # events of the supervisor after an attempt ended cost no GPU time
            continue
        span = spans[-1]
        span.ended = time
        span.over = record.get("kind") == "supervisor_end"
        span.gpus = int(record["world_size"]) if starts else span.gpus or devices_of(record)
    return spans


def devices_of(row: JsonObject) -> int | None:
    total = number(row.get("tokens_per_s"))
    per_device = number(row.get("tokens_per_s_per_device"))
    return round(total / per_device) if total and per_device else None


def gpu_hours(spans: Sequence[Span]) -> float:
    total = 0.0
    gpus = next((span.gpus for span in reversed(spans) if span.gpus), 0)
    for span in reversed(spans):
        # one without a number has that of the next or else the previous one
        gpus = span.gpus or gpus
        total += gpus * (span.ended - span.began) / 3600
    return total


def seconds_left(rates: Sequence[float], tokens: float, gpus: int | None) -> float | None:
    """Return the seconds that `tokens` take at the last rates, in tokens per second of a device."""
    # a restart, a validation or a slow node does not move the median
    rate = statistics.median(rates[-RECENT:]) * gpus if rates and gpus else 0.0
    return tokens / rate if rate > 0 else None


def cost(hours: float | None, metrics: JsonObject) -> float | None:
    """Return the cost of GPU-hours; None without metrics.gpu_hour_price."""
    price = number(metrics.get("gpu_hour_price"))
    return hours * price if price and hours is not None else None


def money(hours: float | None, metrics: JsonObject) -> str | None:
    """Format `cost`, such as "12,345 EUR"."""
    value = cost(hours, metrics)
    digits = 0 if value is None or value >= 100 else 2
    return None if value is None else f"{value:,.{digits}f} {metrics.get('currency') or ''}".strip()


def duration(seconds: float) -> str:
    """Format seconds in two units: "3 d 4 h", "5 h 12 min", "48 s"."""
    for unit_s, unit, below_s, below in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if seconds >= unit_s:
            return f"{int(seconds // unit_s)} {unit} {int(seconds % unit_s // below_s)} {below}"
    return f"{max(seconds, 0.0):.0f} s"


def usage_of(run: Run) -> Usage:
    """Sum up all phases; one without rows yet goes on at the speed of the one before."""
    used = 0.0
    hours_left = list[float | None]()
    rates = list[float]()
    gpus: int | None = None
    clock: float | None = None
    for phase in dict.fromkeys([*run.phases, *run.configs]):
        # an attempt holds its GPUs from its first record to its last in any file: imports, hangs and repeated steps
        # count, pauses and queues do not
        segments = [segment for segment in run.segments if segment.phase == phase]
        rows = [row for segment in segments for row in segment.rows]
        records = [record for record in (*run.attempts, *run.events) if record["phase"] == phase]
        used += gpu_hours(spans_of([*records, *rows]))
        counting_rows = run.rows_of(phase)
        rates = (
            list(filter(None, (row["tokens_per_s_per_device"] for row in counting_rows))) or rates
        )
        gpus = next(filter(None, map(devices_of, reversed(counting_rows))), gpus)
        clock = counting_rows[-1]["time"] if counting_rows else clock
        tokens = tokens_left(run.configs.get(phase, {}).get("training", {}), counting_rows)
        left_s = None if tokens is None else seconds_left(rates, tokens, gpus)
        clock = None if clock is None or left_s is None else clock + left_s
        hours_left.append(None if left_s is None else left_s * (gpus or 0) / 3600)
    return Usage(used, None if None in hours_left else sum(filter(None, hours_left)), clock)


def tokens_left(training: JsonObject, rows: Sequence[JsonObject]) -> float | None:
    """Count the tokens of a phase after its last row; None if unknown."""
    steps, batch, length = (
        number(training.get(key)) for key in ("steps", "global_batch_size", "seq_len")
    )
    step = rows[-1]["step"] if rows else 0
    return max(0.0, steps - step) * batch * length if steps and batch and length else None
