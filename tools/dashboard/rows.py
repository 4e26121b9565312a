"""The rows of a run that figures draw, and their means.

A long run has more rows than a screen has pixels: of each bucket of neighbouring rows those with the extremes
are kept, so that no spike is lost. Means come first, on all rows. Both go on where they ended when a run
grows, at the cost of its new rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from laneformer.config import LaneformerConfig
from laneformer.flops import flops_per_token
from records.attempts import Segment
from records.run import FIGURES, Run, number
from records.usage import RECENT

Rows = Sequence[dict[str, Any]]
SPIKE = 8  # median distances from the median; of 128 normal values the largest has 4
SHORT = 8  # a half-life of means, in rows, up to which all rows are drawn
# all that a figure may draw of the rows of a bucket
EVERYTHING = [
    (key, extreme)
    for key in (*FIGURES, "data_percent", "smooth_loss", "layer_peak")
    for extreme in (min, max)
]


def sample(
    rows: Rows, width: int, extremes: Sequence[tuple[str, Callable[..., int]]]
) -> list[dict[str, Any]]:
    """The rows to draw: of each bucket of `width` neighbouring rows the last one, also of each source, those of
    the extremes, and those with a validation; and the first row of an attempt. A spike keeps the rows beside it, so
    that a zoom shows it as narrow as it is.

    extremes: (key, a choice among indices by `key=`, such as min). Buckets begin at multiples of `width`, so what
    is drawn of earlier rows stays when others follow.
    """
    if width == 1:
        return list(rows)
    chosen, start = set[int](), 0
    for _, bucket in itertools.groupby(rows, lambda row: row["n"] // width):
        inside = range(start, start := start + sum(1 for _ in bucket))
        chosen.update({name: i for i in inside for name in ("", *rows[i].get("loss_by_source", ()))}.values())
        chosen.update(i for i in inside if rows[i]["n"] == 0 or rows[i].get("valid_loss") is not None)
        for key, extreme in extremes:
            if known := [i for i in inside if rows[i].get(key) is not None]:
                chosen.add(peak := extreme(known, key=lambda i, key=key: rows[i][key]))
                if stands_out(rows[peak][key], [rows[i][key] for i in known]):
                    chosen.update(i for i in (peak - 1, peak + 1) if i in inside)
    return [rows[i] for i in sorted(chosen)]


def middles(rows: Rows, width: int, keys: Sequence[str]) -> list[dict[str, Any]]:
    """One row for each bucket of `width` neighbouring rows: its last one, with the median of each figure among
    `keys`, and as `band` what it ranges over, {key: (lowest, highest)}. A bucket ends early at a validation.
    """
    validations = itertools.accumulate((row.get("valid_loss") is not None for row in rows), initial=0)
    places = ((row["n"] // width, before) for row, before in zip(rows, validations, strict=False))
    found, buckets = [], itertools.groupby(zip(rows, places, strict=True), lambda pair: pair[1])
    for bucket in ([row for row, _ in pairs] for _, pairs in buckets):
        values = {key: [row[key] for row in bucket if row.get(key) is not None] for key in keys}
        known = {key: of for key, of in values.items() if of}
        band = {key: (min(of), max(of)) for key, of in known.items()}
        found.append(bucket[-1] | {key: median(of) for key, of in known.items()} | {"band": band})
    return found


def stands_out(value: float, values: Sequence[float]) -> bool:
    """Whether the value is further from the median than noise takes it, as a spike is."""
    middle = median(values)
    return abs(value - middle) > SPIKE * median(abs(each - middle) for each in values)


class Mean:
    """The exponential mean of the values so far.

    The half-life, in values, grows to its full length: a loss falls like a power of the steps, so that a mean
    over a fixed span would lie far above its steep beginning.
    """

    def __init__(self, half_life: float, total: float = 0.0, weight: float = 0.0, count: int = 0):
        self.state = half_life, total, weight, count

    def add(self, value: float | None, last: bool = False) -> float | None:
        """The mean with this value, None if there is none; last: the next value takes the place of this one."""
        half_life, total, weight, count = self.state
        keep = 0.5 ** (1 / max(1.0, min(half_life, count / 25)))
        if value is not None:
            total, weight = keep * total + value, keep * weight + 1
        if not last:
            self.state = half_life, total, weight, count + 1
        return None if value is None else total / weight


def half_life_rows(rows: int) -> int:
    """A power of two, so that it changes rarely while a run grows: between a 200th and a 100th of its rows."""
    return 1 << math.ceil(math.log2(max(rows, 400) / 200))


def width_of(run: Run) -> int:
    """Neighbouring rows that are drawn by their extremes: 1 of a short run, else half the half-life."""
    return run.half_life // 2 if run.half_life > SHORT else 1


def prepare(run: Run, thinned: bool = True) -> bool:
    """Set what figures need of the rows since the last call, phase by phase, and thin what is finished.

    Of a row that is `smooth_loss`, `smooth_by_source` and `x_flops`, of an event `x_flops`. Returns False, and does
    nothing, if the run has grown beyond the means and buckets of its earlier rows: they are to be read again.
    thinned: of rows that are finished keep only what some figure of the whole run draws.
    """
    half_life, flops = half_life_rows(sum(s.logged for s in run.segments if s.kept)), flops_of(run)
    if run.half_life not in (0, half_life):
        return False
    run.half_life = half_life
    for segment in run.segments:
        means = run.means.setdefault(segment.phase if segment.kept else "", {})
        new = segment.rows[len(segment.rows) - (segment.logged - segment.prepared) :]
        for row in new:
            row["x_flops"] = flops_at(row, flops)
            if segment.kept:
                add_means(row, means, half_life, last=row is new[-1] and segment is run.segments[-1])
        segment.prepared = segment.logged - (segment is run.segments[-1])
        if thinned:
            thin(segment, width_of(run))
    for event in run.events:
        event["x_flops"] = flops_at(event, flops)
    return True


def flops_at(row: dict[str, Any], flops: int | None) -> float | None:
    known = flops is not None and row["x_tokens"] is not None
    return float(f"{row['x_tokens'] * flops:.7g}") if known else None


def add_means(row: dict[str, Any], means: dict[Any, Mean], half_life: int, last: bool) -> None:
    """The means of a row's losses; last: a validation or the rest of its line may still replace the row."""

    def mean(key: str, value: float | None) -> float | None:
        return means.setdefault(key, Mean(half_life)).add(value, last)

    row["layer_peak"] = max(known_in(row, "layer_grad_norm"), default=None)
    row["smooth_loss"] = mean("", row["loss"])
    row["smooth_by_source"] = {
        name: mean(f"/{name}", number(loss)) for name, loss in row["loss_by_source"].items()
    }


def thin(segment: Segment, width: int) -> None:
    """Of the finished buckets of a segment that counts, leave only the rows that some figure draws."""
    if not segment.kept or width == 1:
        return
    finished = max(0, segment.logged - RECENT) // width * width
    rows = segment.rows[segment.thinned :]
    old = rows[: max(0, finished - (segment.logged - len(rows)))]
    kept = sample(old, width, EVERYTHING)
    segment.rows[segment.thinned : segment.thinned + len(old)] = kept
    segment.thinned += len(kept)


def flops_of(run: Run) -> int | None:
    """Training FLOPs of a token, at the sequence length of the run's first phase."""
    try:
        model = LaneformerConfig.from_dict(run.model)
    except (TypeError, ValueError):
        return None
    lengths = [config.get("training", {}).get("seq_len") for config in run.configs.values()]
    return flops_per_token(model, next((n for n in lengths if n), model.max_position_embeddings))


def known_in(row: dict[str, Any], key: str) -> list[float]:
    """The figures of the layers with four digits, none where any is not finite."""
    found = [number(value) for value in row.get(key) or []] if isinstance(row.get(key), list) else []
    return [] if None in found else [float(f"{value:.4g}") for value in found if value is not None]
