"""JSON lines, gzipped or not: one object a line."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from records.files import json_lines


def objects(path: Path) -> Iterator[tuple[int, Any]]:
    """(number from 1, value) of every line that is not blank. ValueError: a line that is not JSON, or a broken .gz."""
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        try:
            yield from json_lines(file, path)
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise ValueError(f"{path} is damaged or truncated: {error}") from error


def texts(path: Path, field: str) -> Iterator[str]:
    """The text of every line; null counts as empty. ValueError names a line where it is missing or no string."""
    for number, row in objects(path):
        if not isinstance(row, dict) or field not in row:
            known = f"its fields: {', '.join(row)}" if isinstance(row, dict) else f"it is {type(row).__name__}"
            raise ValueError(f"{path}:{number}: has no {field!r}; {known}. Set `field` of the input")
        if not isinstance(row[field], str | None):
            raise ValueError(f"{path}:{number}: {field!r} is {type(row[field]).__name__}, it must be a string")
        yield row[field] or ""
