"""All evaluations of a run as one CSV file that the page carries within itself, as a link to save it."""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Iterator
from html import escape
from typing import Any

from records.run import Run, number

ORIGIN = ("kind", "phase", "step", "tokens_total", "protocol", "seed", "max_per_task", "not_core", "code_version")
FIGURES = ("standard_error", "centered_v1", "centered_v2", "n", "n_total", "shots")  # of a CORE task
LEFT_OUT = {*ORIGIN, "time", "checkpoint_time"}


def csv_text(run: Run) -> str:
    """One row a figure: where it comes from, its name, its value; a CORE task has a row with all of its figures."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*ORIGIN, "name", "value", *FIGURES])
    for record in run.evals:
        origin = [record.get(key) for key in ORIGIN]
        for name, value, figures in named_figures(record):
            writer.writerow([*origin, name, value, *figures])
    return file.getvalue()


def named_figures(record: dict[str, Any]) -> Iterator[tuple[str, Any, list[Any]]]:
    """(name, value, figures of a CORE task) of all numbers in a record; what lies deeper has a name with slashes."""
    core = record.get("kind") == "core"
    for name, value in record.items():
        if name in LEFT_OUT:
            continue
        if core and name == "tasks" and isinstance(value, dict):
            for task, found in value.items():
                yield task, found.get("accuracy"), [compact(found.get(key)) for key in FIGURES]
            continue
        if core and name == "missing" and isinstance(value, dict):
            yield from ((task, "missing", []) for task in value)
            continue
        yield from ((path, number_, []) for path, number_ in numbers_in(name, value))


def compact(value: Any) -> Any:
    """A standard error or a centered value needs no seventeen digits."""
    return float(f"{value:.8g}") if isinstance(value, float) else value


def numbers_in(path: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from numbers_in(f"{path}/{name}", inner)
    elif (known := number(value)) is not None:
        yield path, known


def csv_link(run: Run) -> str:
    text = base64.b64encode(csv_text(run).encode()).decode()
    name = f"{run.name.replace('/', '-')}-evals.csv"
    return f'<p class="save"><a download="{escape(name)}" href="data:text/csv;base64,{text}">All figures as CSV</a></p>'
