"""filter: raw.parquet -> DIR/filter/<source>/unit-NNNNN/documents.parquet, the texts worth training on with their ids.

Texts are read as bytes, so that broken UTF-8 is counted and does not end the run. A dropped document is
counted under the first reason that holds: not_utf8, empty, too_short, too_long, contaminated (`decontaminate`). The
order is kept. The bytes written depend on the input and pyarrow's version alone: no dictionaries, no statistics, row
groups cut by size. Memory is bounded by a row group, whatever the size of the file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from data_mixtures.stages import decontaminate, stage
from data_mixtures.stages.stage import DOCUMENTS, RAW, Stage, Unit

REASONS = ("not_utf8", "empty", "too_short", "too_long", "contaminated")
SCHEMA = pa.schema([pa.field("doc_id", pa.binary(16)), pa.field("text", pa.string())])
_BATCH_BYTES, _BATCH_ROWS = 4 << 20, 4096
_ROW_GROUP_BYTES = 64 << 20
_MODULES = ("stages/filter.py", *decontaminate.CODE)


@dataclass(frozen=True)
class Filter(Stage):
    """One unit: the documents of one raw Parquet file. The benchmark index must have been built (`make_index`)."""

    name = "filter"

    def key(self, unit: Unit) -> str:
        before, column = stage.raw_text(self.out, unit)
        files = stage.made_files(self.out, before, unit)
        limits = [self.recipe.filter.min_chars, self.recipe.filter.max_chars]
        index = decontaminate.identity(self.out, self.recipe.filter.benchmarks)
        return stage.key_of(_MODULES, pa.__version__, limits, column, index, files)

    def work(self, unit: Unit, folder: Path) -> dict[str, Any]:
        before, column = stage.raw_text(self.out, unit)
        raw, _ = stage.result(self.out, before, unit)
        limits = self.recipe.filter
        chosen = DocumentFilter(limits.min_chars, limits.max_chars, decontaminate.load(self.out, limits.benchmarks))
        write(folder / DOCUMENTS, (chosen.kept(batch) for batch in raw_texts(raw / RAW, column)))
        return chosen.counts()


class DocumentFilter:
    """Keeps texts, and counts those that it drops. index: None to keep texts that hold items of benchmarks."""

    def __init__(self, min_chars: int, max_chars: int, index: decontaminate.Index | None) -> None:
        self.min_chars, self.max_chars, self.index = min_chars, max_chars, index
        self._read = self._kept = self._bytes = 0
        self._dropped = Counter(dict.fromkeys(REASONS, 0))
        self._contamination: dict[str, dict[str, Any]] = {}

    def kept(self, raw: list[bytes | None]) -> list[bytes]:
        """The texts to keep, as UTF-8, in their order."""
        self._read += len(raw)
        texts = [text for each in raw if (text := self._readable(each)) is not None]
        if self.index is not None:
            held = self.index.find(texts)
            texts = [text for text, items in zip(texts, held, strict=True) if not items]
            for items in filter(None, held):
                self._count_contaminated(items)
        encoded = [text.encode() for text in texts]
        self._kept += len(encoded)
        self._bytes += sum(map(len, encoded))
        return encoded

    def _readable(self, raw: bytes | None) -> str | None:
        try:
            text = (raw or b"").decode("utf-8")
        except UnicodeDecodeError:
            self._dropped["not_utf8"] += 1
            return None
        length = len(text.strip())
        if self.min_chars <= length and len(text) <= self.max_chars and length:
            return text
        self._dropped["empty" if not length else "too_short" if length < self.min_chars else "too_long"] += 1
        return None

    def _count_contaminated(self, items: list[tuple[str, int]]) -> None:
        self._dropped["contaminated"] += 1
        for name in {name for name, _ in items}:
            self._contamination.setdefault(name, {"documents": 0, "items": Counter()})["documents"] += 1
        for name, number in items:
            self._contamination[name]["items"][number] += 1

    def counts(self) -> dict[str, Any]:
        """For the receipt, which outlives the files: {"read", "kept", "bytes", "dropped": by reason, "contamination"}.

        contamination: {benchmark: {"documents": dropped for it, "items": {item: documents that hold it}}}
        """
        assert self._read == self._kept + self._dropped.total(), "documents read must be kept or counted as dropped"
        counts = {"read": self._read, "kept": self._kept, "bytes": self._bytes, "dropped": dict(self._dropped)}
        found = {
            name: {**each, "items": {str(number): count for number, count in sorted(each["items"].items())}}
            for name, each in sorted(self._contamination.items())
        }
        return {**counts, "contamination": found}


def raw_texts(path: Path, column: str) -> Iterator[list[bytes | None]]:
    """The column's values in batches of about 4 MiB, as the bytes that stand in the file."""
    with pq.ParquetFile(path, memory_map=True) as parquet:
        place = parquet.schema_arrow.get_field_index(column)
        if place < 0:
            raise ValueError(f"{path} has no column {column!r}; its columns: {', '.join(parquet.schema_arrow.names)}")
        for number in range(parquet.num_row_groups):
            group = parquet.metadata.row_group(number)
            columns = (group.column(i) for i in range(group.num_columns))
            size = next(each.total_uncompressed_size for each in columns if each.path_in_schema == column)
            row_bytes = size // max(group.num_rows, 1)
            rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(row_bytes, 1)))
            for batch in parquet.iter_batches(rows, row_groups=[number], columns=[column]):
                yield batch.column(0).cast(pa.large_binary()).to_pylist()


def write(path: Path, batches: Iterable[list[bytes]]) -> None:
    """documents.parquet: `doc_id`, xxh3_128 of the text big-endian, and `text`; valid UTF-8 is taken for granted."""
    options = {"compression": "zstd", "compression_level": 3, "use_dictionary": False, "write_statistics": False}
    with pq.ParquetWriter(path, SCHEMA, **options) as writer:
        for group in stage.grouped(batches, lambda batch: sum(map(len, batch)), _ROW_GROUP_BYTES):
            texts = [text for batch in group for text in batch]
            ids = pa.array([xxhash.xxh3_128_digest(text) for text in texts], pa.binary(16))
            strings = pa.Array.from_buffers(pa.string(), len(texts), pa.array(texts, pa.binary()).buffers())
            writer.write_table(pa.Table.from_arrays([ids, strings], schema=SCHEMA), row_group_size=len(texts))
