"""filter: raw.parquet -> DIR/filter/<source>/unit-NNNNN/documents.parquet, the texts kept, with ids.

A dropped document is counted under the first reason that holds: not_utf8, too_long, empty or too_short,
those of the steps (`quality`) up to the last one that changes text, not_kept (`keep`), contaminated
(`decontaminate`), those of the other steps. The order is kept, and memory is bounded by a row group.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from data_mixtures.document_ids import shuffle_key
from data_mixtures.readers.columns import encode_origin, origin_columns, read_values
from data_mixtures.readers.local import group_by_size
from data_mixtures.recipe import Recipe
from data_mixtures.shards import Json
from data_mixtures.stages import decontaminate, quality, stage
from data_mixtures.stages.quality import Step
from data_mixtures.stages.stage import DOCUMENTS, RAW, Stage, Unit

REASONS = ("not_utf8", "empty", "too_short", "too_long", "not_kept", "contaminated")
SCHEMA = pa.schema([("doc_id", pa.binary(16)), ("text", pa.string()), ("origin", pa.string())])
ORIGIN = "origin"  # a column of raw.parquet where the file's own rows are not those of the input
_BATCH_ROWS = 1024
_ROW_GROUP_BYTES = 64 << 20


@dataclass(frozen=True)
class Filter(Stage):
    """The stage `filter`; `make_index` must have built the benchmark index before."""

    name = "filter"

    def result_key(self, unit: Unit) -> str:
        entry = stage.find_unit_plan(self.out, unit)
        files = stage.receipt_of(self.out, "fetch", unit)["files"]
        recipe = self.recipe
        keep = recipe.source(unit.source).keep
        limits = [recipe.filter.min_chars, recipe.filter.max_chars, recipe.max_document_chars]
        part = [keep, recipe.seed] if keep < 1 else []
        index = decontaminate.identity(self.out, recipe.filter.benchmarks)
        steps = quality.identity(quality.steps_of(recipe, unit.source))
        inputs = [_text_column(entry), index, entry.get("path"), self._rows_before(unit)]
        return stage.key_of(self.name, limits, part, steps, *inputs, files)

    def make(self, unit: Unit, folder: Path) -> Json:
        raw = stage.check_file(self.out, "fetch", unit, RAW)
        index = decontaminate.load(self.out, self.recipe.filter.benchmarks)
        steps = quality.load(quality.steps_of(self.recipe, unit.source))
        chosen = DocumentFilter(self.recipe, index, self.recipe.source(unit.source).keep, steps)
        entry = stage.find_unit_plan(self.out, unit)
        batches = read_raw(raw, _text_column(entry), entry.get("path"), self._rows_before(unit))
        write(folder / DOCUMENTS, (chosen.select(batch) for batch in batches))
        return chosen.counts()

    def _rows_before(self, unit: Unit) -> int:
        """Return how many rows of the unit's file are in earlier units."""
        entry = stage.find_unit_plan(self.out, unit)
        if not entry.get("range", [0])[0]:
            return entry.get("first_row", 0)
        units = stage.find_plan(self.out, unit.source)["units"][: unit.number]
        lines = 0
        for earlier in units:
            if "range" in earlier and earlier["files"] == entry["files"]:
                part = Unit(unit.source, earlier["number"])
                lines += stage.receipt_of(self.out, "fetch", part)["counts"]["lines"]
        return lines


def _text_column(entry: Json) -> str:
    return entry.get("text_column", "text")


Row = tuple[bytes | None, str]  # a text as the bytes that stand in a raw file, and its origin


class Document(NamedTuple):
    """A text in the filter; `utf8` is empty after a change of the text."""

    origin: str
    text: str
    utf8: bytes = b""
    identity: bytes = b""


