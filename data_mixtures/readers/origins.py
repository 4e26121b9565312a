"""Where a document came from, and consecutive items in groups of about one size."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

T = TypeVar("T")
_encoded = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=str).encode
ORIGIN_FIELDS = ("id", "url", "repo", "commit_id", "path", "rel_path", "license")


def origin(file: str, row: int, fields: Mapping[str, Any]) -> str:
    """Where a document came from, as JSON: its file, its row from 0 (of JSON lines, Parquet), its fields."""
    text = f'{{"file":{_encoded(file)},"row":{row}'
    for name in ORIGIN_FIELDS if fields else ():
        if (value := fields.get(name)) is not None:
            text += f',"{name}":{_encoded(value)}'
    whole = f"{text}}}"
    return whole.encode(errors="replace").decode()  # JSON lines may hold lone surrogates, which UTF-8 cannot


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
