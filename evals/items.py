"""The answers of an evaluation under way, from which an interrupted one continues."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

from records.files import append_line, read_lines

WINDOW = 256  # items that a scorer may pack together, and whose answers are kept together
Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Partial:
    """A file of JSON lines {"name", "answers"}; nothing is kept if `path` is None."""

    def __init__(self, path: Path | None = None):
        self.path = path
        self._appending = Lock()
        self.answers: dict[str, list[Any]] = {}
        for line in read_lines(path) if path else ():
            self.answers.setdefault(line["name"], []).extend(line["answers"])

    def complete(
        self,
        name: str,
        items: Iterable[Item],
        answer: Callable[[Iterator[Item]], Iterable[Answer]],
        together: int = WINDOW,
    ) -> list[Answer]:
        """Return the answers to all items; only those that are not known are asked for.

        Args:
            answer: gives the answers to the items left, in order.
            together: answers of one write.
        """
        answers = self.answers.setdefault(name, [])
        # answers come in the order of the items, so the first ones are those that are there
        fresh = iter(answer(itertools.islice(items, len(answers), None)))
        # after an interruption a scorer packs the same windows, so answers are the same to the bit
        while window := list(itertools.islice(fresh, together)):
            if self.path is not None:
                with self._appending:
                    append_line(self.path, json.dumps({"name": name, "answers": window}))
            answers += window
        return answers

    def remove(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def open_partial(out: Path | None, kind: str, *determines: object) -> Partial:
    """Open a hidden file beside the records, named by everything that the answers depend on."""
    key = hashlib.sha256(repr(determines).encode()).hexdigest()[:16]
    return Partial(out and out.with_name(f".{out.name}.{kind}-{key}.jsonl"))
