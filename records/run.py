"""A run folder as one object: logged steps in the order in which they count,
evaluations, events, configs, attempts.

A run folder holds metrics.jsonl, evals.jsonl, config.toml and model.json itself, or in one subfolder per
phase (phase1/, phase2/), or both. The files of a running job are read as they are: a half-written last
line is skipped, missing values are None. Of a step that was logged again after a rollback or a resume,
the last row counts.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from records.attempts import Row, Segment, merge_attempts, place_on_one_axis, place_row
from records.files import JsonObject, Tail, read_json
from records.job import read_sections

FIGURES = (
    "loss", "lr", "grad_norm", "tokens", "tokens_total", "tokens_per_s", "tokens_per_s_per_device", "mfu", "time",
    "seconds", "data_s", "loss_z", "grad_norm_z", "checkpoint_s", "checkpoint_total_s", "memory_gib", "valid_loss",
    "z_loss", "max_logit",
)  # fmt: skip
BY_SOURCE = (  # {source: figure}, of positions {source: {first position of an octave: figure}}
    "loss_by_source",
    "valid_loss_by_source",
    "valid_loss_by_position",
    "tokens_by_source",
)
LINES = ("metrics.jsonl", "evals.jsonl", "events.jsonl", "attempts.jsonl")
OBJECTS = ("config.toml", "model.json", "lineage.json")
NOTE = "note.txt"


class Record(dict[str, Any]):
    """A line of a run's file and the objects in it: `record["name"]` is None where the file does not say it."""

    def __missing__(self, key: str) -> None:
        return None


def as_record(line: dict[str, Any]) -> Record:
    """JSON values whose objects are Records."""
    return json.loads(json.dumps(line), object_hook=Record)


@dataclass
class Run:
    """One run, all phases."""

    name: str
    folder: Path = Path()
    note: str = ""  # note.txt: what the page says under the name
    segments: list[Segment] = field(default_factory=list)
    evals: list[Record] = field(default_factory=list)
    attempts: list[Record] = field(default_factory=list)
    events: list[Record] = field(default_factory=list)  # with `phase`, and `x_step` and `x_tokens` or None
    configs: dict[str, JsonObject] = field(default_factory=dict)
    model: JsonObject = field(default_factory=dict)
    lineages: dict[str, JsonObject] = field(default_factory=dict)  # by phase
    origins: dict[str, tuple[float, float]] = field(default_factory=dict)  # (steps, tokens) before each phase
    problems: list[str] = field(default_factory=list)  # of its files
    without_loss: list[str] = field(default_factory=list)  # rows that count
    half_life: int = 0  # rows; of the means that a reader of the run sets, 0: none yet
    means: dict[str, dict[Any, Any]] = field(default_factory=dict)  # by phase; where that reader goes on

    @property
    def warnings(self) -> list[str]:
        steps = self.without_loss
        more = f" and {len(steps) - 5} more" if len(steps) > 5 else ""
        told = f"the loss is not a finite number at {', '.join(steps[:5])}{more}"
        return [*self.problems, *([told] if steps else [])]

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


