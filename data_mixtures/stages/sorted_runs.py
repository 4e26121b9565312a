"""runs: many tokenized units merged to few sorted runs, DIR/runs/<source>/unit-NNNNN/, of the same form."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from data_mixtures import shards
from data_mixtures.ngrams import begins_run
from data_mixtures.shards import Json
from data_mixtures.stages import blocks, stage
from data_mixtures.stages.blocks import CheckedFile
from data_mixtures.stages.stage import Stage, Unit
from data_mixtures.stages.tokenize import DOCUMENT, INDEX, ORIGINS, SLICED, TOKENS, by_key, parts

RUNS = 64
UNITS_PER_RUN = 128  # each has six files open while it is merged; a process may open 1,024
DOCUMENTS_PER_RANGE = 1 << 21  # about 500 MB while merging
# what a merge works on; numpy sorts integers of two bytes in one pass
MERGED = np.dtype([*DOCUMENT.descr, ("unit", "<u2")])


def groups(out: Path, source: str) -> list[list[Unit]]:
    units = stage.list_units(out, source)
    size = stage.group_size(len(units), RUNS, UNITS_PER_RUN)
    return [units[first : first + size] for first in range(0, len(units), size)]


def find_units(out: Path, source: str) -> tuple[str, list[Unit]]:
    """Return the sorted runs of a source: the stage that made them, and its units."""
    units = stage.list_units(out, source)
    count = len(groups(out, source))
    # every shard reads a slice of each run, so files are opened (runs x shards) times: with units
    # as runs, the square of a source's size. Hence more than RUNS units are merged first
    if count == len(units):
        return "tokenize", units
    return "runs", [Unit(source, number) for number in range(count)]


def open_runs(out: Path, source: str, name: str) -> AbstractContextManager[list[CheckedFile]]:
    """Open file `name` of each run of a source, in their order; ValueError as `blocks.open_files`."""
    return blocks.open_files(out, *find_units(out, source), name)


def receipts(out: Path, source: str) -> tuple[Json, ...]:
    name, units = find_units(out, source)
    return stage.receipts(out, name, source, len(units))


def token_dtype(receipts: Sequence[Json]) -> np.dtype:
    size = sum(receipt["files"][TOKENS]["bytes"] for receipt in receipts)
    tokens = sum(receipt["counts"]["tokens"] for receipt in receipts)
    return shards.token_dtype({"bytes": size, "tokens": tokens})


def dtype_of(out: Path, source: str) -> np.dtype:
    return token_dtype(receipts(out, source))


@dataclass(frozen=True)
class Runs(Stage):
    """The stage `runs`: a unit is a merge of consecutive tokenized units."""

    name = "runs"

    def units(self) -> list[Unit]:
        # a source of few units needs no merge: each of its units is a run already
        by_source = [find_units(self.out, source) for source in self.sources]
        return list(chain.from_iterable(units for name, units in by_source if name == self.name))

    def result_key(self, unit: Unit) -> str:
        return stage.key_of(
            self.name, [receipt["files"] for _, receipt in self._list_members(unit)]
        )

    def _list_members(self, unit: Unit) -> list[tuple[Unit, Json]]:
        group = groups(self.out, unit.source)[unit.number]
        return [(unit, stage.receipt_of(self.out, "tokenize", unit)) for unit in group]

    def make(self, unit: Unit, folder: Path) -> Json:
        group, receipts = zip(*self._list_members(unit), strict=True)
        total = {
            name: sum(receipt["counts"][name] for receipt in receipts)
            for name in ("documents", "tokens", "bytes")
        }
        with ExitStack() as stack:
            inputs = {
                n: stack.enter_context(blocks.open_files(self.out, "tokenize", group, n))
                for n in SLICED
            }
            outputs = {name: stack.enter_context((folder / name).open("wb")) for name in SLICED}
            shards.write_array_header(outputs[INDEX], DOCUMENT, total["documents"])
            at = {TOKENS: 0, ORIGINS: 0}
            for keys in key_ranges(total["documents"]):
                # drops nothing and keeps ties in unit order: shards are the same without a merge
                rows = in_order(read_slices(inputs[INDEX], *keys))
                for name, start, length, dtype in parts(token_dtype(receipts)):
                    lengths = rows[length].astype(np.int64)
                    for piece in blocks.gather(
                        inputs[name], rows["unit"], rows[start], lengths, dtype
                    ):
                        outputs[name].write(piece.data)
                    rows[start] = at[name] + np.cumsum(lengths) - lengths
                    at[name] += int(lengths.sum())
                outputs[INDEX].write(with_columns(rows, DOCUMENT).data)
        for name in SLICED:
            blocks.seal(folder / name)
        return total


def key_ranges(documents: int) -> list[tuple[int, int]]:
    """Return equal ranges low <= key < high, each with few enough documents to merge."""
    count = max(-(-documents // DOCUMENTS_PER_RANGE), 1)
    return [(number * 2**64 // count, (number + 1) * 2**64 // count) for number in range(count)]


def ranges_of(out: Path, source: str) -> list[tuple[int, int]]:
    """Return a source's key ranges for merging; ValueError if it has no documents."""
    # a function of the documents alone, not of units or runs
    documents = sum(receipt["counts"]["documents"] for receipt in receipts(out, source))
    if not documents:
        raise ValueError(
            f"source {source!r} is empty: no document of it was kept. {out}/filter/{source}/unit-*/receipt.json (of "
            "near copies: in tokenize/) count what was dropped and why; give it text, or take it out of the recipe"
        )
    return key_ranges(documents)


def read_slices(files: Sequence[CheckedFile], low: int, high: int) -> list[np.ndarray]:
    """Return the documents (MERGED) of every run with low <= key < high."""
    slices = []
    for number, file in enumerate(files):
        part = with_columns(file.read_rows("key", low, high), MERGED)
        assert (part["key"][1:] >= part["key"][:-1]).all(), f"{file} is not sorted"
        part["unit"] = number
        slices.append(part)
    return slices


def with_columns(rows: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Convert rows to another dtype by their common columns."""
    result = np.zeros(len(rows), dtype)
    for name in set(result.dtype.names or ()).intersection(rows.dtype.names or ()):
        # one at a time: numpy assigns several ten times slower
        result[name] = rows[name]
    return result


def in_order(parts: Iterable[np.ndarray]) -> np.ndarray:
    """Return documents (MERGED) by (key, high, low); ties keep the order of the parts."""
    documents = np.concatenate(list(parts))
    return documents[by_key(documents)]


def drop_duplicates(documents: np.ndarray) -> np.ndarray:
    """Keep the first of consecutive documents that have the same 128-bit id."""
    return documents[begins_run(documents["low"], documents["high"])]
