"""order and shuffle: from sorted runs to shards, one order for a whole source.

Nothing is drawn here: `tokenize` has sorted each unit by (key, high, low), where key is
`document_ids.shuffle_key` and (high, low) are the halves of the text's 128-bit id. `order` merges the
sorted runs (of `tokenize` or `runs`) range by range of keys, and `shuffle` cuts that order into shards.
The bytes depend on neither units, runs nor workers.

Texts that are equal within a source are dropped in `order`, always; near copies, and copies in other
sources, are the stage `dedup`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_mixtures import document_ids, mixture, packing, shards
from data_mixtures.recipe import Recipe
from data_mixtures.shards import Json
from data_mixtures.stages import blocks, sorted_runs, stage
from data_mixtures.stages.sorted_runs import ranges_of, with_columns
from data_mixtures.stages.stage import Stage, Unit, receipts
from data_mixtures.stages.tokenize import DOCUMENT, INDEX, ORIGINS, SLICED, TOKENS, totals

ORDER, SHUFFLE = "order", "shuffle"
# what `order` writes for a document, in the final order: `unit` is its run, `start` its first token
# in tokens.bin of it
_KEPT = ("low", "start", "origin", "length", "origin_bytes")
_PLACED = np.dtype([*((name, DOCUMENT[name]) for name in _KEPT), ("unit", "<u2")])
# a document of a shard: `at` is its first token in the source's stream
_LOCATED = np.dtype([*_PLACED.descr, ("at", "<i8")])


@dataclass(frozen=True)
class OrderDocuments(Stage):
    """The stage `order`: a unit is a range of keys; writes train.npy and valid.npy (_PLACED)."""

    name = ORDER

    def units(self) -> list[Unit]:
        return [
            Unit(source, n)
            for source in self.sources
            for n in range(len(ranges_of(self.out, source)))
        ]

    def result_key(self, unit: Unit) -> str:
        indexes = [
            receipt["files"][INDEX] for receipt in sorted_runs.receipts(self.out, unit.source)
        ]
        held_out = self.recipe.valid_per_10000_of(unit.source)
        return stage.key_of(self.name, unit.number, held_out, indexes)

    def make(self, unit: Unit, folder: Path) -> Json:
        # a range of keys is one slice of every run; the source's order is the merge of such slices
        low, high = ranges_of(self.out, unit.source)[unit.number]
        # merges the indexes only, no tokens
        with sorted_runs.open_runs(self.out, unit.source, INDEX) as files:
            parts = sorted_runs.read_slices(files, low, high)
        documents = sorted_runs.drop_duplicates(sorted_runs.in_order(parts))
        read_count = sum(map(len, parts))
        held_out = document_ids.is_held_out(
            documents["low"], self.recipe.valid_per_10000_of(unit.source)
        )
        counts: Json = {"documents": read_count, "duplicate": read_count - len(documents)}
        for name, part in (("train", documents[~held_out]), ("valid", documents[held_out])):
            shards.save_array(folder / f"{name}.npy", with_columns(part, _PLACED))
            counts[name] = {**totals(part), "longest": int(part["length"].max(initial=0))}
        return counts


def layout(recipe: Recipe, source: str) -> Json:
    """Return what decides how tokens become windows and shards."""
    numbers = {name: getattr(recipe, name) for name in ("seed", "seq_len", "windows_per_shard")}
    # only if it is not the default
    packed = {"packing": recipe.packing} if recipe.packing != mixture.PACKING else {}
    return {**numbers, "valid_per_10000": recipe.valid_per_10000_of(source), **packed}


def flags_name(name: str) -> str:
    return f"{Path(name).stem}.flags.bin"


@dataclass(frozen=True)
class WriteShards(Stage):
    """The stage `shuffle`: unit n is shard n; the unit after the last shard is the held-out part."""

    # the counts in a receipt are the file's entry in source.json
    name = SHUFFLE

    def units(self) -> list[Unit]:
        return [
            Unit(source, n) for source in self.sources for n in range(self.count_shards(source) + 1)
        ]

    def count_shards(self, source: str) -> int:
        """Return how many shards a source fills; ValueError if its text fills no training window."""
        if not (windows := self._windows(source, "train")):
            few = f"too little text for one training window of {self.recipe.seq_len} tokens"
            raise ValueError(f"source {source!r} has {few}: add text, or lower seq_len")
        # a packed shard holds the documents that begin in this many tokens of the stream
        if self.recipe.packing != mixture.PACKING:
            windows = -(-self._count(source, "train", "tokens") // self.recipe.seq_len)
        return -(-windows // self.recipe.windows_per_shard)

    def _count(self, source: str, part: str, figure: str) -> int:
        return sum(receipt["counts"][part][figure] for receipt in self._orders(source))

    def _windows(self, source: str, part: str) -> int:
        return shards.windows_in(self._count(source, part, "tokens"), self.recipe.seq_len)

    def _orders(self, source: str) -> tuple[Json, ...]:
        return receipts(self.out, ORDER, source, len(ranges_of(self.out, source)))

    def result_key(self, unit: Unit) -> str:
        order = [receipt["files"] for receipt in self._orders(unit.source)]
        runs = sorted_runs.receipts(self.out, unit.source)
        run_files = [[receipt["files"][name] for name in SLICED] for receipt in runs]
        return stage.key_of(
            self.name, unit.number, layout(self.recipe, unit.source), order, run_files
        )

    def make(self, unit: Unit, folder: Path) -> Json:
        part = "train" if unit.number < self.count_shards(unit.source) else "valid"
        path = folder / (f"shard-{unit.number:05d}.bin" if part == "train" else shards.VALID)
        write = (
            self._write_concatenated
            if self.recipe.packing == mixture.PACKING
            else self._write_packed
        )
        entry, index, order = write(unit, part, path)
        if part == "valid":
            return {**entry, "documents": self._count(unit.source, part, "documents")}
        # no document begins in this part of the stream
        if not entry["windows"]:
            return entry
        with sorted_runs.open_runs(self.out, unit.source, ORIGINS) as files:
            slices = index["unit"], index["origin"], index["origin_bytes"]
            origins = blocks.gather(files, *slices, np.dtype("u1"))
            if order is not None:
                offsets = np.append(0, np.cumsum(index["origin_bytes"], dtype=np.int64))
                origin_bytes = np.concatenate([np.empty(0, np.uint8), *origins])
                index = index[order]
                origins = blocks.take_values(offsets, origin_bytes, order)
            columns = [index[column] for column in ("low", "length", "origin_bytes")]
            docs = shards.write_documents(path.with_suffix(".docs.zst"), columns, origins)
        return {**entry, "docs": docs}

    def _write_concatenated(
        self, unit: Unit, part: str, path: Path
    ) -> tuple[Json, np.ndarray, None]:
        """Write windows of the source's stream; return the entry and the documents that begin there."""
        windows = self._windows(unit.source, part)
        seq_len = self.recipe.seq_len
        before = unit.number * self.recipe.windows_per_shard if part == "train" else 0
        if part == "train":
            windows = min(windows - before, self.recipe.windows_per_shard)
        first = before * seq_len
        last = (before + windows) * seq_len
        begins: list[np.ndarray] = [np.empty(0, _LOCATED)]
        # the last token is the next shard's first as well
        pieces = self._tokens(unit.source, part, first, last + bool(windows), begins)
        entry = shards.write_pieces(path, pieces, seq_len)
        index = np.concatenate(begins)
        return entry, index[index["at"] < last], None

    def _write_packed(
        self, unit: Unit, part: str, path: Path
    ) -> tuple[Json, np.ndarray, np.ndarray]:
        """Write packed windows of the documents that begin in one shard's part of the stream.

        Returns:
            The file's entry, the documents, and their order in the file.
        """
        seq_len = self.recipe.seq_len
        first = 0
        last = self._count(unit.source, part, "tokens")
        if part == "train":
            size = self.recipe.windows_per_shard * seq_len
            first = unit.number * size
            last = min((unit.number + 1) * size, last)
        begins: list[np.ndarray] = [np.empty(0, _LOCATED)]
        pieces = list(self._tokens(unit.source, part, first, last, begins, whole=True))
        index = np.concatenate(begins)
        dtype = sorted_runs.dtype_of(self.out, unit.source)
        stream = np.concatenate([np.empty(0, dtype), *pieces])
        packed = packing.best_fit(stream, index["length"], index["low"], seq_len, self.recipe.seed)
        if part == "train" and not len(index):
            return {"windows": 0, "padding": 0}, index, packed.order
        entry = shards.write_windows(path, packed.tokens, seq_len)
        flags = shards.write_windows(path.with_name(flags_name(path.name)), packed.flags, seq_len)
        return {**entry, "flags": flags, "padding": packed.padding}, index, packed.order

    def _tokens(
        self,
        source: str,
        part: str,
        first: int,
        last: int,
        begins: list[np.ndarray],
        whole: bool = False,
    ) -> Iterator[np.ndarray]:
        """Yield tokens first <= i < last of a source; append the documents that begin there to `begins`.

        Args:
            whole: yield all tokens of the documents that begin there instead.
        """
        at = 0
        dtype = sorted_runs.dtype_of(self.out, source)
        with sorted_runs.open_runs(self.out, source, TOKENS) as files:
            for number, receipt in enumerate(self._orders(source)):
                if at >= last:
                    return
                tokens = receipt["counts"][part]["tokens"]
                if tokens and at + tokens > first:
                    rows = stage.check_file(self.out, ORDER, Unit(source, number), f"{part}.npy")
                    documents = _place_documents(np.load(rows, mmap_mode="r"), at, first, last)
                    begins.append(documents[documents["at"] >= first])
                    skip = np.maximum(first - documents["at"], 0)
                    until = last - documents["at"]
                    if whole:
                        documents = begins[-1]
                        skip = 0
                        until = begins[-1]["length"]
                    lengths = np.minimum(documents["length"], until) - skip
                    starts = documents["start"].astype(np.int64) + skip
                    # slices are read in large pieces; memory does not grow with the source or the
                    # number of runs
                    yield from blocks.gather(files, documents["unit"], starts, lengths, dtype)
                at += tokens


def _place_documents(rows: np.ndarray, at: int, first: int, last: int) -> np.ndarray:
    """Return the documents (_LOCATED) with tokens in first <= i < last.

    Args:
        rows: a range of documents (_PLACED).
        at: place of its first token in the stream.
    """
    ends = at + np.cumsum(rows["length"], dtype=np.int64)
    begin = int(np.searchsorted(ends, first, side="right"))
    end = int(np.searchsorted(ends, last, side="left")) + 1
    documents = with_columns(rows[begin:end], _LOCATED)
    documents["at"] = ends[begin:end] - documents["length"]
    return documents
