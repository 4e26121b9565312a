"""What a run folder says: its logged steps in the order in which they count, its evaluations, configs and starts.

A run folder holds metrics.jsonl, evals.jsonl, config.toml, model.json itself, or in one subfolder a phase (phase1/,
phase2/), or both. The files of a running job are read as they are: a half-written last line is left out, and what is
missing stays None. A step that was logged again, after a roll-back or a resume, counts as it went the last time.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FIGURES = ("loss", "lr", "grad_norm", "tokens", "tokens_total", "tokens_per_s", "mfu", "time")


@dataclass
class Stretch:
    """Rows of one attempt in one phase, in order; `kept` is False where the same steps were run again later."""

    phase: str
    attempt: int
    kept: bool
    rows: list[dict[str, Any]]


@dataclass
class Run:
    """Everything that the page says about one run."""

    name: str
    stretches: list[Stretch] = field(default_factory=list)
    evals: list[dict[str, Any]] = field(default_factory=list)
    attempts: list[dict[str, Any]] = field(default_factory=list)
    configs: dict[str, dict[str, Any]] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    lineage: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    @property
    def phases(self) -> list[str]:
        return list(dict.fromkeys(s.phase for s in self.stretches))

    @property
    def kept_rows(self) -> list[dict[str, Any]]:
        return [row for s in self.stretches if s.kept for row in s.rows]

    def evals_of(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in self.evals if e.get("kind") == kind]


def read_jsonl(path: Path, warnings: list[str]) -> list[dict[str, Any]]:
    """All JSON objects of a file, NaN as None; lines that are none are left out, and told unless it is the last one."""
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")  # the last entry is empty, or what is being written right now
    records, bad = [], []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line, parse_constant=lambda name: None) if line.strip() else None
        except ValueError:
            record = False
        if isinstance(record, dict):
            records.append(record)
        elif record is not None and number < len(lines):
            bad.append(number)
    if bad:
        warnings.append(
            f"{path.parent.name}/{path.name}: {len(bad)} unreadable line(s) left out, the first is line {bad[0]}"
        )
    return records


def number(value: Any) -> float | None:
    """The value as a finite float, else None: NaN, infinity, null, text and missing values are all "not measured"."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def merge_attempts(rows: Iterable[dict[str, Any]]) -> list[Stretch]:
    """Stretches of rows in the order of the run: by phase, by attempt, as written.

    A row counts unless a later row of its phase is at its step or an earlier one: then the run went back behind it.
    """
    by_phase: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_phase.setdefault(row["phase"], []).append(row)
    stretches: list[Stretch] = []
    for phase, of_phase in by_phase.items():
        of_phase.sort(key=lambda row: row["attempt"])  # stable
        earliest_later = math.inf
        for row in reversed(of_phase):
            row["kept"] = row["step"] < earliest_later
            earliest_later = min(earliest_later, row["step"])
        before: dict[str, Any] | None = None
        for row in of_phase:
            if before is None or breaks(before, row):
                stretches.append(Stretch(phase, row["attempt"], row["kept"], []))
            stretches[-1].rows.append(row)
            before = row
    return stretches


def breaks(before: dict[str, Any], row: dict[str, Any]) -> bool:
    """Whether the curve breaks between two rows of a phase: another attempt, a step back, or steps run again."""
    same = (before["attempt"], before["kept"]) == (row["attempt"], row["kept"])
    return not same or row["step"] <= before["step"]


def place_on_one_axis(stretches: list[Stretch]) -> None:
    """Give every row `x_step` and `x_tokens`, which go on growing from phase to phase; x_tokens may be None."""
    steps_before: float = 0
    tokens_before: float = 0
    for phase in dict.fromkeys(s.phase for s in stretches):
        rows = [row for s in stretches if s.phase == phase for row in s.rows]
        for row in rows:
            row["x_step"] = steps_before + row["step"]
            counted_here = None if row["tokens"] is None else tokens_before + row["tokens"]
            row["x_tokens"] = counted_here if row["tokens_total"] is None else row["tokens_total"]
        last = [row for row in rows if row["kept"]][-1]
        steps_before, tokens_before = last["x_step"], last["x_tokens"] or tokens_before


def _clean(row: dict[str, Any], folder: str) -> dict[str, Any] | None:
    step, attempt = number(row.get("step")), number(row.get("attempt"))
    if step is None:
        return None
    identity = {"step": int(step), "attempt": int(attempt or 1), "phase": str(row.get("phase") or folder)}
    return {**row, **{key: number(row.get(key)) for key in FIGURES}, **identity}


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["phase"], row["attempt"], row["step"], row["time"]


def read_run(folder: Path) -> Run:
    """Read a run folder and its phase subfolders; a folder without any run file is refused (ValueError)."""
    places = [folder, *sorted(p for p in folder.glob("phase*") if p.is_dir())]
    run = Run(name=folder.resolve().name)
    rows: list[dict[str, Any]] = []
    lost = 0
    for place in places:
        elsewhere = {_key(row) for row in rows}  # a run may keep its phases' rows twice: in a subfolder, and together
        read = read_jsonl(place / "metrics.jsonl", run.warnings)
        clean = [row for row in (_clean(row, "training" if place == folder else place.name) for row in read) if row]
        lost += len(read) - len(clean)
        rows += [row for row in clean if _key(row) not in elsewhere]
        run.evals += [e for e in read_jsonl(place / "evals.jsonl", run.warnings) if e not in run.evals]
        run.lineage |= _read_object(place / "lineage.json", run.warnings)
        run.model = run.model or _read_object(place / "model.json", run.warnings)
        config = _read_object(place / "config.toml", run.warnings)
        if config:
            phase = config.get("phase", {}).get("name") or ("training" if place == folder else place.name)
            run.configs.setdefault(phase, config)
        starts = read_jsonl(place / "attempts.jsonl", run.warnings)
        run.attempts += [{"phase": config.get("phase", {}).get("name") or place.name, **start} for start in starts]
    if not any((place / name).is_file() for place in places for name in ("metrics.jsonl", "config.toml", "model.json")):
        raise ValueError(f"{folder} is not a run folder: it holds no metrics.jsonl, config.toml or model.json")
    if lost:
        run.warnings.append(f"metrics.jsonl: {lost} row(s) without a step left out")
    run.stretches = merge_attempts(rows)
    place_on_one_axis(run.stretches)
    run.warnings += _losses_not_finite(run)
    return run


def _losses_not_finite(run: Run) -> list[str]:
    steps = [f"{row['phase']} step {row['step']:,}" for row in run.kept_rows if row["loss"] is None]
    more = f" and {len(steps) - 5} more" if len(steps) > 5 else ""
    return [f"the loss is not a finite number at {', '.join(steps[:5])}{more}"] if steps else []


def _read_object(path: Path, warnings: list[str]) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        text = path.read_text(encoding="utf-8")
        content = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except ValueError as error:
        warnings.append(f"{path.name} is unreadable: {error}")
        return {}
    return content if isinstance(content, dict) else {}
