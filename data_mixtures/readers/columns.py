"""Columns of Parquet files: which of them hold text, and where a row came from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

ORIGIN_FIELDS = ("id", "url", "repo", "commit_id", "path", "rel_path", "license")
_TEXT = (
    pa.string(),
    pa.large_string(),
    pa.string_view(),
    pa.binary(),
    pa.large_binary(),
    pa.binary_view(),
)
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=str).encode


def holds_text(kind: pa.DataType) -> bool:
    """Return whether values of an Arrow type are strings, or bytes that may be UTF-8."""
    # categories of pandas and Polars, and types such as arrow.json, keep their text one level below
    while isinstance(kind, pa.BaseExtensionType | pa.DictionaryType):
        is_dictionary = isinstance(kind, pa.DictionaryType)
        kind = kind.value_type if is_dictionary else kind.storage_type
    return kind in _TEXT


def origin_columns(schema: pa.Schema) -> list[str]:
    """Return the ORIGIN_FIELDS that a file has; a name of two columns does not count."""
    return [name for name in ORIGIN_FIELDS if schema.names.count(name) == 1]


def encode_origin(file: str, row: int, fields: Mapping[str, Any]) -> str:
    """Return where a document came from, as JSON: its file, its row from 0, its ORIGIN_FIELDS."""
    text = f'{{"file":{_encode(file)},"row":{row}'
    for name in ORIGIN_FIELDS if fields else ():
        if (value := fields.get(name)) is not None:
            text += f',"{name}":{_encode(value)}'
    # JSON lines may hold lone surrogates, which UTF-8 cannot
    return f"{text}}}".encode(errors="replace").decode()


def read_values(column: pa.Array) -> list[Any]:
    """Read a column; strings of a Parquet file that are not UTF-8 get replacement characters."""
    raw = column.cast(pa.large_binary()) if holds_text(column.type) else column
    return [
        value.decode(errors="replace") if isinstance(value, bytes) else value
        for value in raw.to_pylist()
    ]
