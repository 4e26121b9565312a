"""A run folder as one object: logged steps in the order in which they count, evaluations, events.

Its files lie in the folder itself, or in one subfolder per phase (phase1/, phase2/), or both. Those of a running job
are read as they are: a half-written last line is skipped, missing values are None.
"""

from __future__ import annotations

import bisect
import json
import math
import os
import secrets
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from records.attempts import Row, Segment, merge_attempts, place_on_one_axis
from records.files import (
    JsonObject,
    hold_lock,
    read_json,
    read_lines,
    survive_full_disk,
    write_atomically,
)
from records.job import read_sections

FIGURES = [
    "loss",
    "lr",
    "grad_norm",
    "tokens",
    "tokens_total",
    "tokens_per_s",
    "tokens_per_s_per_device",
    "mfu",
    "time",
    "seconds",
    "data_s",
    "loss_z",
    "grad_norm_z",
    "checkpoint_s",
    "memory_gib",
    "valid_loss",
    "z_loss",
    "max_logit",
]
# {source: figure}, of positions {source: {first position of an octave: figure}}
BY_SOURCE = ("loss_by_source", "valid_loss_by_source", "valid_loss_by_position")
LINES = ("metrics.jsonl", "evals.jsonl", "events.jsonl", "attempts.jsonl")
OBJECTS = ("config.toml", "model.json", "lineage.json")
NOTE = "note.txt"


class Record(dict[str, Any]):
    """A line of a run's file, in which a missing name is None."""

    def __missing__(self, key: str) -> None:
        return None


def as_record(line: dict[str, Any]) -> Record:
    """Turn the objects of a JSON value into Records."""
    return json.loads(json.dumps(line), object_hook=Record)


@dataclass
class Run:
    """One run, all phases."""

    name: str
    note: str = ""  # note.txt: what the page says under the name
    segments: list[Segment] = field(default_factory=list)
    evals: list[Record] = field(default_factory=list)
    attempts: list[Record] = field(default_factory=list)
    events: list[Record] = field(default_factory=list)  # with `phase`; see _place_record
    configs: dict[str, JsonObject] = field(default_factory=dict)
    model: JsonObject = field(default_factory=dict)
    lineages: dict[str, JsonObject] = field(default_factory=dict)  # by phase
    problems: list[str] = field(default_factory=list)  # of its files

    @property
    def warnings(self) -> list[str]:
        steps = [
            f"{row['phase']} step {row['step']:,}"
            for row in self.rows
            if row["loss"] is None and "averaged" not in row
        ]
        more = f" and {len(steps) - 5} more" if len(steps) > 5 else ""
        divergence = f"the loss is not a finite number at {', '.join(steps[:5])}{more}"
        return [*self.problems, *([divergence] if steps else [])]

    @property
    def phases(self) -> list[str]:
        return list(dict.fromkeys(s.phase for s in self.segments))

    @property
    def rows(self) -> list[Row]:
        """The rows that count."""
        segments = [segment for segment in self.segments if segment.is_counted]
        return [row for segment in segments for row in segment.rows]

    def rows_of(self, phase: str) -> list[Row]:
        return [row for row in self.rows if row["phase"] == phase]

    def evals_of(self, kind: str) -> list[Record]:
        return [e for e in self.evals if e["kind"] == kind]


def number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # not math.isfinite: an integer of 400 digits has no float
    return float(value) if is_number and abs(value) <= sys.float_info.max else None


