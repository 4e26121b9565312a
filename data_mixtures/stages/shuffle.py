"""From tokenized units to shards: one order for a whole source, then every shard gathered from where its tokens lie.

Each unit of `tokenize` is sorted by (key, high, low), where key = xxh3(seed, low) and (high, low) are the halves of the
128-bit hash of the text. So a range of keys is a contiguous slice of every unit, and the source's order is the merge of
such slices. Stage `order` merges the indexes of one range of keys (32 bytes a document, no tokens), drops exact
duplicates and sets held-out documents apart. Stage `shuffle` makes one shard: it reads the slices that hold its tokens,
in large pieces, and puts the documents in their order. Tokens are read once and written once. Memory does not grow with
the source or the number of its units; the bytes depend on neither units nor workers.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow

from data_mixtures import shards
from data_mixtures.recipe import Recipe
from data_mixtures.stages import stage
from data_mixtures.stages.stage import Stage, Unit, receipts
from data_mixtures.stages.tokenize import DOCUMENT, INDEX, TOKENS

ORDER, SHUFFLE, UPSTREAM = "order", "shuffle", "tokenize"
DOCUMENTS_PER_RANGE = 1 << 21  # about 300 MB while merging
READ_TOKENS = 1 << 27  # put in order at a time: the more, the longer are the slices that are read of each unit
COPY_TOKENS = 1 << 19  # written at a time: few enough to be hashed while they are in the cache
# what a merge works on: where the document's tokens begin, counted from the beginning of its unit's slice
_MERGED = np.dtype([*DOCUMENT.descr, ("start", "<u8"), ("unit", "<u4")])
# what a unit has in a range of keys, duplicates included
_SLICE = np.dtype([("documents", "<i8"), ("tokens", "<i8")])
# what `order` writes for a document, in the final order
_PLACED = np.dtype([("low", "<u8"), ("start", "<u8"), ("length", "<u4"), ("unit", "<u4")])


@dataclass(frozen=True)
class OrderDocuments(Stage):
    """Stage `order`: one unit is a range of keys of a source; writes train.npy, valid.npy and slices.npy.

    train.npy and valid.npy: _PLACED, in the final order. slices.npy: int64 (units,), the tokens of each tokenized unit
    in this range, dropped documents included; sums over ranges tell where a slice begins.
    """

    name = ORDER

    def units(self) -> list[Unit]:
        return [Unit(source, n) for source in self.sources for n in range(key_ranges(self.out, source))]

    def key(self, unit: Unit) -> str:
        indexes = [receipt["files"][INDEX] for receipt in receipts(self.out, UPSTREAM, unit.source)]
        return stage.key_of(("stages/shuffle.py",), unit.number, self.recipe.held_out_of(unit.source), indexes)

    def work(self, unit: Unit, folder: Path) -> dict[str, Any]:
        low, high = range_bounds(unit.number, key_ranges(self.out, unit.source))
        parts, slices = read_slices(self.out, unit.source, low, high)
        documents = merge(parts)
        held_out = documents["low"] < np.uint64(shards.held_out_below(self.recipe.held_out_of(unit.source)))
        read = int(slices["documents"].sum())
        counts: dict[str, Any] = {"documents": read, "duplicate": read - len(documents)}
        for name, part in (("train", documents[~held_out]), ("valid", documents[held_out])):
            shards.save_array(folder / f"{name}.npy", part[list(_PLACED.names or ())].astype(_PLACED))
            tokens, size = (int(part[column].sum(dtype=np.int64)) for column in ("length", "bytes"))
            counts[name] = {"documents": len(part), "tokens": tokens, "bytes": size}
        shards.save_array(folder / "slices.npy", slices["tokens"].copy())
        return counts


def layout(recipe: Recipe, source: str) -> shards.Layout:
    return shards.Layout(recipe.seed, recipe.seq_len, recipe.windows_per_shard, recipe.held_out_of(source))


def key_ranges(out: Path, source: str) -> int:
    """How many ranges of keys a source is merged in: a function of its documents alone. ValueError when it has none."""
    documents = sum(receipt["counts"]["documents"] for receipt in receipts(out, UPSTREAM, source))
    if not documents:
        raise ValueError(
            f"source {source!r} is empty: no document of it was kept. Look at the counts in {out}/filter/{source}/"
            "unit-*/receipt.json for what was dropped and why, give it text, or take it out of the recipe"
        )
    return -(-documents // DOCUMENTS_PER_RANGE)


def range_bounds(number: int, ranges: int) -> tuple[int, int]:
    """Keys low <= key < high of one of equal ranges."""
    return number * 2**64 // ranges, (number + 1) * 2**64 // ranges


def read_slices(out: Path, source: str, low: int, high: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Documents of every unit with low <= key < high (_MERGED), each id once a unit, and its size there (_SLICE)."""
    parts, paths = [], _tokenized(out, source, INDEX)
    slices = np.zeros(len(paths), dtype=_SLICE)
    for number, path in enumerate(paths):
        documents = np.load(path, mmap_mode="r")
        assert documents.dtype == DOCUMENT, f"{source} unit {number}: documents.npy has dtype {documents.dtype}"
        first, last = (bisect_left(documents, key, key=lambda row: int(row["key"])) for key in (low, high))
        part = np.empty(last - first, dtype=_MERGED)
        for name in DOCUMENT.names or ():
            part[name] = documents[name][first:last]
        assert (part["key"][1:] >= part["key"][:-1]).all(), f"{source} unit {number}: documents.npy is not sorted"
        ends = np.cumsum(part["length"], dtype=np.int64)
        part["start"], part["unit"] = ends - part["length"], number
        slices[number] = len(part), ends[-1] if len(ends) else 0
        parts.append(first_of_equals(part))  # a text that a unit repeats a million times must not fill the memory
    return parts, slices


