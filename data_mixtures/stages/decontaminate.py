"""Decontamination: which benchmark items a document holds, by runs of words, from an index that holds
hashes only.

A word is a run of letters, digits and combining marks, in lower case; everything else separates. A string
of an item (question, choice, solution, test) is a passage. A document holds a passage of at least 13 words
when it has half of the passage's distinct 13-grams, and a shorter one of at least 8 when it has all of its
words in a row; fewer words say nothing. Grams of numbers and single letters are left out. Why these:
docs/decisions/data-pipeline.md.

The first 8 words of a gram are its head. Two tables, by the highest bits of its hash and by those that
follow, keep almost all text away from the search in the sorted index.
"""

from __future__ import annotations

import glob
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow.parquet as pq

from data_mixtures.readers.local import json_objects
from data_mixtures.shards import Json
from data_mixtures.stages import stage
from data_mixtures.stages.word_hashes import all_gram_hashes, gram_hashes, groups, longer, say_something
from data_mixtures.stages.word_hashes import word_hashes as hashes_of
from records.files import file_sha256, write_atomically

INDEX = "benchmarks.npz"
GRAM_WORDS = 13
SHORTEST_WORDS = 8
_TELLING_WORDS = 3  # of two letters or more, that a gram needs: no alphabets, no lists of numbers
_TABLE_ENTRIES = 4, 16  # a hash; the first table stays in the cache, the second sees a fifth of the words
_ARRAYS = ("heads", "grams", "first", "passages", "needed", "items")


@dataclass(frozen=True)
class Benchmark:
    """What an index knows of one benchmark; the order of `files` numbers the items from 0."""

    name: str
    items: int
    searchable: int  # items with a passage that is long enough
    files: Mapping[str, str]  # number and name, as names repeat in other folders -> sha256


