"""The 22 tasks of CORE (DCLM, https://arxiv.org/abs/2406.11794) as data, and the bundle they are read from.

DCLM corrected three baselines in September 2025: v1 is what older figures, and nanochat's, use, v2 what holds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from data_mixtures.readers.local import json_objects
from records.files import JsonObject, read_lines

TaskType = Literal["multiple_choice", "schema", "language_modeling"]
Row = JsonObject


@dataclass(frozen=True)
class Task:
    """One task. delimiter: text between query and answer. by_category: average over
    the rows' categories (dclm).
    """

    label: str
    category: str
    type: TaskType
    shots: int
    baseline_v1: float  # percent
    baseline_v2: float
    path: str  # under eval_data
    delimiter: str = " "
    by_category: bool = False


TASKS = tuple(Task(**row) for row in read_lines(Path(__file__).with_suffix(".jsonl")))
CATEGORIES = tuple(dict.fromkeys(task.category for task in TASKS))
NOT_CHOSEN = "not chosen by --tasks"
WHERE_FROM = (
    "scripts/eval/local_data of mosaicml/llm-foundry (or from nanochat's eval_bundle.zip, unpacked)"
)
FIELDS: dict[TaskType, dict[str, type]] = {
    "multiple_choice": {"query": str, "choices": list, "gold": int},
    "schema": {"context_options": list, "continuation": str, "gold": int},
    "language_modeling": {"context": str, "continuation": str},
}


class Bundle:
    """A local folder with the rows of the tasks, in the layout of llm-foundry or nanochat.

    Attributes:
        differs: settings of core.yaml that are not CORE's.
        not_core: text of the file NOT_CORE, which marks other rows.
    """

    def __init__(self, folder: Path):
        """Raise ValueError if the folder holds no task, or its core.yaml cannot be read."""
        self.folder = folder
        inner = [folder / name for name in ("eval_data", "local_data") if (folder / name).is_dir()]
        self.root = inner[0] if inner else folder
        marked = folder / "NOT_CORE"
        self.not_core = (
            marked.read_text(encoding="utf-8").strip() or marked.name if marked.is_file() else None
        )
        self.differs: dict[str, JsonObject] = {}
        self.tasks = TASKS
        # its paths, shots and delimiters apply; baselines are CORE's, whatever an
        # eval_meta_data.csv says
        if (folder / "core.yaml").is_file():
            entries = read_core_yaml(folder / "core.yaml")
            # a task that core.yaml does not list may have its file nevertheless
            self.tasks = tuple(
                self._as_configured(t, entries[t.label]) if t.label in entries else t for t in TASKS
            )
        if not any(self.file(task).is_file() for task in self.tasks):
            raise ValueError(
                f"{folder} holds none of CORE's tasks, such as {self.file(TASKS[0])}; copy the folders of {WHERE_FROM}"
            )

    def file(self, task: Task) -> Path:
        return self.root / task.path

    def missing(self, task: Task) -> str | None:
        """Return why a task cannot be scored and how to fix it; None if its file exists."""
        if self.file(task).is_file():
            return None
        return f"{self.file(task)} is missing; copy {task.path} there, from {WHERE_FROM}"

    def sha256(self, task: Task) -> str:
        """Hash a task's rows and the settings that core.yaml can change."""
        digest = hashlib.sha256(repr((task.type, task.shots, task.delimiter)).encode())
        digest.update(self.file(task).read_bytes())
        return digest.hexdigest()

    def rows(self, task: Task) -> list[Row]:
        """Read the rows of a task in file order; ValueError names the first line that is none."""
        path = self.file(task)
        lines = json_objects(path)
        rows = [check_row(row, task.type, f"{path}:{number}") for number, row in lines]
        if not rows:
            raise ValueError(f"{path} is empty; copy it again, from {WHERE_FROM}")
        return rows

    def choose(self, labels: Iterable[str]) -> tuple[list[Task], dict[str, str]]:
        """Return the tasks to score, and the reason for each that is not."""
        requested = set(labels)
        chosen = []
        reasons = {}
        for task in self.tasks:
            reason = self.missing(task) or (None if task.label in requested else NOT_CHOSEN)
            if reason is None:
                chosen.append(task)
            else:
                reasons[task.label] = reason
        return chosen, reasons

    def _as_configured(self, task: Task, entry: JsonObject) -> Task:
        shots = entry.get("num_fewshot", task.shots)
        path = (
            str(entry.get("dataset_uri", task.path))
            .removeprefix("local_data/")
            .removeprefix("eval_data/")
        )
        values = {
            "type": entry.get("icl_task_type", task.type),
            "shots": int(shots[0] if isinstance(shots, list) else shots),
            "delimiter": entry.get("continuation_delimiter", " "),
        }
        if values["type"] not in FIELDS:
            raise ValueError(
                f"core.yaml: {task.label}: icl_task_type = {values['type']!r}; choose from {list(FIELDS)}"
            )
        changed = {name: value for name, value in values.items() if value != getattr(task, name)}
        if changed:
            self.differs[task.label] = changed
        return replace(task, path=path, **values)


def read_core_yaml(path: Path) -> dict[str, JsonObject]:
    """Return the first entry of each label."""
    import yaml

    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))["icl_tasks"]
        return {entry.get("label"): entry for entry in reversed(entries)}
    except (yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} has no list icl_tasks: {error!r}") from None


def check_row(row: Any, type_: TaskType, where: str) -> Row:
    """Return the row; ValueError if it is not a row of the task's type."""
    for name, kind in FIELDS[type_].items():
        if not isinstance(row, dict) or type(row.get(name)) is not kind:
            raise ValueError(f"{where}: a {type_} row needs {name!r} of type {kind.__name__}")
    if type_ != "language_modeling":
        options = row["choices" if type_ == "multiple_choice" else "context_options"]
        if len(options) < 2 or not all(isinstance(option, str) for option in options):
            raise ValueError(
                f"{where}: at least two options are needed, each a text, not {options!r}"
            )
        if not 0 <= row["gold"] < len(options):
            raise ValueError(
                f"{where}: gold = {row['gold']} is not the index of one of {len(options)} options"
            )
    elif not row["continuation"]:
        raise ValueError(f"{where}: the continuation is empty, so there is nothing to predict")
    return row
