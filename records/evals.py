"""evals.jsonl, one JSON object per evaluation, and the type of a command that appends to it.

A record carries what is needed to trust or repeat its figures. It is one line, written by one call and flushed to disk,
so that concurrent evaluations cannot mix their lines and a line that a crash cut short spoils only itself.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import time
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from records.files import append_line, code_version

PROVENANCE = (
    "kind", "step", "tokens_total", "phase", "time", "seconds", "code_version", "tokenizer_sha256", "data_sha256",
)  # fmt: skip


@dataclass(frozen=True)
class About:
    """Options of every evaluation: where its record goes and which checkpoint it is about."""

    out: Path | None = None
    """file to append the record to, such as runs/demo/evals.jsonl"""
    step: int | None = None
    """training step of the checkpoint, for the record"""
    tokens_total: int | None = None
    """training tokens of the checkpoint, earlier phases included, for the record"""
    phase: str | None = None
    """phase of the checkpoint, for the record"""

    def append(self, kind: str, figures: dict[str, Any], **provenance: Any) -> dict[str, Any]:
        """`append_record` with these options."""
        return append_record(
            self.out, kind, figures, step=self.step, tokens_total=self.tokens_total, phase=self.phase, **provenance
        )

    def flags(self) -> list[str]:
        """These options as command-line arguments."""
        given = {flag(f.name): getattr(self, f.name) for f in dataclasses.fields(self)}
        return [part for name, value in given.items() if value is not None for part in (name, str(value))]


NOWHERE = About()
AboutFlags = Annotated[About, tyro.conf.OmitArgPrefixes]  # --out, --step, ... as flags of the command itself


@dataclass(frozen=True)
class EvalCommand:
    """A module of evals/ that runs as `python -m evals.NAME`; it declares `COMMAND = EvalCommand(...)`.

    kind: kind of the records that it appends. main: its signature is the command line (tyro), it returns the appended
    record or None. If it evaluates a model, it takes the folder as positional argument, AboutFlags and `device`.
    needs: options that a checkpoint's evaluation requires, though main has defaults for them. excludes: options that it
    cannot have. per_step: options whose value must contain {step}, such as a folder of one checkpoint's answers.
    """

    kind: str
    main: Callable[..., dict[str, Any] | None]
    needs: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    per_step: tuple[str, ...] = ()

    def run(self) -> None:
        """The module's command line: prints the record as one JSON line, and a ValueError as one line."""
        try:
            record = tyro.cli(self.main)
        except ValueError as error:
            raise SystemExit(f"{self.kind}: {error}") from None
        if record is not None:
            print(json.dumps(record))

    def arguments(self, folder: Path, options: Sequence[str], about: About, device: str) -> list[str]:
        """Arguments that evaluate a model folder. `{step}` in an option is replaced; device "auto" is left out."""
        chosen = [option.replace("{step}", str(about.step)) for option in options]
        return [str(folder), *chosen, *about.flags(), *(["--device", device] if device != "auto" else [])]

    def options(self) -> list[Option]:
        """What main takes."""
        hints = typing.get_type_hints(self.main, include_extras=True)
        parameters = inspect.signature(self.main).parameters.values()
        return [o for p in parameters for o in _options(p.name, hints[p.name], p.default is inspect.Parameter.empty)]


@dataclass(frozen=True)
class Option:
    """An argument of a command."""

    flag: str
    required: bool
    positional: bool


def flag(name: str) -> str:
    """The command-line flag of a parameter."""
    return f"--{name.replace('_', '-')}"


def _options(name: str, hint: Any, required: bool) -> Iterator[Option]:
    """The options of a parameter: one, or one per field of a dataclass."""
    kind, *marks = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind, include_extras=True)
        for field in dataclasses.fields(kind):
            bare = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            yield from _options(field.name, hints[field.name], bare and required)
        return
    named = next((mark.name for mark in marks if getattr(mark, "name", None)), name)
    yield Option(flag(named), required, any(mark is tyro.conf.Positional for mark in marks))


def append_record(
    path: Path | None,
    kind: str,
    figures: dict[str, Any],
    *,
    seconds: float,
    tokenizer_sha256: str | None,
    data_sha256: str | None,
    step: int | None = None,
    tokens_total: int | None = None,
    phase: str | None = None,
) -> dict[str, Any]:
    """Append an evaluation to `path` (None: to no file) and return the record.

    figures: results of this kind of evaluation. seconds: wall time of the evaluation. step, tokens_total, phase: the
    evaluated checkpoint, None if unknown. Raises ValueError if a figure has a name of PROVENANCE, and for NaN or
    infinity: a figure that could not be measured is left out or null.
    """
    taken = sorted(set(figures) & set(PROVENANCE))
    if taken:
        raise ValueError(f"figures of {kind!r} use the provenance names {taken}; rename these figures")
    values = (kind, step, tokens_total, phase, time.time(), round(seconds, 3), code_version(Path(__file__).parent))
    record = dict(zip(PROVENANCE, (*values, tokenizer_sha256, data_sha256), strict=True)) | figures
    try:
        line = json.dumps(record, allow_nan=False)
    except ValueError as error:
        raise ValueError(
            f"the record of {kind!r} holds NaN or infinity, which JSON cannot represent: {record}"
        ) from error
    if path is not None:
        append_line(path, line)
    return record
