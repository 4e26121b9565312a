"""Where a document came from, and consecutive items in groups of about one size."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

T = TypeVar("T")
ORIGIN_FIELDS = ("id", "url", "repo", "commit_id", "path", "rel_path", "license")


def origin(file: str, row: int, fields: Mapping[str, Any]) -> str:
    """Where a document came from, as JSON: its file, its row from 0 (of JSON lines, Parquet), its fields."""
    known = {name: fields[name] for name in ORIGIN_FIELDS if fields.get(name) is not None}
    given = {"file": file, "row": row, **known}
    said = json.dumps(given, ensure_ascii=False, separators=(",", ":"), default=str)
    return said.encode(errors="replace").decode()  # JSON lines may hold lone surrogates, which UTF-8 cannot


def grouped(items: Iterable[T], size_of: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Consecutive items in lists; each ends with the item that brings its total size to the limit."""
    group: list[T] = []
    size = 0
    for item in items:
        group.append(item)
        size += size_of(item)
        if size >= limit:
            yield group
            group, size = [], 0
    if group:
        yield group
