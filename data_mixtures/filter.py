"""The filter stage: raw Parquet of any layout -> documents.parquet with the texts worth training on, and their ids.

Texts are read as bytes, so that broken UTF-8 is counted and does not end the run. What is dropped is counted by the
first reason that holds: not_utf8, empty, too_short, too_long, contaminated (`decontaminate`). Order is kept. The bytes
of the result depend on the input and the pyarrow version alone: no dictionaries, no statistics, row groups cut by size.
Memory is bounded by a batch, whatever the size of the file.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from data_mixtures import decontaminate, recipe, shards, stage

RAW = "raw.parquet"
DOCUMENTS = "documents.parquet"
CONTAMINATION = "contamination.json"
REASONS = ("not_utf8", "empty", "too_short", "too_long", "contaminated")
SCHEMA = pa.schema([pa.field("doc_id", pa.binary(16)), pa.field("text", pa.string())])
_BATCH_BYTES = 16 << 20
_BATCH_ROWS = 8192
_ROW_GROUP_BYTES = 64 << 20
_MODULES = ("filter.py", "decontaminate.py")


@dataclass(frozen=True)
class Filter:
    """The stage over some sources of a recipe; `decontaminate.make_index` must have run before its units are done."""

    plan: recipe.Recipe
    out: Path
    sources: tuple[str, ...]
    text_columns: Mapping[str, str] = field(default_factory=dict)  # source -> column, where it is not `text`
    name: str = "filter"

    def units(self) -> list[stage.Unit]:
        return [unit for source in self.sources for unit in stage.upstream_units(self.out, self._before(source), source)]

    def key(self, unit: stage.Unit) -> str:
        _, receipt = stage.result(self.out, self._before(unit.source), unit)
        limits = {"min_chars": self.plan.filter.min_chars, "max_chars": self.plan.filter.max_chars}
        parts = (limits, self._column(unit), decontaminate.identity(self.out), receipt["files"])
        return stage.key_of(_MODULES, pa.__version__, *parts)

    def work(self, unit: stage.Unit, folder: Path) -> dict[str, Any]:
        raw = stage.result(self.out, self._before(unit.source), unit)[0] / RAW
        sieve = _Sieve(self.plan.filter.min_chars, self.plan.filter.max_chars, decontaminate.load(self.out))
        write(folder / DOCUMENTS, (sieve.kept(batch) for batch in raw_texts(raw, self._column(unit))))
        shards.write_json(folder / CONTAMINATION, sieve.contamination())
        return sieve.counts()

    def _before(self, source: str) -> str:
        found = {s.name: s for s in self.plan.sources}[source]
        return "hydrate" if getattr(found, "needs_hydration", False) else "fetch"

    def _column(self, unit: stage.Unit) -> str:
        return self.text_columns.get(unit.source, "text")
