"""A run folder as one object: logged steps in the order in which they count,
evaluations, events, configs, attempts.

A run folder holds metrics.jsonl, evals.jsonl, config.toml and model.json itself, or in one subfolder per
phase (phase1/, phase2/), or both. The files of a running job are read as they are: a half-written last
line is skipped, missing values are None. Of a step that was logged again after a rollback or a resume,
the last row counts.

An attempt starts after the checkpoint it loaded, so it discards every earlier row beyond that step, even
before it has logged the step again. If its start is not on record, each of its rows discards earlier rows at
the same or later steps.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from records.files import JsonObject, read_json, read_lines
from records.job import read_sections

FIGURES = (
    "loss", "lr", "grad_norm", "tokens", "tokens_total", "tokens_per_s", "tokens_per_s_per_device", "mfu", "time",
    "seconds", "data_s", "loss_z", "grad_norm_z", "checkpoint_s", "checkpoint_total_s", "memory_gib", "valid_loss",
    "z_loss", "max_logit",
)  # fmt: skip
BY_SOURCE = ("loss_by_source", "valid_loss_by_source", "tokens_by_source")  # {source: figure}
LINES = ("metrics.jsonl", "evals.jsonl", "events.jsonl", "attempts.jsonl")
OBJECTS = ("config.toml", "model.json", "lineage.json")
NOTE = "note.txt"
Row = dict[str, Any]  # a logged step


class Record(dict[str, Any]):
    """A line of a run's file and the objects in it: `record["name"]` is None where the file does not say it."""

    def __missing__(self, key: str) -> None:
        return None


def as_record(line: dict[str, Any]) -> Record:
    """JSON values whose objects are Records."""
    return json.loads(json.dumps(line), object_hook=Record)


@dataclass
class Segment:
    """Consecutive rows of one attempt in one phase; `kept` is False if a later attempt discarded them."""

    phase: str
    attempt: int
    kept: bool
    rows: list[Row]


@dataclass
class Run:
    """One run, all phases."""

    name: str
    note: str = ""  # note.txt: what the page says under the name
    segments: list[Segment] = field(default_factory=list)
    evals: list[Record] = field(default_factory=list)
    attempts: list[Record] = field(default_factory=list)
    events: list[Record] = field(default_factory=list)  # with `phase`, and `x_step` and `x_tokens` or None
    configs: dict[str, JsonObject] = field(default_factory=dict)
    model: JsonObject = field(default_factory=dict)
    lineages: dict[str, JsonObject] = field(default_factory=dict)  # by phase
    origins: dict[str, tuple[float, float]] = field(default_factory=dict)  # (steps, tokens) before each phase
    warnings: list[str] = field(default_factory=list)

    @property
    def phases(self) -> list[str]:
        return list(dict.fromkeys(s.phase for s in self.segments))

    @property
    def kept_rows(self) -> list[Row]:
        return [row for s in self.segments if s.kept for row in s.rows]

    def rows_of(self, phase: str) -> list[Row]:
        return [row for row in self.kept_rows if row["phase"] == phase]

    def evals_of(self, kind: str) -> list[Record]:
        return [e for e in self.evals if e["kind"] == kind]


def number(value: Any) -> float | None:
    """The value as a finite float, else None: NaN, infinity, null, text and missing values
    are all "not measured".
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def numbers_in(path: str, value: Any) -> Iterator[tuple[str, float]]:
    """(path, number) of every finite number in a value; nested values have paths with slashes."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from numbers_in(f"{path}/{name}", inner)
    elif (known := number(value)) is not None:
        yield path, known


def name_wandb_run(run: Path) -> None:
    """Set wandb's environment variables unless the user has, so that a restarted run continues
    its own wandb run.
    """
    name, identity = run.resolve().name, hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:16]
    variables = {
        "PROJECT": "laneformer",
        "RUN_NAME": name,
        "RUN_GROUP": name,
        "RUN_ID": identity,
        "RESUME": "allow",
    }
    for key, value in variables.items():
        os.environ.setdefault(f"WANDB_{key}", value)


def _clean(row: JsonObject, folder: str) -> JsonObject | None:
    step, attempt = number(row.get("step")), number(row.get("attempt"))
    if step is None:
        return None
    identity = {"step": int(step), "attempt": int(attempt or 1), "phase": str(row.get("phase") or folder)}
    figures: JsonObject = {key: number(row.get(key)) for key in FIGURES}
    for key in BY_SOURCE:
        by_source = row.get(key)
        figures[key] = by_source if isinstance(by_source, dict) else {}
    wait, seconds = figures["data_s"], figures["seconds"]
    figures["data_percent"] = 100 * wait / seconds if wait is not None and seconds else None
    return {**row, **figures, **identity}


