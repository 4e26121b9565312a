"""The answers of an evaluation under way, from which an interrupted one continues."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from records.files import append_line, read_lines

WINDOW = 256  # items that a scorer may pack together, and whose answers are kept together
Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Partial:
    """The answers of an evaluation under way: a hidden file beside `out`, or nothing if `out` is None.

    kind: of its record. determines: everything that the answers depend on; those of other values are ignored.
    """

    def __init__(self, out: Path | None = None, kind: str = "", *determines: object):
        key = hashlib.sha256(repr(determines).encode()).hexdigest()[:16]
        self.path = out and out.with_name(f".{out.name}.{kind}-{key}.jsonl")
        self.answers: dict[str, list[Any]] = {}
        for line in read_lines(self.path) if self.path else ():
            self.answers.setdefault(line["name"], []).extend(line["answers"])

    def complete(
        self,
        name: str,
        items: Iterable[Item],
        answer: Callable[[Iterator[Item]], Iterator[Answer]],
        together: int = WINDOW,
    ) -> list[Answer]:
        """The answers to all items, JSON values; only those that are not known are asked for.

        answer: gives the answers to the items left, in order. together: so many are kept in one write; a scorer
        that packs a window then packs the rest as it would have in one go, so the answers are the same to the bit.
        """
        known = self.answers.setdefault(name, [])
        fresh = answer(itertools.islice(items, len(known), None))
        while window := list(itertools.islice(fresh, together)):
            if self.path is not None:
                append_line(self.path, json.dumps({"name": name, "answers": window}))
            known += window
        return known

    def remove(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)
