"""Decontamination: which benchmark items a document holds, by an index of hashes (`ngrams`).

Every string of an item (question, choice, solution, test) is a passage; a document that holds one
is dropped.
"""

from __future__ import annotations

import glob
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq

from data_mixtures import ngrams
from data_mixtures.readers.columns import read_values
from data_mixtures.readers.local import SUFFIXES, json_objects
from data_mixtures.readers.unpack import split_codec
from data_mixtures.shards import Json
from data_mixtures.stages import stage
from records.files import file_sha256, write_atomically

INDEX = "benchmarks.npz"


@dataclass(frozen=True)
class Benchmark:
    """An indexed benchmark; the order of `files` numbers the items from 0."""

    name: str
    items: int
    searchable: int  # items with a passage that is long enough
    files: Mapping[str, str]  # number and name, as names repeat in other folders -> sha256


class Index(NamedTuple):
    """The passages of all benchmarks; items: each passage's, numbered through all benchmarks."""

    benchmarks: tuple[Benchmark, ...]
    passages: ngrams.Index
    items: np.ndarray

    def find(self, texts: list[str]) -> list[list[tuple[str, int]]]:
        """Return the sorted (benchmark, item number) that each text holds."""
        starts = np.cumsum([0, *(benchmark.items for benchmark in self.benchmarks)])
        matches: list[set[tuple[int, int]]] = [set() for _ in texts]
        text, passage = self.passages.find_passages(texts)
        item = self.items[passage].astype(np.int64)
        owner = np.searchsorted(starts, item, side="right") - 1
        for place, benchmark, number in zip(text, owner, item - starts[owner], strict=True):
            matches[place].add((int(benchmark), int(number)))
        return [
            [(self.benchmarks[b].name, number) for b, number in sorted(items)] for items in matches
        ]


def make_index(benchmarks: Mapping[str, str], out: Path) -> None:
    """Write DIR/benchmarks.npz from JSON lines(.gz) or Parquet files, unless it is there.

    Args:
        benchmarks: name -> path or glob; if empty, there is no index.

    Raises:
        ValueError: names the files that are missing or unreadable.
    """
    path = out / INDEX
    if not benchmarks:
        path.unlink(missing_ok=True)
        return
    files = {name: _find_files(name, pattern) for name, pattern in benchmarks.items()}
    hashes = {
        name: {f"{i} {p.name}": file_sha256(p) for i, p in enumerate(files[name])} for name in files
    }
    code = stage.key_of("benchmarks")
    header = _header(path) or {"code": "", "benchmarks": ()}
    indexed = {benchmark["name"]: benchmark["files"] for benchmark in header["benchmarks"]}
    if (header["code"], indexed) == (code, hashes):
        return
    items = {
        name: list(chain.from_iterable(map(_read_items, paths))) for name, paths in files.items()
    }
    index, owners = build(chain.from_iterable(items.values()))
    searchable = np.unique(owners[index.needed > 0])
    ends = np.cumsum([len(of) for of in items.values()])
    owners_of_searchable = np.searchsorted(ends, searchable, side="right")
    inside = np.bincount(owners_of_searchable, minlength=len(items)).tolist()
    counts = zip(items, inside, strict=True)
    described = [
        asdict(Benchmark(name, len(items[name]), count, hashes[name])) for name, count in counts
    ]
    text = json.dumps({"code": code, "benchmarks": described}).encode()
    archive = io.BytesIO()
    np.savez(archive, header=np.frombuffer(text, np.uint8), items=owners, **vars(index))
    write_atomically(path, archive.getvalue())


def read_benchmarks(out: Path) -> tuple[Benchmark, ...]:
    header = _header(out / INDEX)
    return tuple(Benchmark(**benchmark) for benchmark in header["benchmarks"]) if header else ()


def load(out: Path, names: Iterable[str]) -> Index | None:
    """Return the index of a data folder; ValueError if it is of other benchmarks."""
    return _load(out / INDEX) if identity(out, names) else None


@stage.cache_by_file
def _load(path: Path) -> Index:
    with np.load(path) as stored:
        passages = ngrams.Index(*(stored[field.name] for field in fields(ngrams.Index)))
        return Index(read_benchmarks(path.parent), passages, stored["items"])


def identity(out: Path, names: Iterable[str]) -> Any:
    """Return what keys say about the index. ValueError as `load`."""
    header = _header(out / INDEX)
    indexed = {benchmark["name"] for benchmark in header["benchmarks"]} if header else set()
    if indexed != set(names):
        difference = f"holds {sorted(indexed)}, the recipe names {sorted(names)}"
        raise ValueError(f"{out / INDEX} {difference}; make the index first")
    return header


def _header(path: Path) -> Json | None:
    if not path.is_file():
        return None
    with np.load(path) as stored:
        return json.loads(stored["header"].tobytes())


def build(items: Iterable[Iterable[str]]) -> tuple[ngrams.Index, np.ndarray]:
    """Return the index, and each passage's item (int32), numbered in order."""
    numbered = [(number, text) for number, texts in enumerate(items) for text in texts]
    grams = ngrams.passage_grams([text for _, text in numbered])
    owners = np.array([number for number, _ in numbered], np.int32)
    return ngrams.Index.build(*grams, len(numbered)), owners


def _find_files(name: str, pattern: str) -> list[Path]:
    matches = map(Path, glob.glob(pattern, recursive=True))
    paths = sorted(path for path in matches if path.is_file())
    if not paths:
        raise ValueError(
            f"[filter] benchmarks: {name} = {pattern!r} matches no file. Download the benchmark's items as JSON lines "
            "(.jsonl, .jsonl.gz) or Parquet to that place, or leave the benchmark out of the recipe"
        )
    for path in paths:
        plain, codec = split_codec(path.name)
        kind = SUFFIXES.get(Path(plain).suffix.lower())
        if kind is None or (kind == "parquet" and codec):
            raise ValueError(f"benchmark {name}: {path} must end in .jsonl, .jsonl.gz or .parquet")
    return paths


def _read_items(path: Path) -> Iterator[list[str]]:
    if path.suffix.lower() != ".parquet":
        for _, item in json_objects(path):
            yield list(strings(item))
        return
    for batch in pq.ParquetFile(path).iter_batches(1024):
        # by place: two columns may have one name, of which a dictionary would keep the last
        for row in zip(*map(read_values, batch.columns), strict=True):
            yield list(strings(dict(enumerate(row))))


def strings(value: Any, inside_list: bool = False) -> Iterator[str]:
    """Yield all strings of an item, except in lists within lists."""
    if isinstance(value, str):
        yield value
    # lists within lists are arguments of tests, such as pangrams
    elif isinstance(value, dict) or (isinstance(value, list) and not inside_list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from strings(inner, inside_list or isinstance(value, list))
