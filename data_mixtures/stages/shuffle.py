"""From sorted runs to shards: one order for a whole source, then every shard gathered from
where its tokens lie.

Each run (of `tokenize` or `runs`) is sorted by (key, high, low), where key = xxh3(seed, low) and (high, low)
are the halves of the 128-bit hash of the text. So a range of keys is a contiguous slice of every run, and
the source's order is the merge of such slices. Stage `order` merges the indexes of one range of keys (no
tokens), drops exact duplicates and sets held-out documents apart. Stage `shuffle` makes one shard: it reads
the slices that hold its tokens, in large pieces, and puts the documents in their order. Tokens are read once
and written once. Memory does not grow with the source or the number of its runs; the bytes depend on neither
units, runs nor workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_mixtures import shards
from data_mixtures.recipe import Recipe
from data_mixtures.shards import Json
from data_mixtures.stages import blocks, sorted_runs, stage
from data_mixtures.stages.sorted_runs import ranges_of, with_columns
from data_mixtures.stages.stage import Stage, Unit, receipts
from data_mixtures.stages.tokenize import DOCUMENT, INDEX, ORIGINS, SLICED, TOKENS, totals

ORDER, SHUFFLE, UPSTREAM = "order", "shuffle", "tokenize"
# what `order` writes for a document, in the final order: `unit` is its run, `start` its first token in
# tokens.bin of it
_PLACED = np.dtype(
    [*((n, DOCUMENT[n]) for n in ("low", "start", "origin", "length", "origin_bytes")), ("unit", "<u2")]
)
# a document of a shard: `at` is its first token in the source's stream
_LOCATED = np.dtype([*_PLACED.descr, ("at", "<i8")])


@dataclass(frozen=True)
class OrderDocuments(Stage):
    """Stage `order`: one unit is a range of keys of a source; writes train.npy and valid.npy (_PLACED)."""

    name = ORDER

    def units(self) -> list[Unit]:
        return [Unit(source, n) for source in self.sources for n in range(len(ranges_of(self.out, source)))]

    def key(self, unit: Unit) -> str:
        indexes = [receipt["files"][INDEX] for receipt in sorted_runs.receipts(self.out, unit.source)]
        return stage.key_of(
            self.name,
            unit.number,
            self.recipe.held_out_of(unit.source),
            indexes,
        )

    def work(self, unit: Unit, folder: Path) -> Json:
        low, high = ranges_of(self.out, unit.source)[unit.number]
        with blocks.opened(self.out, *sorted_runs.made_by(self.out, unit.source), INDEX) as files:
            parts = sorted_runs.read_slices(files, low, high)
        documents, read = sorted_runs.merge(parts), sum(map(len, parts))
        held_out = documents["low"] < np.uint64(shards.held_out_below(self.recipe.held_out_of(unit.source)))
        counts: Json = {"documents": read, "duplicate": read - len(documents)}
        for name, part in (("train", documents[~held_out]), ("valid", documents[held_out])):
            shards.save_array(folder / f"{name}.npy", with_columns(part, _PLACED))
            counts[name] = {**totals(part), "longest": int(part["length"].max(initial=0))}
        return counts


def layout(recipe: Recipe, source: str) -> dict[str, int]:
    """The numbers that decide how tokens become windows and shards."""
    numbers = {name: getattr(recipe, name) for name in ("seed", "seq_len", "windows_per_shard")}
    return {**numbers, "valid_per_10000": recipe.held_out_of(source)}


@dataclass(frozen=True)
class WriteShards(Stage):
    """Stage `shuffle`: unit n of a source is its shard n, the one after its last shard is its held-out part.

    The counts in a receipt are the file's entry in source.json.
    """

    name = SHUFFLE

    def units(self) -> list[Unit]:
        return [Unit(source, n) for source in self.sources for n in range(self.shards(source) + 1)]

    def shards(self, source: str) -> int:
        """How many shards a source fills. ValueError when it has too little text for one window of training."""
        if not self._windows(source, "train"):
            raise ValueError(
                f"source {source!r} has too little text for one training window of {self.recipe.seq_len} tokens: "
                "add text, or lower seq_len"
            )
        return -(-self._windows(source, "train") // self.recipe.windows_per_shard)

    def _windows(self, source: str, part: str) -> int:
        tokens = sum(receipt["counts"][part]["tokens"] for receipt in self._orders(source))
        return shards.windows_in(tokens, self.recipe.seq_len)

    def _orders(self, source: str) -> tuple[Json, ...]:
        return receipts(self.out, ORDER, source, len(ranges_of(self.out, source)))

    def key(self, unit: Unit) -> str:
        order = [receipt["files"] for receipt in self._orders(unit.source)]
        read = [
            [receipt["files"][name] for name in SLICED]
            for receipt in sorted_runs.receipts(self.out, unit.source)
        ]
        return stage.key_of(self.name, unit.number, layout(self.recipe, unit.source), order, read)

    def work(self, unit: Unit, folder: Path) -> Json:
        part = "train" if unit.number < self.shards(unit.source) else "valid"
        windows, seq_len = self._windows(unit.source, part), self.recipe.seq_len
        if part == "valid":
            documents = sum(receipt["counts"]["valid"]["documents"] for receipt in self._orders(unit.source))
            pieces = self._tokens(unit.source, part, 0, windows * seq_len + 1 if windows else 0, [])
            return {**shards.write_pieces(folder / shards.VALID, pieces, seq_len), "documents": documents}
        before = unit.number * self.recipe.windows_per_shard
        windows = min(windows - before, self.recipe.windows_per_shard)
        first, last = (
            before * seq_len,
            (before + windows) * seq_len,
        )  # the last token is the next shard's first as well
        begins: list[np.ndarray] = []
        pieces = self._tokens(unit.source, part, first, last + 1, begins)
        name = f"shard-{unit.number:05d}"
        entry = shards.write_pieces(folder / f"{name}.bin", pieces, seq_len)
        index = np.concatenate(begins)
        index = index[index["at"] < last]
        with blocks.opened(self.out, *sorted_runs.made_by(self.out, unit.source), ORIGINS) as files:
            origins = blocks.gather(
                files, index["unit"], index["origin"], index["origin_bytes"], np.dtype("u1")
            )
            columns = [index[column] for column in ("low", "length", "origin_bytes")]
            docs = shards.write_documents(folder / f"{name}.docs.zst", columns, origins)
        return {**entry, "docs": docs}

    def _tokens(
        self, source: str, part: str, first: int, last: int, begins: list[np.ndarray]
    ) -> Iterator[np.ndarray]:
        """Tokens first <= i < last of the source's stream in pieces; `begins` gets the
        documents that begin there.
        """
        at, dtype = 0, sorted_runs.token_dtype(sorted_runs.receipts(self.out, source))
        with blocks.opened(self.out, *sorted_runs.made_by(self.out, source), TOKENS) as files:
            for number, receipt in enumerate(self._orders(source)):
                if at >= last:
                    return
                tokens = receipt["counts"][part]["tokens"]
                if tokens and at + tokens > first:
                    rows = stage.checked(self.out, ORDER, Unit(source, number), f"{part}.npy")
                    documents = _placed(np.load(rows, mmap_mode="r"), at, first, last)
                    begins.append(documents[documents["at"] >= first])
                    skip = np.maximum(first - documents["at"], 0)
                    lengths = np.minimum(documents["length"], last - documents["at"]) - skip
                    starts = documents["start"].astype(np.int64) + skip
                    yield from blocks.gather(files, documents["unit"], starts, lengths, dtype)
                at += tokens


def _placed(rows: np.ndarray, at: int, first: int, last: int) -> np.ndarray:
    """Documents (_LOCATED) of a range that have tokens in first <= i < last; the range's first
    token is token `at`.
    """
    ends = at + np.cumsum(rows["length"], dtype=np.int64)
    begin = int(np.searchsorted(ends, first, side="right"))
    end = int(np.searchsorted(ends, last, side="left")) + 1
    documents = with_columns(rows[begin:end], _LOCATED)
    documents["at"] = ends[begin:end] - documents["length"]
    return documents