class Index:
    """Hashes of the passages of all benchmarks, and the search for them."""

    def __init__(self, benchmarks: tuple[Benchmark, ...], arrays: Mapping[str, np.ndarray]) -> None:
        self.benchmarks, self.arrays = benchmarks, arrays
        self._heads, self._grams = Known(arrays["heads"]), Known(arrays["grams"])

    def find(self, texts: list[str]) -> list[list[tuple[str, int]]]:
        """(benchmark, number of the item) of everything that each text holds, sorted."""
        starts = np.cumsum([0, *(benchmark.items for benchmark in self.benchmarks)])
        held: list[list[tuple[str, int]]] = [[] for _ in texts]
        text, item = self._held(*self._hits(texts))
        owner = np.searchsorted(starts, item, side="right") - 1
        for place, benchmark, number in zip(text, owner, item - starts[owner], strict=True):
            held[place].append((self.benchmarks[benchmark].name, int(number)))
        return held

    def grams_in(self, texts: list[str]) -> np.ndarray:
        """Places in `grams` of all that these texts hold, with repeats."""
        return self._hits(texts)[1]

    def _hits(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """(text, place in `grams`) of all that texts have."""
        found, first = [np.empty((2, 0), np.int64)], 0
        for group in groups(texts):
            text, place = self._hits_in(*hashes_of(group))
            found.append(np.stack([text + first, place]))
            first += len(group)
        text, place = np.concatenate(found, axis=1)
        return text, place

    def _hits_in(self, words: np.ndarray, bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The same of one group, where text i is words[bounds[i]:bounds[i + 1]]."""
        heads = all_gram_hashes(words, SHORTEST_WORDS)
        at = self._heads.find(heads)[0]
        hashes, grams, starts = heads[at], [], []
        ends = bounds[np.searchsorted(bounds, at, side="right")]  # of the text with the gram
        for length in range(SHORTEST_WORDS, GRAM_WORDS + 1):
            inside = at + length <= ends
            at, ends, hashes = at[inside], ends[inside], hashes[inside]
            if length > SHORTEST_WORDS:
                hashes = longer(hashes, words, at, length - 1)
            grams.append(hashes)
            starts.append(at)
        of, place = self._grams.find(np.concatenate(grams))
        return np.searchsorted(bounds, np.concatenate(starts)[of], side="right") - 1, place

    def _held(self, text: np.ndarray, place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(text, number of the item), sorted, of items with a passage of which a text has enough grams."""
        text, place = _distinct_pairs(text, place)[:2]
        first = self.arrays["first"]
        counts = first[place + 1] - first[place]
        at = np.arange(counts.sum()) + np.repeat(first[place] - np.cumsum(counts) + counts, counts)
        passage = self.arrays["passages"][at].astype(np.int64)
        text, passage, grams = _distinct_pairs(np.repeat(text, counts), passage)
        enough = grams >= self.arrays["needed"][passage]
        return _distinct_pairs(text[enough], self.arrays["items"][passage[enough]].astype(np.int64))[:2]


class Known:
    """Sorted hashes, and which of many others are among them."""

    def __init__(self, hashes: np.ndarray) -> None:
        self.hashes = hashes
        self._tables, done = [], 0
        for entries in _TABLE_ENTRIES:
            bits = max(10, (len(hashes) * entries).bit_length())
            shifts = np.uint64(done), np.uint64(64 - bits)
            table = np.zeros(1 << bits, bool)
            table[hashes << shifts[0] >> shifts[1]] = True
            self._tables.append((table, shifts))
            done += bits

    def find(self, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(places of those that are known, their places among the known)."""
        at = np.arange(len(hashes))
        for table, shifts in self._tables:
            bits = (hashes << shifts[0] >> shifts[1]).view(np.int64)
            inside = np.flatnonzero(table.take(bits, mode="wrap"))
            at, hashes = at[inside], hashes[inside]
        place = np.searchsorted(self.hashes, hashes)
        inside = np.flatnonzero(self.hashes[np.minimum(place, len(self.hashes) - 1)] == hashes)
        return at[inside], place[inside]


def make_index(benchmarks: Mapping[str, str], out: Path) -> None:
    """Write DIR/benchmarks.npz from files of JSON lines(.gz) or Parquet (name -> path or glob),
    unless it is there.

    Without benchmarks there is no index. ValueError names the files that are missing or unreadable.
    """
    path = out / INDEX
    if not benchmarks:
        path.unlink(missing_ok=True)
        return
    files = {name: _files(name, pattern) for name, pattern in benchmarks.items()}
    hashes = {name: {f"{i} {p.name}": file_sha256(p) for i, p in enumerate(files[name])} for name in files}
    code = stage.key_of("benchmarks")
    header = _header(path)
    if header and header["code"] == code and {b["name"]: b["files"] for b in header["benchmarks"]} == hashes:
        return
    items = {name: list(chain.from_iterable(map(_items, found))) for name, found in files.items()}
    arrays = build(chain.from_iterable(items.values()))
    searchable = np.unique(arrays["items"][arrays["needed"] > 0])
    ends = np.cumsum([len(of) for of in items.values()])
    inside = np.bincount(np.searchsorted(ends, searchable, side="right"), minlength=len(items)).tolist()
    found = zip(items, inside, strict=True)
    described = [asdict(Benchmark(name, len(items[name]), count, hashes[name])) for name, count in found]
    text = json.dumps({"code": code, "benchmarks": described}).encode()
    archive = io.BytesIO()
    np.savez(archive, header=np.frombuffer(text, np.uint8), **cast(Any, arrays))
    write_atomically(path, archive.getvalue())


def known_benchmarks(out: Path) -> tuple[Benchmark, ...]:
    """What the index of a data folder holds, nothing without one."""
    header = _header(out / INDEX)
    return tuple(Benchmark(**benchmark) for benchmark in header["benchmarks"]) if header else ()


def load(out: Path, names: Iterable[str]) -> Index | None:
    """The index of a data folder, None for no names. ValueError when it is of other benchmarks."""
    return _load(out / INDEX) if identity(out, names) else None


@stage.remembered
def _load(path: Path) -> Index:
    with np.load(path) as stored:
        arrays = {name: stored[name] for name in _ARRAYS}
    return Index(known_benchmarks(path.parent), arrays)


def identity(out: Path, names: Iterable[str]) -> Any:
    """What keys of filtered units say of the index: names, item counts, file hashes. ValueError as `load`."""
    header = _header(out / INDEX)
    held = {benchmark["name"] for benchmark in header["benchmarks"]} if header else set()
    if held != set(names):
        said = f"holds {sorted(held)}, the recipe names {sorted(names)}"
        raise ValueError(f"{out / INDEX} {said}; make the index first")
    return header


def _header(path: Path) -> Json | None:
    if not path.is_file():
        return None
    with np.load(path) as stored:
        return json.loads(stored["header"].tobytes())


def build(items: Iterable[Iterable[str]]) -> dict[str, np.ndarray]:
    """The arrays of an index: for each item its passages; items are numbered in this order.

    heads (H,) uint64: the first words of all grams. grams (G,) uint64, sorted; passages[first[i]:first[i +
    1]] have grams[i]. needed, items: per passage, how many of its grams make a text hold it, and whose it is.
    """
    numbered = [(number, text) for number, texts in enumerate(items) for text in texts]
    found = passage_grams([text for _, text in numbered])
    items = np.array([number for number, _ in numbered], np.int32)
    return {**arranged(*found, len(numbered)), "items": items}


def arranged(heads: np.ndarray, grams: np.ndarray, passages: np.ndarray, count: int) -> dict[str, np.ndarray]:
    """The arrays of an index but for `items`, from the grams of `count` passages."""
    order = np.lexsort((passages, grams))
    grams, passages = grams[order], passages[order]
    new = np.append(True, (np.diff(grams) != 0) | (np.diff(passages) != 0))[: len(grams)]
    unique, first = np.unique(grams[new], return_index=True)
    held = passages[new]
    return {
        "heads": np.unique(heads),
        "grams": unique,
        "first": np.append(first, len(held)).astype(np.int64),
        "passages": held.astype(np.int32),
        "needed": (np.bincount(held, minlength=count) + 1).astype(np.int32) // 2,
    }


def passage_grams(texts: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(head, gram, passage) of all texts: uint64, uint64, and the text's number."""
    found, start = [(np.empty(0, np.uint64), np.empty(0, np.uint64), np.empty(0, np.int64))], 0
    for group in groups(texts):
        heads, grams, passages = _passage_grams(group)
        found.append((heads, grams, passages + start))
        start += len(group)
    heads, grams, passages = (np.concatenate(column) for column in zip(*found, strict=True))
    return heads, grams, passages


def _passage_grams(texts: list[str]) -> tuple[np.ndarray, ...]:
    """(head, gram, passage) of what stands for passages: all 13-grams, or the whole of a short one."""
    words, bounds = hashes_of(texts)
    telling = np.concatenate([[0], np.cumsum(say_something(texts))])
    found = []
    for length in range(SHORTEST_WORDS, GRAM_WORDS + 1):
        at = np.arange(len(words) - length + 1)
        passage = np.searchsorted(bounds, at, side="right") - 1
        size = np.diff(bounds)[passage]
        wanted = (size >= length) if length == GRAM_WORDS else (size == length)
        wanted &= at + length <= bounds[passage + 1]
        wanted &= telling[at + length] - telling[at] >= _TELLING_WORDS
        at = at[wanted]
        grams = (gram_hashes(words, at, size) for size in (SHORTEST_WORDS, length))
        found.append((*grams, passage[wanted]))
    return tuple(np.concatenate(column) for column in zip(*found, strict=True))


def _distinct_pairs(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(first, second, how often) of the distinct pairs, sorted; int64, below 2**31 each."""
    pairs, counts = np.unique(first << 32 | second, return_counts=True)
    return pairs >> 32, pairs & 0xFFFFFFFF, counts


def _files(name: str, pattern: str) -> list[Path]:
    found = sorted(path for path in map(Path, glob.glob(pattern, recursive=True)) if path.is_file())
    if not found:
        raise ValueError(
            f"[filter] benchmarks: {name} = {pattern!r} matches no file. Download the benchmark's items as JSON lines "
            "(.jsonl, .jsonl.gz) or Parquet to that place, or leave the benchmark out of the recipe"
        )
    for path in found:
        if not path.name.endswith((".jsonl", ".jsonl.gz", ".parquet")):
            raise ValueError(f"benchmark {name}: {path} must end in .jsonl, .jsonl.gz or .parquet")
    return found


def _items(path: Path) -> Iterator[list[str]]:
    """The passages of every item of a file."""
    rows: Iterable[Any] = (item for _, item in json_objects(path))
    if path.suffix == ".parquet":
        rows = (row for batch in pq.ParquetFile(path).iter_batches(1024) for row in batch.to_pylist())
    return (list(strings(row)) for row in rows)


def strings(value: Any, inside_list: bool = False) -> Iterator[str]:
    """All strings of an item, except in lists within lists: those are arguments of tests, such as pangrams."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict) or (isinstance(value, list) and not inside_list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from strings(inner, inside_list or isinstance(value, list))
