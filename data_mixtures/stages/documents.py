"""Documents kept by the filter, and which of them are left out of the tokens.

Left out are near copies (`dedup`) and held-out text that is also in training (`containment`);
`tokenize` also drops documents with repeated n-grams (`repeats`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data_mixtures import shards
from data_mixtures.recipe import Recipe
from data_mixtures.shards import Json
from data_mixtures.stages import stage
from data_mixtures.stages.stage import DOCUMENTS, Stage, Unit
from records.files import write_json

DEDUP, CONTAINED = "dedup", "contained"
NEAR_DUPLICATE = "near_duplicate"
ALL = Unit("all", 0)
ROWS, UNITS = "rows.npy", "units.json"
# of a source, at most; a group's signatures stay below half a gigabyte
GROUPS, UNITS_PER_GROUP = 64, 128
_BATCH_ROWS = 256
COLUMNS = ("doc_id", "text", "origin")
Documents = tuple[list[bytes], list[bytes], list[bytes]]  # ids, texts as UTF-8, origins


def _units_per_group(out: Path, source: str) -> int:
    return stage.group_size(len(stage.find_plan(out, source)["units"]), GROUPS, UNITS_PER_GROUP)


def groups(out: Path, source: str) -> int:
    return -(-len(stage.find_plan(out, source)["units"]) // _units_per_group(out, source))


@dataclass(frozen=True)
class Grouped(Stage):
    """A stage whose unit is a group of filtered units."""

    # groups, so that what one of them reads of all others is few large pieces
    def units(self) -> list[Unit]:
        return [Unit(source, n) for source in self.sources for n in range(groups(self.out, source))]

    def members(self, unit: Unit) -> list[tuple[Unit, Json]]:
        size = _units_per_group(self.out, unit.source)
        group = stage.list_units(self.out, unit.source)[
            unit.number * size : (unit.number + 1) * size
        ]
        return [(member, stage.receipt_of(self.out, "filter", member)) for member in group]

    def files(self, unit: Unit) -> list[Json]:
        return [receipt["files"][DOCUMENTS] for _, receipt in self.members(unit)]


def of_all(work: Stage, made_by: str) -> Iterator[tuple[Unit, Json, int]]:
    """Yield (group, receipt, number of its first document) of all sources in order."""
    first = 0
    for source in work.recipe.sources:
        count = groups(work.out, source.name)
        receipts = stage.receipts(work.out, made_by, source.name, count)
        for number, receipt in enumerate(receipts):
            yield Unit(source.name, number), receipt, first
            first += receipt["counts"]["documents"]


def files_of_all(work: Stage, made_by: str) -> list[Any]:
    """Return what keys say about a stage's results for all groups."""
    return [[str(unit), receipt["files"]] for unit, receipt, _ in of_all(work, made_by)]


def write_rows(folder: Path, members: Sequence[tuple[Unit, Json]], numbers: np.ndarray) -> None:
    """Write the rows that a stage leaves out of consecutive filtered units.

    rows.npy: int64, rows of documents.parquet, unit after unit. units.json: each unit's part of them,
    [first, end).

    Args:
        numbers: ascending document numbers; row 0 of the first unit is 0.
    """
    ends = np.cumsum([0, *(receipt["counts"]["kept"] for _, receipt in members)])
    places = np.searchsorted(numbers, ends).tolist()
    rows = numbers - np.repeat(ends[:-1], np.diff(places))
    shards.save_array(folder / ROWS, rows.astype(np.int64))
    units = [str(unit) for unit, _ in members]
    write_json(folder / UNITS, dict(zip(units, pairwise(places), strict=True)))


def _rows(out: Path, made_by: str, group: Unit, unit: Unit) -> np.ndarray:
    folder, _ = stage.result(out, made_by, group)
    rows, places = _load_rows(folder / UNITS)
    if str(unit) not in places:
        raise ValueError(
            f"{folder} does not know {unit}, which was planned later; run {DEDUP!r} again"
        )
    return rows[slice(*places[str(unit)])]


@stage.cache_by_file
def _load_rows(path: Path) -> tuple[np.ndarray, dict[str, list[int]]]:
    # DIR/dedup/web/unit-00000/units.json
    out, made_by, source, number = path.parents[3], *path.parts[-4:-1]
    group = Unit(source, shards.shard_number(number))
    rows, units = (stage.check_file(out, made_by, group, name) for name in (ROWS, UNITS))
    return np.load(rows), shards.read_json(units, "start again")


def near_copies(recipe: Recipe, out: Path, unit: Unit) -> np.ndarray:
    if not recipe.dedup.minhash:
        return np.empty(0, np.int64)
    group = Unit(unit.source, unit.number // _units_per_group(out, unit.source))
    return _rows(out, DEDUP, group, unit)


def find_left_out(recipe: Recipe, out: Path, unit: Unit) -> Mapping[str, np.ndarray]:
    """Return a unit's rows that tokenize does not read, by reason."""
    rows = {NEAR_DUPLICATE: near_copies(recipe, out, unit)}
    return rows | (
        {CONTAINED: _rows(out, CONTAINED, ALL, unit)} if recipe.dedup.contained_share else {}
    )


def read_remaining(recipe: Recipe, out: Path, unit: Unit) -> Iterator[Documents]:
    left_out = np.concatenate(list(find_left_out(recipe, out, unit).values()))
    return read_documents(stage.check_file(out, "filter", unit, DOCUMENTS), left_out)


def read_documents(path: Path, without: Any = ()) -> Iterator[Documents]:
    """Read documents.parquet in batches, except for the rows `without`."""
    with pq.ParquetFile(path, memory_map=True) as parquet:
        stays = np.ones(parquet.metadata.num_rows, bool)
        first = 0
        stays[np.asarray(without, np.int64)] = False
        for batch in parquet.iter_batches(_BATCH_ROWS):
            stays_here = stays[first : first + batch.num_rows]
            first = first + batch.num_rows
            batch = batch if stays_here.all() else batch.filter(pa.array(stays_here))
            ids, texts, origins = (
                batch.column(name).cast(pa.binary()).to_pylist() for name in COLUMNS
            )
            yield ids, texts, origins