def _key(row: JsonObject) -> tuple[Any, ...]:
    return row["phase"], row["attempt"], row["step"], row["time"]


def places_of(folder: Path) -> list[Path]:
    """The folder and its phases, in the order of training."""
    phases = [*sorted(folder.glob("phase*")), folder / "sft"]
    return [folder, *(place for place in phases if place.is_dir())]


def stamp(folders: Iterable[Path]) -> tuple[Any, ...]:
    """Names, sizes and modification times of everything that `read_run` reads: equal if nothing has changed."""
    files = [
        place / name for folder in folders for place in places_of(folder) for name in (*LINES, *OBJECTS, NOTE)
    ]
    return tuple((str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files if f.is_file())


def read_run(folder: Path) -> Run:
    """Read a run folder and its phase subfolders. Raises ValueError for a folder without any file of a run."""
    places = places_of(folder)
    if not any(
        (place / name).is_file()
        for place in places
        for name in ("metrics.jsonl", "config.toml", "model.json")
    ):
        raise ValueError(
            f"{folder} is not a run folder: it holds no metrics.jsonl, config.toml or model.json"
        )
    note = folder / NOTE
    run = Run(folder.resolve().name, note.read_text(encoding="utf-8").strip() if note.is_file() else "")
    rows: list[Row] = []
    for place in places:
        rows += _read_place(
            run, place, "training" if place == folder else place.name, {_key(row) for row in rows}
        )
    starts = {(a["phase"], int(n)): int(s) for a in run.attempts if (n := number(a["attempt"])) is not None
              and (s := number(a["step"])) is not None}  # fmt: skip
    run.segments = merge_attempts(rows, starts)
    run.origins = place_on_one_axis(run.segments, run.lineages)
    by_step = {p: sorted((r for r in rows if r["phase"] == p), key=lambda r: r["step"]) for p in run.phases}
    for event in run.events:
        _place_event(event, by_step.get(event["phase"], []))
    if steps := [f"{row['phase']} step {row['step']:,}" for row in run.kept_rows
                 if row["loss"] is None and "averaged" not in row]:  # fmt: skip
        more = f" and {len(steps) - 5} more" if len(steps) > 5 else ""
        run.warnings.append(f"the loss is not a finite number at {', '.join(steps[:5])}{more}")
    return run


def _read_place(run: Run, place: Path, name: str, elsewhere: set[tuple[Any, ...]]) -> list[Row]:
    """Add the contents of one folder to the run; returns its rows except those already read elsewhere.

    A run may hold the rows of its phases twice: in subfolders, and merged.
    """
    config, model, lineage = (_read_object(place / file, run.warnings) for file in OBJECTS)
    phase = str(config.get("phase", {}).get("name") or name)
    lines = {}
    for file in LINES:
        bad: list[int] = []
        lines[file] = read_lines(place / file, bad)
        if bad:
            run.warnings.append(
                f"{place.name}/{file}: {len(bad)} unreadable line(s) skipped, the first is line {bad[0]}"
            )
    metrics, evals, events, attempts = lines.values()
    clean = [row for row in (_clean(row, name) for row in metrics) if row]
    if len(clean) < len(metrics):
        run.warnings.append(f"metrics.jsonl: {len(metrics) - len(clean)} row(s) without a step skipped")
    run.evals += [as_record(record) for record in evals if record not in run.evals]
    run.attempts += [as_record({"phase": phase, **start}) for start in attempts]
    run.events += [as_record({"phase": phase, **event}) for event in events]
    run.model = run.model or model
    for of_phases, found in ((run.lineages, lineage), (run.configs, config)):
        if found:
            of_phases.setdefault(phase, found)
    return [row for row in clean if _key(row) not in elsewhere]


def _place_event(event: Record, rows: list[Row]) -> None:
    """Set `x_step` and `x_tokens` of an event from its step, or else from its time. rows: of
    its phase, by step.
    """
    event["x_step"] = event["x_tokens"] = None
    step, time = number(event["step"]), number(event["time"])
    if step is not None:
        near = (
            rows[min(bisect.bisect_left(rows, step, key=lambda row: row["step"]), len(rows) - 1)]
            if rows
            else None
        )
    else:  # from outside the job: the supervisor, the launcher
        earlier = [
            row for row in rows if time is not None and row["time"] is not None and row["time"] <= time
        ]
        near = max(earlier, key=lambda row: row["time"], default=None)
    if near is None:
        return
    beyond = 0 if step is None else step - near["step"]
    event["x_step"] = near["x_step"] + beyond
    if near["x_tokens"] is not None and near["tokens"] is not None and near["step"]:
        event["x_tokens"] = near["x_tokens"] + beyond * near["tokens"] / near["step"]


def _read_object(path: Path, warnings: list[str]) -> JsonObject:
    try:
        content = read_sections(path) if path.suffix == ".toml" else read_json(path)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        warnings.append(f"{path.name} is unreadable: {error}")
        return {}
    return content if isinstance(content, dict) else {}


# --- attempts of one job
# -----------------------------------------------------------------------------------------


def merge_attempts(rows: Iterable[Row], starts: Mapping[tuple[str, int], int] | None = None) -> list[Segment]:
    """Segments of rows by phase, then attempt, then as written; no step is kept twice.

    rows: with `phase`, `attempt`, `step`; `kept` is added. starts: {(phase, attempt): the step it started
    after}. A row is kept unless a later attempt of its phase started before its step, or a later row is at
    its step or before.
    """
    by_phase: dict[str, list[Row]] = {}
    for row in rows:
        by_phase.setdefault(row["phase"], []).append(row)
    segments: list[Segment] = []
    for phase, of_phase in by_phase.items():
        of_phase.sort(key=lambda row: row["attempt"])  # stable
        _mark_kept(of_phase, {attempt: step for (of, attempt), step in (starts or {}).items() if of == phase})
        for before, row in zip((None, *of_phase), of_phase, strict=False):
            same = before is not None and (before["attempt"], before["kept"]) == (row["attempt"], row["kept"])
            if before is None or not same or row["step"] <= before["step"]:
                segments.append(Segment(phase, row["attempt"], row["kept"], []))
            segments[-1].rows.append(row)
    return segments


def _mark_kept(rows: list[Row], starts: Mapping[int, int]) -> None:
    """Set `kept` of the rows of one phase, sorted by attempt. starts: {attempt: step it started after}."""
    end = math.inf  # earlier rows count up to this step
    attempts = sorted(starts)  # those whose start has not been applied; going backwards
    for row in reversed(rows):
        while attempts and attempts[-1] > row["attempt"]:
            end = min(end, starts[attempts.pop()] + 1)
        row["kept"] = row["step"] < end
        end = min(end, row["step"])


def steps_before(lineage: JsonObject) -> int:
    """Steps before the start of a run: its parent checkpoint's, plus those before the parent as
    far as on disk.
    """
    parent = Path(str(lineage.get("parent") or ""))
    named = re.fullmatch(r"step-(\d+)", parent.name)
    if not named:
        return 0
    try:
        above = read_json(parent.parent.parent / "lineage.json", {})
    except (OSError, ValueError):
        above = {}
    further = isinstance(above, dict) and above.get("parent") != lineage.get("parent")  # not the run itself
    return int(named[1]) + (steps_before(above) if further else 0)


def place_on_one_axis(segments: list[Segment], lineages: Mapping[str, JsonObject]) -> dict[str, tuple]:
    """Set `x_step` and `x_tokens` (None if unknown) of every row, counted from the start of the first phase.

    A phase starts at the parent checkpoint of its lineage, else after the previous phase. Returns {phase:
    (steps, tokens) before it}.
    """
    origins: dict[str, tuple[float, float]] = {}
    steps, tokens = 0.0, 0.0
    for phase in dict.fromkeys(s.phase for s in segments):
        rows = [row for s in segments if s.phase == phase for row in s.rows]
        lineage = lineages.get(phase, {})
        if lineage.get("parent"):
            steps = steps_before(lineage)
            tokens = float(lineage.get("tokens_before") or tokens)
        origins[phase] = steps, tokens
        for row in rows:
            row["x_step"] = steps + row["step"]
            counted = None if row["tokens"] is None else tokens + row["tokens"]
            row["x_tokens"] = counted if row["tokens_total"] is None else row["tokens_total"]
        last = [row for row in rows if row["kept"]][-1:]
        if last:
            steps, tokens = last[0]["x_step"], last[0]["x_tokens"] or tokens
    return origins