def _tokenized(out: Path, source: str, name: str) -> list[Path]:
    """The files of this name of all tokenized units."""
    units = range(len(receipts(out, UPSTREAM, source)))
    return [stage.result(out, UPSTREAM, Unit(source, number))[0] / name for number in units]


def merge(parts: Iterable[np.ndarray]) -> np.ndarray:
    """Documents (_MERGED) by (key, high, low), the first of those with the same 128-bit id."""
    return first_of_equals(in_order(parts))


def in_order(parts: Iterable[np.ndarray]) -> np.ndarray:
    """Documents (_MERGED) by (key, high, low); equal ones stay in the order of the parts."""
    documents = np.concatenate(list(parts))
    documents = documents[np.argsort(documents["key"], kind="stable")]
    equal = documents["key"][1:] == documents["key"][:-1]
    tied = np.flatnonzero(np.append(equal, False) | np.append(False, equal))
    rows = documents[tied]
    documents[tied] = rows[np.lexsort((rows["low"], rows["high"], rows["key"]))]
    return documents


def same_id(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return (left["low"] == right["low"]) & (left["high"] == right["high"])


def first_of_equals(documents: np.ndarray) -> np.ndarray:
    return documents[np.append(True, ~same_id(documents[1:], documents[:-1]))[: len(documents)]]


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

    def _orders(self, source: str) -> tuple[dict[str, Any], ...]:
        return receipts(self.out, ORDER, source, key_ranges(self.out, source))

    def key(self, unit: Unit) -> str:
        order = [receipt["files"] for receipt in self._orders(unit.source)]
        tokens = [receipt["files"][TOKENS] for receipt in receipts(self.out, UPSTREAM, unit.source)]
        numbers = asdict(layout(self.recipe, unit.source))
        return stage.key_of(("stages/shuffle.py", "shards.py"), unit.number, numbers, order, tokens)

    def work(self, unit: Unit, folder: Path) -> dict[str, Any]:
        part = "train" if unit.number < self.shards(unit.source) else "valid"
        windows, seq_len = self._windows(unit.source, part), self.recipe.seq_len
        if part == "valid":
            documents = sum(receipt["counts"]["valid"]["documents"] for receipt in self._orders(unit.source))
            pieces = self._tokens(unit.source, part, 0, windows * seq_len + 1 if windows else 0, [])
            return {**shards.write_pieces(folder / shards.VALID, pieces, seq_len), "documents": documents}
        before = unit.number * self.recipe.windows_per_shard
        windows = min(windows - before, self.recipe.windows_per_shard)
        first, last = before * seq_len, (before + windows) * seq_len  # the last token is the next shard's first as well
        begins: list[np.ndarray] = []
        pieces = self._tokens(unit.source, part, first, last + 1, begins)
        name = f"shard-{unit.number:05d}"
        entry = shards.write_pieces(folder / f"{name}.bin", pieces, seq_len)
        index = np.concatenate(begins)
        index = index[index["at"] < last]
        docs = shards.write_documents(folder / f"{name}.docs.zst", index["low"], index["length"])
        return {**entry, "docs": docs}

    def _tokens(self, source: str, part: str, first: int, last: int, begins: list[np.ndarray]) -> Iterator[np.ndarray]:
        """Tokens first <= i < last of the source's stream in pieces; `begins` gets the documents that begin there."""
        files = _tokenized(self.out, source, TOKENS)
        written = receipts(self.out, UPSTREAM, source)
        size = sum(receipt["files"][TOKENS]["bytes"] for receipt in written)
        dtype = shards.token_dtype({"bytes": size, "tokens": sum(each["counts"]["tokens"] for each in written)})
        base = np.zeros(len(files), dtype=np.int64)  # where each unit's slice begins in its tokens.bin
        at = 0
        for number, receipt in enumerate(self._orders(source)):
            folder, tokens = stage.unit_folder(self.out, ORDER, Unit(source, number)), receipt["counts"][part]["tokens"]
            if tokens and at < last and at + tokens > first:
                documents = _placed(np.load(folder / f"{part}.npy", mmap_mode="r"), at, base, first, last)
                begins.append(documents[documents["at"] >= first])
                yield from _gathered(files, documents, first, last, dtype)
            if at >= last:
                return
            at += tokens
            base += np.load(folder / "slices.npy")


# a document of a shard: `at` is its first token in the source's stream, `start` the same in tokens.bin of its unit
_LOCATED = np.dtype([("low", "<u8"), ("length", "<u4"), ("unit", "<u4"), ("start", "<i8"), ("at", "<i8")])


def _placed(rows: np.ndarray, at: int, base: np.ndarray, first: int, last: int) -> np.ndarray:
    """Documents (_LOCATED) of a range that have tokens in first <= i < last; the range's first token is token `at`."""
    ends = at + np.cumsum(rows["length"], dtype=np.int64)
    begin = int(np.searchsorted(ends, first, side="right"))
    end = int(np.searchsorted(ends, last, side="left")) + 1
    rows, ends = rows[begin:end], ends[begin:end]
    documents = np.empty(len(rows), dtype=_LOCATED)
    for name in ("low", "length", "unit"):
        documents[name] = rows[name]
    documents["start"] = base[rows["unit"]] + rows["start"].astype(np.int64)
    documents["at"] = ends - rows["length"]
    return documents


def _gathered(
    files: Sequence[Path], documents: np.ndarray, first: int, last: int, dtype: np.dtype
) -> Iterator[np.ndarray]:
    """The tokens of consecutive documents in pieces, those outside first <= i < last cut off."""
    skip = np.maximum(first - documents["at"], 0)
    lengths = np.minimum(documents["length"], last - documents["at"]) - skip
    starts = documents["start"] + skip
    buffer = _buffer(2 * max(int(lengths.max()), READ_TOKENS), dtype)
    for piece in _pieces(lengths, READ_TOKENS):
        yield from gather(files, documents["unit"][piece], starts[piece], lengths[piece], buffer)


@functools.lru_cache(maxsize=1)
def _buffer(tokens: int, dtype: np.dtype) -> np.ndarray:
    # kept for the next shard: the first touch of new memory costs more than all that is done with it
    return np.empty(tokens, dtype)


def _pieces(lengths: np.ndarray, tokens: int) -> Iterator[slice]:
    """Slices of consecutive documents with at most `tokens` tokens together, at least one document each."""
    ends, begin, before = np.cumsum(lengths), 0, 0
    while begin < len(lengths):
        end = max(int(np.searchsorted(ends, before + tokens, side="right")), begin + 1)
        yield slice(begin, end)
        begin, before = end, int(ends[end - 1])


def gather(
    files: Sequence[Path], units: np.ndarray, starts: np.ndarray, lengths: np.ndarray, buffer: np.ndarray
) -> Iterator[np.ndarray]:
    """Documents' tokens one after the other, of the buffer's type, in pieces.

    Document i is lengths[i] tokens of files[units[i]] from starts[i] on; those of one file must lie in ascending order.
    buffer: at least twice the sum of the lengths.
    """
    order = np.argsort(units, kind="stable")
    unit, start = units[order], starts[order]
    end = start + lengths[order]
    # documents that lie together are read together, over a gap that is not larger than what lies before it
    new = np.append(True, (unit[1:] != unit[:-1]) | (start[1:] - end[:-1] > lengths[order][:-1]))
    runs = np.flatnonzero(new)
    run_starts, run_ends = start[runs], end[np.append(runs[1:], len(new)) - 1]
    places = np.append(0, np.cumsum(run_ends - run_starts))
    for number in np.unique(unit):
        here = slice(*np.searchsorted(unit[runs], [number, number + 1]))
        into = [buffer[a:b] for a, b in pairwise(places[here.start : here.stop + 1])]
        _read_tokens(files[number], run_starts[here].tolist(), into)
    shift = (places[:-1] - run_starts)[np.cumsum(new) - 1]
    # Arrow copies values of any length at the speed of memory: document k is value 2 k, what lies behind it 2 k + 1
    offsets = buffer.itemsize * np.stack([start + shift, end + shift], axis=1).ravel()
    buffers = [None, pyarrow.py_buffer(offsets), pyarrow.py_buffer(buffer)]
    values = pyarrow.LargeBinaryArray.from_buffers(pyarrow.large_binary(), len(offsets) - 1, buffers)
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    for piece in _pieces(lengths, COPY_TOKENS):
        taken = values.take(pyarrow.array(2 * rank[piece]))
        yield np.frombuffer(taken.buffers()[2], buffer.dtype, int(lengths[piece].sum()))


def _read_tokens(path: Path, starts: Sequence[int], into: Sequence[np.ndarray]) -> None:
    with path.open("rb", buffering=0) as file:
        for start, tokens in zip(starts, into, strict=True):
            file.seek(start * tokens.itemsize)
            rest = tokens.view(np.uint8).data
            while rest:
                if not (count := file.readinto(rest)):
                    end = start + len(tokens)
                    raise ValueError(f"{path} ends before token {end}: truncated; run {UPSTREAM!r} again")
                rest = rest[count:]
