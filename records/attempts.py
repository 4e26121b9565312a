"""One curve out of many attempts: which logged rows count, and where each stands on an axis that spans all phases.

An attempt begins behind the checkpoint it loaded, so that it takes back every row beyond that step, whether it has
logged the step again yet or not. Without a record of its start, its rows tell: one takes back those at later steps.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Stretch:
    """Rows of one attempt in one phase, in order; `kept` is False where a later attempt went back behind them."""

    phase: str
    attempt: int
    kept: bool
    rows: list[dict[str, Any]]


def merge_attempts(
    rows: Iterable[dict[str, Any]], starts: Mapping[tuple[str, int], int] | None = None
) -> list[Stretch]:
    """Stretches of rows in the order of the run: by phase, by attempt, as written; no step is kept twice.

    rows: with `phase`, `attempt` and `step`; each gets `kept`. starts: the step behind which (phase, attempt) began.
    A row is kept unless a later attempt of its phase began before its step, or a later row is at its step or before.
    """
    by_phase: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_phase.setdefault(row["phase"], []).append(row)
    stretches: list[Stretch] = []
    for phase, of_phase in by_phase.items():
        of_phase.sort(key=lambda row: row["attempt"])  # stable
        _mark_kept(of_phase, {attempt: step for (of, attempt), step in (starts or {}).items() if of == phase})
        before: dict[str, Any] | None = None
        for row in of_phase:
            if before is None or breaks(before, row):
                stretches.append(Stretch(phase, row["attempt"], row["kept"], []))
            stretches[-1].rows.append(row)
            before = row
    return stretches


def _mark_kept(rows: list[dict[str, Any]], starts: Mapping[int, int]) -> None:
    """Set `kept` of the rows of one phase, which are in order of attempts."""
    later = sorted(starts, reverse=True)  # attempts whose start has not been looked at yet, going backwards
    end = math.inf  # what comes before, ends here
    while_at = 0
    for row in reversed(rows):
        while while_at < len(later) and later[while_at] > row["attempt"]:
            end = min(end, starts[later[while_at]] + 1)
            while_at += 1
        row["kept"] = row["step"] < end
        end = min(end, row["step"])


def breaks(before: dict[str, Any], row: dict[str, Any]) -> bool:
    """Whether the curve breaks between two rows of a phase: another attempt, a step back, or steps run again."""
    same = (before["attempt"], before["kept"]) == (row["attempt"], row["kept"])
    return not same or row["step"] <= before["step"]


def steps_before(lineage: Mapping[str, Any]) -> int:
    """Steps that led to a run's start: its parent checkpoint's, and those of its parents as far as they are there."""
    parent = Path(str(lineage.get("parent") or ""))
    named = re.fullmatch(r"step-(\d+)", parent.name)
    if not named:
        return 0
    try:
        above = json.loads((parent.parent.parent / "lineage.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        above = {}
    return int(named[1]) + (steps_before(above) if isinstance(above, dict) else 0)


def place_on_one_axis(stretches: list[Stretch], lineages: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple]:
    """Give every row `x_step` and `x_tokens`, which go on growing from phase to phase; x_tokens may be None.

    A phase begins where its lineage says that its parent checkpoint stands, else behind the phase before. Returns
    (steps, tokens) before each phase.
    """
    origins: dict[str, tuple[float, float]] = {}
    steps, tokens = 0.0, 0.0
    for phase in dict.fromkeys(s.phase for s in stretches):
        rows = [row for s in stretches if s.phase == phase for row in s.rows]
        lineage = lineages.get(phase, {})
        if lineage.get("parent"):
            steps = steps_before(lineage)
            tokens = float(lineage.get("tokens_before") or tokens)
        origins[phase] = steps, tokens
        for row in rows:
            row["x_step"] = steps + row["step"]
            counted_here = None if row["tokens"] is None else tokens + row["tokens"]
            row["x_tokens"] = counted_here if row["tokens_total"] is None else row["tokens_total"]
        last = [row for row in rows if row["kept"]][-1:]
        if last:
            steps, tokens = last[0]["x_step"], last[0]["x_tokens"] or tokens
    return origins
