"""The attempts of one job: which logged rows count, their place on one axis of steps and tokens, what each read."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from records.checkpoints import run_folder
from records.files import JsonObject, read_json, read_lines
from records.skips import SkipList, read_entries

Row = dict[str, Any]  # a logged step


@dataclass
class Segment:
    """Consecutive rows of one attempt in one phase; `is_counted` is False if a later attempt discarded them."""

    phase: str
    attempt: int
    is_counted: bool
    rows: list[Row]


def merge_attempts(
    rows: Iterable[Row], starts: Mapping[tuple[str, int], int] | None = None
) -> list[Segment]:
    """Split rows into segments by phase, then attempt, then as written; mark which rows count.

    Args:
        rows: with `phase`, `attempt` and `step`; `is_counted` is added.
        starts: {(phase, attempt): the step it started after}.
    """
    by_phase: dict[str, list[Row]] = {}
    for row in rows:
        by_phase.setdefault(row["phase"], []).append(row)
    segments: list[Segment] = []
    for phase, of_phase in by_phase.items():
        of_phase.sort(key=lambda row: row["attempt"])  # stable
        _mark_counted(
            of_phase,
            {attempt: step for (of, attempt), step in (starts or {}).items() if of == phase},
        )
        for before, row in zip((None, *of_phase), of_phase, strict=False):
            same_segment = before is not None and (before["attempt"], before["is_counted"]) == (
                row["attempt"],
                row["is_counted"],
            )
            if before is None or not same_segment or row["step"] <= before["step"]:
                segments.append(Segment(phase, row["attempt"], row["is_counted"], []))
            segments[-1].rows.append(row)
    return segments


def _mark_counted(rows: list[Row], starts: Mapping[int, int]) -> None:
    """Set `is_counted` of the rows of one phase, sorted by attempt. starts: {attempt: step it started after}."""
    # an attempt discards every earlier row beyond the checkpoint it loaded, even before it has logged that step
    # again; if its start is not on record, each of its rows discards earlier rows at the same or later steps
    end = math.inf  # earlier rows count up to this step
    # attempts whose start has not been applied yet, as rows go backwards
    attempts = sorted(starts)
    for row in reversed(rows):
        while attempts and attempts[-1] > row["attempt"]:
            end = min(end, starts[attempts.pop()] + 1)
        row["is_counted"] = row["step"] < end
        end = min(end, row["step"])


def steps_before(lineage: JsonObject) -> int:
    """Count the steps before the start of a run, as far as its parents are on disk."""
    parent = Path(str(lineage.get("parent") or ""))
    match = re.fullmatch(r"step-(\d+)", parent.name)
    if not match:
        return 0
    # a lineage may name a parent that was moved or deleted: the count begins there
    try:
        above = read_json(run_folder(parent) / "lineage.json", {})
    except (OSError, ValueError):
        above = {}
    # not the run itself
    further = isinstance(above, dict) and above.get("parent") != lineage.get("parent")
    return int(match[1]) + (steps_before(above) if further else 0)


def place_on_one_axis(
    segments: list[Segment], lineages: Mapping[str, JsonObject]
) -> dict[str, float]:
    """Set `x_step`, `x_tokens` and `x_time` (None if unknown) of every row.

    Returns:
        The steps before each phase.
    """
    origins: dict[str, float] = {}
    steps = 0.0
    tokens = 0.0
    for phase in dict.fromkeys(s.phase for s in segments):
        of_phase = [segment for segment in segments if segment.phase == phase]
        rows = [row for segment in of_phase for row in segment.rows]
        lineage = lineages.get(phase, {})
        # a phase starts at the parent checkpoint of its lineage, else after the previous phase
        if lineage.get("parent"):
            steps = steps_before(lineage)
            tokens = float(lineage.get("tokens_before") or tokens)
        origins[phase] = steps
        for row in rows:
            # `tokens` counts from the start of the phase, `tokens_total` includes the phases before
            x_tokens = None if row["tokens"] is None else tokens + row["tokens"]
            row["x_step"], row["x_time"] = steps + row["step"], row.get("time")
            row["x_tokens"] = x_tokens if row["tokens_total"] is None else row["tokens_total"]
        last = [row for row in rows if row["is_counted"]][-1:]
        if last:
            steps = last[0]["x_step"]
            tokens = last[0]["x_tokens"] or tokens
    return origins


@dataclass(frozen=True)
class Reading:
    """What one attempt of a run reads: sequences of a lock in batches of one size."""

    lock: Path
    attempt: int
    step: int  # done before it
    position: int  # of the first sequence that it takes
    global_batch_size: int
    offsets: dict[str, int]  # windows of each source that earlier phases used up
    skips: SkipList

    def numbers(self, step: int) -> np.ndarray:
        """Return the sequence numbers of a step's batch, counted from 1: int64 (G,)."""
        return self.skips.numbers(
            self.position + (step - 1 - self.step) * self.global_batch_size, self.global_batch_size
        )


def read_attempts(run: Path) -> list[Reading]:
    """Read what a run's attempts read; ValueError where attempts.jsonl does not say it."""
    path = run / "attempts.jsonl"
    later = [entry["window"] for entry in read_entries(run)]
    if not (attempts := [start for start in read_lines(path) if "data" in start]):
        raise ValueError(
            f"{path} does not say what was read; give the phase's own run folder, or the lock file"
        )
    return [
        Reading(
            **{**start["data"], "lock": Path(start["data"]["lock"])},
            attempt=start["attempt"],
            step=start["step"],
            skips=SkipList([*start["skip_sequences"], *later]),
        )
        for start in attempts
    ]


def attempt_of(attempts: Sequence[Reading], step: int) -> Reading:
    """Return the attempt whose version of a step counts; ValueError if none is on record."""
    for attempt in reversed(attempts):
        if attempt.step < step:
            return attempt
    raise ValueError(
        f"step {step} was read before attempts.jsonl said what was read; give the lock file instead"
    )
