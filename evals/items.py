"""The answer to each item of an evaluation, a compressed file next to the records: for paired
errors and for reading.

Line 1 says what was asked of whom; each further line is an item: task, item (its number in the task), right
(null where it is neither; for code the share of its samples that pass), losses (nats per token of every
option, null for one without a token), and for CORE gold, nats and bytes of the right answer.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from records.files import JsonObject, json_lines, write_atomically

FOLDER = "items"  # next to evals.jsonl


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