def numbers_in(path: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield (path, number) of every finite number in a value; paths have slashes."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from numbers_in(f"{path}/{name}", inner)
    elif (finite := number(value)) is not None:
        yield path, finite


def name_wandb_run(run: Path) -> None:
    """Set wandb's environment variables unless the user has."""
    # the name as given, not that of a link's target
    name = Path(os.path.abspath(run)).name
    variables = {"PROJECT": "laneformer", "RUN_NAME": name, "RUN_GROUP": name, "RESUME": "allow"}
    if "WANDB_RUN_ID" not in os.environ:
        variables["RUN_ID"] = read_wandb_id(run)
    for key, value in variables.items():
        os.environ.setdefault(f"WANDB_{key}", value)


def read_wandb_id(run: Path) -> str:
    """Read wandb's id of a run folder; the first to ask draws it."""
    # its path may be that of an earlier run, or of one in another container
    path = run / "wandb-id.txt"
    new_id = secrets.token_hex(8)
    with (
        survive_full_disk(path),
        hold_lock(run / ".wandb-id.lock", "wandb's id is being drawn", 60),
    ):
        if not path.is_file():
            write_atomically(path, new_id)
    return path.read_text() if path.is_file() else new_id


def _clean(row: JsonObject, folder: str) -> JsonObject | None:
    step = number(row.get("step"))
    attempt = number(row.get("attempt"))
    if step is None:
        return None
    # a row without an attempt is of the first one
    identity = {
        "step": int(step),
        "attempt": int(attempt or 1),
        "phase": str(row.get("phase") or folder),
    }
    figures: JsonObject = {key: number(row.get(key)) for key in FIGURES}
    for key in BY_SOURCE:
        by_source = row.get(key)
        figures[key] = by_source if isinstance(by_source, dict) else {}
    wait = figures["data_s"]
    seconds = figures["seconds"]
    figures["data_percent"] = 100 * wait / seconds if wait is not None and seconds else None
    layers = row.get("layer_grad_norm")
    norms = [number(norm) for norm in layers] if isinstance(layers, list) else []
    figures["layer_peak"] = max((norm for norm in norms if norm is not None), default=None)
    return {**row, **figures, **identity}


def _row_identity(row: JsonObject) -> tuple[Any, ...]:
    return row["phase"], row["attempt"], row["step"], row["time"]


def places_of(folder: Path) -> list[Path]:
    """Return the folder and its phases, in the order of training."""
    phases = [*sorted(folder.glob("phase*")), folder / "sft"]
    return [folder, *(place for place in phases if place.is_dir())]


def read_run(folder: Path) -> Run:
    """Read a run folder and its phase subfolders; ValueError for another folder."""
    places = places_of(folder)
    files = ("metrics.jsonl", "config.toml", "model.json")
    if not any((place / name).is_file() for place in places for name in files):
        raise ValueError(
            f"{folder} is not a run folder: it holds no metrics.jsonl, config.toml or model.json"
        )
    note = folder / NOTE
    run = Run(
        Path(os.path.abspath(folder)).name,
        note.read_text(encoding="utf-8").strip() if note.is_file() else "",
    )
    rows: list[Row] = []
    for place in places:
        # a run may hold the rows of a phase merged and in its subfolder
        identities = {_row_identity(row) for row in rows}
        of_place = _read_place(run, place, "training" if place == folder else place.name)
        rows += [row for row in of_place if _row_identity(row) not in identities]
    starts = {
        (start["phase"], int(start["attempt"])): int(start["step"])
        for start in run.attempts
        if None not in (number(start["attempt"]), number(start["step"]))
    }
    run.segments = merge_attempts(rows, starts)
    steps_before = place_on_one_axis(run.segments, run.lineages)
    by_phase = {
        phase: sorted((row for row in rows if row["phase"] == phase), key=lambda row: row["step"])
        for phase in run.phases
    }
    only = run.phases[0] if len(run.phases) == 1 else None
    for record in (*run.events, *run.evals):
        # a command that was given no --phase
        record["phase"] = record["phase"] or only
        phase = str(record["phase"])
        _place_record(record, by_phase.get(phase, []), steps_before.get(phase, 0.0))
    # checkpoints may be evaluated out of order
    run.evals.sort(key=lambda record: (record["x_step"] or 0, number(record["time"]) or 0))
    return run


def _read_place(run: Run, place: Path, name: str) -> list[Row]:
    """Add the contents of one folder to the run; return its rows."""
    config, model, lineage = (_read_object(place / file, run.problems) for file in OBJECTS)
    phase = str(config.get("phase", {}).get("name") or name)
    lines = []
    for file in LINES:
        unreadable: list[int] = []
        lines.append(read_lines(place / file, unreadable))
        if unreadable:
            run.problems.append(
                f"{place.name}/{file}: {len(unreadable)} unreadable line(s) skipped, the first is line "
                f"{unreadable[0]}"
            )
    metrics, evals, events, attempts = lines
    rows = [row for row in (_clean(row, name) for row in metrics) if row]
    if len(rows) < len(metrics):
        run.problems.append(
            f"metrics.jsonl: {len(metrics) - len(rows)} row(s) without a step skipped"
        )
    run.evals += [record for record in map(as_record, evals) if record not in run.evals]
    run.attempts += [as_record({"phase": phase, **start}) for start in attempts]
    run.events += [as_record({"phase": phase, **event}) for event in events]
    run.model = run.model or model
    for of_phases, content in ((run.lineages, lineage), (run.configs, config)):
        if content:
            of_phases.setdefault(phase, content)
    return rows


def _place_record(record: Record, rows: list[Row], steps_before: float) -> None:
    """Set `x_step`, `x_tokens` and `x_time` of an event or evaluation from its step, else its time."""
    step = number(record["step"])
    time = number(record["time"])
    record |= {"x_step": None, "x_tokens": number(record["tokens_total"]), "x_time": time}
    if step is not None:
        record["x_step"] = steps_before + step
        near = (
            rows[min(bisect.bisect_left(rows, step, key=lambda row: row["step"]), len(rows) - 1)]
            if rows
            else None
        )
    else:  # from outside the job: the supervisor, the launcher
        earlier = [row for row in rows if time is not None and (row["time"] or math.inf) <= time]
        near = max(earlier, key=lambda row: row["time"], default=None)
    if near is None:
        return
    step = near["step"] if step is None else step
    record["x_step"] = steps_before + step
    record["x_time"] = time if near["time"] is None else near["time"]
    if (
        record["x_tokens"] is None
        and None not in (near["x_tokens"], near["tokens"])
        and near["step"]
    ):
        # from the nearest row: a step has as many tokens anywhere in its phase
        record["x_tokens"] = (
            near["x_tokens"] + (step - near["step"]) * near["tokens"] / near["step"]
        )


def _read_object(path: Path, warnings: list[str]) -> JsonObject:
    try:
        content = read_sections(path) if path.suffix == ".toml" else read_json(path)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        warnings.append(f"{path.name} is unreadable: {error}")
        return {}
    return content if isinstance(content, dict) else {}
