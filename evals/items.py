"""The answer to each item of an evaluation, a compressed file next to the records: for paired
errors and for reading. And those of an evaluation under way, from which an interrupted one continues.

Line 1 says what was asked of whom; each further line is an item: task, item (its number in the task), right
(null where it is neither; for code the share of its samples that pass), losses (nats per token of every
option, null for one without a token), and for CORE gold, nats and bytes of the right answer.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from records.files import JsonObject, append_line, json_lines, read_lines, write_atomically

FOLDER = "items"  # next to evals.jsonl
WINDOW = 256  # items that a scorer may pack together, and whose answers are kept together
Item = TypeVar("Item")
Answer = TypeVar("Answer")


def write_items(out: Path | None, head: JsonObject, items: Iterable[JsonObject]) -> str | None:
    """Write the file and return its path relative to the folder of `out`; None: there is none.

    head: kind, step and data_sha256, which name the file; protocol and all else that two files must share.
    """
    if out is None:
        return None
    text = "".join(json.dumps(line) + "\n" for line in (head, *items)).encode()
    name = f"{head['kind']}-{head['step'] or 0}-{hashlib.sha256(text).hexdigest()[:12]}.jsonl.gz"
    (out.parent / FOLDER).mkdir(parents=True, exist_ok=True)
    write_atomically(out.parent / FOLDER / name, gzip.compress(text, mtime=0))
    return f"{FOLDER}/{name}"


def read_items(path: Path) -> tuple[JsonObject, dict[tuple[str, int], JsonObject]]:
    """(head, {(task, item): line}). Raises ValueError for a file that is none."""
    try:
        lines = gzip.decompress(path.read_bytes()).splitlines()
        (_, head), *rest = json_lines(lines, path)
        return head, {(line["task"], line["item"]): line for _, line in rest}
    except (OSError, EOFError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is no file of items ({error}); records name them, in their field items"
        ) from None


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