class DocumentFilter:
    """Select texts and count those dropped.

    Args:
        index: None to keep texts that hold benchmark items.
    """

    def __init__(
        self,
        recipe: Recipe,
        index: decontaminate.Index | None = None,
        keep: float = 1.0,
        steps: Sequence[Step] = (),
    ) -> None:
        self.recipe = recipe
        self.limits = recipe.filter
        self.index = index
        self.below = keep * 2**64
        # steps up to the last one that changes text run before not_kept, which is judged by the
        # final text
        changing = max((place + 1 for place, step in enumerate(steps) if step.changes), default=0)
        self.before = steps[:changing]
        self.after = steps[changing:]
        self._read = self._cut = self._kept = self._bytes = self._nuls = 0
        self._dropped = Counter(dict.fromkeys(REASONS, 0))
        self._contamination: dict[str, Json] = {}

    def select(self, rows: Sequence[Row]) -> list[tuple[bytes, bytes, str]]:
        """Return (id, text as UTF-8, origin) of the documents to keep, in order."""
        self._read += len(rows)
        pieces = [piece for raw, origin in rows for piece in self._pieces(origin, raw or b"")]
        final = self._choose_documents(self._through(self.before, pieces))
        documents = self._through(self.after, self._clean(final))
        output = [(identity, utf8, origin) for origin, _, utf8, identity in documents]
        self._kept += len(output)
        self._bytes += sum(len(utf8) for _, utf8, _ in output)
        return output

    def _pieces(self, origin: str, raw: bytes) -> list[Document]:
        # rows come as bytes, so that broken UTF-8 is counted and does not end the run
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            self._dropped["not_utf8"] += 1
            return []
        if b"\0" in raw:
            self._nuls += 1
            raw = raw.replace(b"\0", b"")
            text = raw.decode()
        if len(text) > self.limits.max_chars and text.strip():
            self._dropped["too_long"] += 1
            return []
        # documents stay whole unless the recipe sets a limit; each piece is then a document
        limit = self.recipe.max_document_chars
        pieces = [text] if limit is None else list(cut(text, limit))
        self._cut += len(pieces) - 1
        utf8 = raw if len(pieces) == 1 else b""
        return [Document(origin, piece, utf8) for piece in pieces if self._long_enough(piece)]

    def _long_enough(self, text: str) -> bool:
        length = len(text.strip())
        if not length or length < self.limits.min_chars:
            self._dropped["too_short" if length else "empty"] += 1
            return False
        return True

    def _through(self, steps: Sequence[Step], documents: list[Document]) -> list[Document]:
        remaining = []
        for document in documents if steps else ():
            text = document.text
            reason = None
            for step in steps:
                text, reason = step(text)
                if reason is not None:
                    self._dropped[reason] += 1
                    break
            if text != document.text:
                document = Document(document.origin, text)
            # a text that a step changed must be long enough again
            if reason is None and (document.utf8 or self._long_enough(text)):
                remaining.append(document)
        return remaining if steps else documents

    def _choose_documents(self, documents: list[Document]) -> list[Document]:
        chosen = []
        for origin, text, utf8, _ in documents:
            utf8 = utf8 or text.encode()
            identity = xxhash.xxh3_128_digest(utf8)
            # keep those that the shuffle would put first
            if self.below >= 2**64 or shuffle_key(identity, self.recipe.seed) < self.below:
                chosen.append(Document(origin, text, utf8, identity))
        self._dropped["not_kept"] += len(documents) - len(chosen)
        return chosen

    def _clean(self, documents: list[Document]) -> list[Document]:
        if self.index is None:
            return documents
        matches = self.index.find([document.text for document in documents])
        for items in filter(None, matches):
            self._dropped["contaminated"] += 1
            for name in {name for name, _ in items}:
                self._contamination.setdefault(name, {"documents": 0, "items": Counter()})[
                    "documents"
                ] += 1
            for name, number in items:
                self._contamination[name]["items"][number] += 1
        return [document for document, items in zip(documents, matches, strict=True) if not items]

    def counts(self) -> Json:
        """Return {"read", "cut", "kept", "bytes", "nuls", "dropped", "contamination"} for the receipt.

        read: documents, cut ones by their pieces. cut: pieces beyond the first of a document.
        nuls: documents from which NUL characters were removed. dropped: by reason.
        contamination: {benchmark: {"documents": dropped for it, "items": {item: documents that hold it}}}
        """
        read = self._read + self._cut
        assert read == self._kept + self._dropped.total(), (
            "documents read must be kept or counted as dropped"
        )
        contamination = {}
        for name, entry in sorted(self._contamination.items()):
            items = {str(number): count for number, count in sorted(entry["items"].items())}
            contamination[name] = {"documents": entry["documents"], "items": items}
        counts = {"read": read, "cut": self._cut, "kept": self._kept, "bytes": self._bytes}
        more = {"dropped": dict(self._dropped), "contamination": contamination}
        return {**counts, "nuls": self._nuls, **more}