def stamp(folders: Iterable[Path], names: Sequence[str] = (*LINES, *OBJECTS, NOTE)) -> tuple[Any, ...]:
    """Names, sizes and modification times of what `read_run` reads: equal if nothing has changed."""
    files = [place / name for folder in folders for place in places_of(folder) for name in names]
    return tuple((str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files if f.is_file())


def read_run(folder: Path) -> Run:
    """Read a run folder and its phase subfolders. Raises ValueError for a folder without any file of a run."""
    return Following(folder).read()


class Following:
    """A run folder that is read again and again: at each time what was appended is read, and the same Run grows.

    What is more than the next rows of the last attempt, evaluations and events (a restart, another config, a
    file that was replaced) makes a new Run of all files.
    """

    def __init__(self, folder: Path):
        self.folder, self.run = folder, Run("")
        self.tails: dict[Path, Tail] = {}
        self.stamp: tuple[Any, ...] = ()
        self.place, self.phases = folder, dict[Path, str]()  # of the last row; the name of each place's phase

    def read(self, whole: bool = False) -> Run:
        """The run as it is now; whole: a new Run. Raises ValueError for a folder without any file of a run."""
        started = stamp([self.folder], (*OBJECTS, NOTE, "attempts.jsonl"))
        if whole or not self.tails or started != self.stamp or not self._read_on():
            self.stamp, self.tails = started, {}
            self.run = self._read_all()
        return self.run

    def _read_all(self) -> Run:
        places = places_of(self.folder)
        files = ("metrics.jsonl", "config.toml", "model.json")
        if not any((place / name).is_file() for place in places for name in files):
            raise ValueError(
                f"{self.folder} is not a run folder: it holds no metrics.jsonl, config.toml or model.json"
            )
        note = self.folder / NOTE
        told = note.read_text(encoding="utf-8").strip() if note.is_file() else ""
        run = Run(self.folder.resolve().name, self.folder, told)
        rows: list[Row] = []
        for place in places:
            name = "training" if place == self.folder else place.name
            new = self._read_place(run, place, name, {_key(row) for row in rows})
            self.place = place if new else self.place
            rows += new
        starts = {(a["phase"], int(n)): int(s) for a in run.attempts if (n := number(a["attempt"])) is not None
                  and (s := number(a["step"])) is not None}  # fmt: skip
        run.segments = merge_attempts(rows, starts)
        run.origins = place_on_one_axis(run.segments, run.lineages)
        by_step = {
            p: sorted((r for r in rows if r["phase"] == p), key=lambda r: r["step"]) for p in run.phases
        }
        for event in run.events:
            _place_event(event, by_step.get(event["phase"], []))
        run.without_loss = [name_of(row) for row in run.kept_rows if lacks_loss(row)]
        return run

    def _read_place(self, run: Run, place: Path, name: str, elsewhere: set[tuple[Any, ...]]) -> list[Row]:
        """Add the contents of one folder to the run; returns its rows except those already read elsewhere.

        A run may hold the rows of its phases twice: in subfolders, and merged.
        """
        config, model, lineage = (_read_object(place / file, run.problems) for file in OBJECTS)
        phase = self.phases[place] = str(config.get("phase", {}).get("name") or name)
        lines = []
        for file in LINES:
            tail = self.tails[place / file] = Tail(place / file)
            lines.append(tail.read()[-1])
            if bad := tail.unreadable:
                run.problems.append(
                    f"{place.name}/{file}: {len(bad)} unreadable line(s) skipped, the first is line {bad[0]}"
                )
        metrics, evals, events, attempts = lines
        clean = [row for row in (_clean(row, name) for row in metrics) if row]
        if len(clean) < len(metrics):
            run.problems.append(f"metrics.jsonl: {len(metrics) - len(clean)} row(s) without a step skipped")
        run.evals += [as_record(record) for record in evals if record not in run.evals]
        run.attempts += [as_record({"phase": phase, **start}) for start in attempts]
        run.events += [as_record({"phase": phase, **event}) for event in events]
        run.model = run.model or model
        for of_phases, found in ((run.lineages, lineage), (run.configs, config)):
            if found:
                of_phases.setdefault(phase, found)
        return [row for row in clean if _key(row) not in elsewhere]

    def _read_on(self) -> bool:
        """Read what was appended; False if it is not just more of the same."""
        if {tail.path for tail in self.tails.values()} != {
            p / f for p in places_of(self.folder) for f in LINES
        }:
            return False
        bad = [len(tail.unreadable) for tail in self.tails.values()]
        found = {path: tail.read() for path, tail in self.tails.items()}
        if bad != [len(tail.unreadable) for tail in self.tails.values()]:
            return False
        for path, (void, withdrawn, lines) in found.items():
            rows = path.name == "metrics.jsonl"
            if void or (withdrawn and not rows) or (lines and rows and path.parent != self.place):
                return False
            if rows and not self._extend(lines, withdrawn):
                return False
        last = self.run.kept_rows[-1:]
        for path, (_, _, lines) in found.items():
            if path.name == "evals.jsonl":
                self.run.evals += [as_record(record) for record in lines if record not in self.run.evals]
            elif path.name == "events.jsonl" and lines:
                if not last or last[0]["phase"] != self.phases[path.parent]:
                    return False
                for event in lines:
                    self.run.events.append(as_record({"phase": last[0]["phase"], **event}))
                    _place_event(self.run.events[-1], last)
        return True

    def _extend(self, lines: list[JsonObject], withdrawn: bool) -> bool:
        """Add the rows that follow the last one, or stand in its place; False if another attempt wrote them."""
        segment = self.run.segments[-1] if self.run.segments else Segment("", 0, False, [])
        if withdrawn and segment.rows:
            gone = segment.rows.pop()
            segment.logged -= 1
            self.run.without_loss = [name for name in self.run.without_loss if name != name_of(gone)]
        for line in lines:
            row, last = _clean(line, segment.phase), segment.rows[-1] if segment.rows else None
            if not (row and last and segment.kept) or row["step"] <= last["step"]:
                return False
            if (row["phase"], row["attempt"]) != (segment.phase, segment.attempt):
                return False
            row["kept"] = True
            place_row(row, self.run.origins[segment.phase])
            segment.append(row)
            self.run.without_loss += [name_of(row)] if lacks_loss(row) else []
        return bool(segment.rows) or not withdrawn


def name_of(row: Row) -> str:
    return f"{row['phase']} step {row['step']:,}"


def lacks_loss(row: Row) -> bool:
    return row["loss"] is None and "averaged" not in row


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