def cut(text: str, max_chars: int) -> Iterator[str]:
    """Split a text into pieces of at most max_chars, after a newline where there is one."""
    start = 0
    while len(text) - start > max_chars:
        newline = text.rfind("\n", start, start + max_chars)
        end = newline + 1 if newline > start else start + max_chars
        yield text[start:end]
        start = end
    yield text[start:]


def read_raw(
    path: Path, column: str, file: str | None = None, before: int = 0
) -> Iterator[list[Row]]:
    """Read a raw file in batches of rows.

    Args:
        file: the planned path, if its rows are those of the input; None if the column "origin" says
            where they come from.
        before: rows of the input that are in other raw files.
    """
    try:
        with pq.ParquetFile(path, memory_map=True) as parquet:
            names = parquet.schema_arrow.names
            if column not in names:
                raise ValueError(
                    f"{path} has no column {column!r}; its columns: {', '.join(names)}"
                )
            origins = [ORIGIN] if file is None else origin_columns(parquet.schema_arrow)
            origin_names = [name for name in origins if name in names and name != column]
            first = before
            for batch in parquet.iter_batches(_BATCH_ROWS, columns=[column, *origin_names]):
                texts = batch.column(column).cast(pa.large_binary()).to_pylist()
                columns = {name: read_values(batch.column(name)) for name in origin_names}
                rows = []
                for place, text in enumerate(texts):
                    fields = {name: values[place] for name, values in columns.items()}
                    rows.append((text, _origin(file, first + place, fields, before)))
                yield rows
                first += batch.num_rows
    except (OSError, pa.ArrowException) as error:
        raise ValueError(
            f"{file or path} cannot be read ({error}); restore or exclude it"
        ) from error


def _origin(file: str | None, number: int, fields: Mapping[str, Any], before: int) -> str:
    if ORIGIN not in fields or file is not None:
        return encode_origin(file or "", number, fields)
    # a reader's own origin counts the rows of a part of a file
    if not before:
        return fields[ORIGIN]
    # `"row":` stands in no string of JSON
    return re.sub(r'(?<="row":)\d+', lambda row: str(int(row[0]) + before), fields[ORIGIN], count=1)


def write(path: Path, batches: Iterable[list[tuple[bytes, bytes, str]]]) -> None:
    """Write documents.parquet: `doc_id` (xxh3_128 of the text, big-endian), `text` (UTF-8) and `origin`."""
    documents = itertools.chain.from_iterable(batches)
    # no dictionaries, no statistics, row groups cut by size: the bytes depend only on the input and
    # the versions of packages
    with pq.ParquetWriter(
        path,
        SCHEMA,
        compression="zstd",
        compression_level=1,
        use_dictionary=False,
        write_statistics=False,
    ) as writer:
        for group in group_by_size(documents, lambda document: len(document[1]), _ROW_GROUP_BYTES):
            ids, texts, origins = zip(*group, strict=True)
            # Arrow would check the bytes again: they were decoded in `_pieces`
            strings = pa.array(texts, pa.binary()).view(pa.string())
            columns = [pa.array(ids, pa.binary(16)), strings, pa.array(origins, pa.string())]
            writer.write_table(
                pa.Table.from_arrays(columns, schema=SCHEMA), row_group_size=len(texts)
            )
