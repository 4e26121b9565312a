"""Near copies: documents.parquet of all sources -> DIR/dedup/all/unit-00000/dropped.npy,
what tokenize leaves out.

MinHash with datatrove's normalisation of text, shingles and hash functions, and its rule: two documents are near copies
when all hashes of a bucket are equal, and near copies of near copies are one cluster. Of a cluster one document stays:
one that is held out, so that a run trains on no near copy of what it is validated on; else the first in the order of
the recipe's sources and of the documents in a source. Why not datatrove's own steps: docs/decisions/data-pipeline.md.

Three stages. `signatures`, by unit: a 64-bit hash of each bucket. `links`, by bucket: which documents
have equal ones. `dedup`, once: the clusters. A document's number is its place in all units of all
sources, in the recipe's order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from data_mixtures import recipe, shards
from data_mixtures.shards import Json
from data_mixtures.stages import quality, stage
from data_mixtures.stages.stage import DOCUMENTS, Stage, Unit

SIGNATURES, LINKS, DEDUP = "signatures", "links", "dedup"
ALL = Unit("all", 0)
FILE, LINKED, DROPPED, NUMBERS = "signatures.npy", "links.npy", "dropped.npy", "numbers.json"
DOCUMENTS_PER_PART = 1 << 25  # of a bucket are compared at a time: about 1 GB
_BATCH_ROWS = 256
COLUMNS = ("doc_id", "text", "origin")
Documents = tuple[list[bytes], list[bytes], list[bytes]]  # ids, texts as UTF-8, origins


@dataclass(frozen=True)
class Signatures(Stage):
    """signatures.npy: uint64 (1 + buckets, documents), flat: the low halves of the ids, then
    hashes of every bucket.
    """

    name = SIGNATURES

    def key(self, unit: Unit) -> str:
        documents = stage.receipt_of(self.out, "filter", unit)["files"][DOCUMENTS]
        settings = {name: value for name, value in asdict(self.recipe.dedup).items() if name != "minhash"}
        return stage.key_of(self.name, settings, quality.versions(("datatrove", "spacy")), documents)

    def work(self, unit: Unit, folder: Path) -> Json:
        sign, columns = signer(self.recipe.dedup), [np.empty((0, 1 + self.recipe.dedup.buckets), np.uint64)]
        for ids, texts, _ in read_documents(stage.checked(self.out, "filter", unit, DOCUMENTS)):
            lows = [int.from_bytes(identity[8:], "big") for identity in ids]
            rows = [[low, *sign(text.decode(), low)] for low, text in zip(lows, texts, strict=True)]
            columns.append(np.array(rows, np.uint64))
        shards.save_array(folder / FILE, np.concatenate(columns).T.ravel())
        return {"documents": sum(map(len, columns))}


def signer(settings: recipe.Dedup) -> Callable[[str, int], list[int]]:
    """(text, low half of its id) -> a hash for every bucket; a text without shingles has
    no copies but itself.
    """
    from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature
    from datatrove.utils.word_tokenizers import WordTokenizer

    class Words(WordTokenizer):
        """What stands between spaces, after the punctuation is gone: ten times as fast as spaCy,
        to the same end.
        """

        def word_tokenize(self, text: str) -> list[str]:
            return text.split()

        sent_tokenize = span_tokenize = word_tokenize  # not used

    config = MinhashConfig(settings.n_grams, settings.buckets, settings.hashes_per_bucket)
    config.norm_config.norm_numbers = not settings.numbers
    step = MinhashDedupSignature("unused", config, settings.language or Words())
    step._hash_func = lambda text: xxhash.xxh64_intdigest(
        text.encode()
    )  # xxhash 4 takes bytes, datatrove gives text

    def sign(text: str, low: int) -> list[int]:
        shingles = step.get_shingles(text)
        if not shingles.size:
            return [low] * settings.buckets
        return [xxhash.xxh3_64_intdigest(np.array(each, "<u8").data) for each in step.get_signature(shingles)]

    return sign


def _signed(work: Stage) -> Iterator[tuple[Unit, Json, int]]:
    """(unit, receipt of its signatures, number of its first document) of all units of all sources."""
    first = 0
    for source in (each.name for each in work.recipe.sources):
        for number, receipt in enumerate(stage.receipts(work.out, SIGNATURES, source)):
            yield Unit(source, number), receipt, first
            first += receipt["counts"]["documents"]


def _files(work: Stage) -> list[Any]:
    """What the keys of links and clusters say about the signatures."""
    return [[str(unit), receipt["files"]] for unit, receipt, _ in _signed(work)]


def signatures(work: Stage, unit: Unit) -> np.ndarray:
    path = stage.checked(work.out, SIGNATURES, unit, FILE)
    return np.load(path, mmap_mode="r").reshape(1 + work.recipe.dedup.buckets, -1)


@dataclass(frozen=True)
class Links(Stage):
    """links.npy: int64 (2, links), flat: the first document with a hash, each other one. A unit: a
    part of a bucket.
    """

    name = LINKS

    def units(self) -> list[Unit]:
        return [Unit(ALL.source, number) for number in range(self.recipe.dedup.buckets * self.parts())]

    def parts(self) -> int:
        documents = sum(receipt["counts"]["documents"] for _, receipt, _ in _signed(self))
        return max(1, -(-documents // DOCUMENTS_PER_PART))

    def key(self, unit: Unit) -> str:
        return stage.key_of(self.name, unit.number, self.parts(), _files(self))

    def work(self, unit: Unit, folder: Path) -> Json:
        bucket, part = divmod(unit.number, parts := self.parts())
        hashes, numbers = [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
        for each, _, first in _signed(self):
            row = signatures(self, each)[1 + bucket]
            here = np.flatnonzero(row % np.uint64(parts) == part)
            hashes.append(row[here])
            numbers.append(here + first)
        links = linked(np.concatenate(hashes), np.concatenate(numbers))
        shards.save_array(folder / LINKED, links.ravel())
        return {"links": links.shape[1]}


def linked(hashes: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """(2, links): the first of the ascending numbers with a hash, and every other one that has it."""
    order = np.argsort(hashes, kind="stable")
    hashes, numbers = hashes[order], numbers[order]
    new = np.append(True, hashes[1:] != hashes[:-1])[: len(hashes)]
    return np.stack([numbers[new][np.cumsum(new) - 1][~new], numbers[~new]])


@dataclass(frozen=True)
class Clusters(Stage):
    """dropped.npy: int64, numbers of near copies, ascending. numbers.json: of each
    unit's documents, [first, end).
    """

    name = DEDUP

    def units(self) -> list[Unit]:
        return [ALL]

    def key(self, unit: Unit) -> str:
        held_out = [self.recipe.held_out_of(each.name) for each in self.recipe.sources]
        links = [stage.receipt_of(self.out, LINKS, each)["files"] for each in self._links()]
        return stage.key_of(self.name, held_out, _files(self), links)

    def _links(self) -> list[Unit]:
        return Links(self.recipe, self.out, self.sources).units()

    def work(self, unit: Unit, folder: Path) -> Json:
        paths = [stage.checked(self.out, LINKS, each, LINKED) for each in self._links()]
        links = np.concatenate([np.load(path).reshape(2, -1) for path in paths], axis=1)
        numbers, places = np.unique(links, return_inverse=True)
        held_out, ends = np.zeros(len(numbers), bool), {}
        for each, receipt, begin in _signed(self):
            end = begin + receipt["counts"]["documents"]
            ends[str(each)] = begin, end
            here = slice(*np.searchsorted(numbers, [begin, end]))
            low = signatures(self, each)[0]
            below = shards.held_out_below(self.recipe.held_out_of(each.source))
            held_out[here] = low[numbers[here] - begin] < np.uint64(below)
        root = roots(places.reshape(links.shape), len(numbers))
        stays = np.zeros(len(numbers), bool)
        stays[chosen(root, held_out)] = True
        shards.save_array(folder / DROPPED, numbers[~stays])
        shards.write_json(folder / NUMBERS, ends)
        counts = {"documents": end, "clusters": int(stays.sum()), "near_duplicate": int((~stays).sum())}
        return {**counts, "clusters_held_out": int((stays & held_out).sum())}


def roots(links: np.ndarray, count: int) -> np.ndarray:
    """For each of `count` nodes the smallest node of its connected component."""
    root = np.arange(count)
    while True:
        one, other = root[links]
        if (one == other).all():
            return root
        np.minimum.at(root, np.maximum(one, other), np.minimum(one, other))
        while ((higher := root[root]) != root).any():
            root = higher


def chosen(root: np.ndarray, held_out: np.ndarray) -> np.ndarray:
    """The node of each cluster that stays: the first that is held out, or else the first."""
    order = np.lexsort((~held_out, root))  # by cluster, then what is held out, then as they come
    return order[np.unique(root[order], return_index=True)[1]]


def documents(recipe: recipe.Recipe, out: Path, unit: Unit) -> Iterator[Documents]:
    """What the filter kept of a unit, but for near copies."""
    return read_documents(stage.checked(out, "filter", unit, DOCUMENTS), dropped_rows(recipe, out, unit))


def read_documents(path: Path, without: Any = ()) -> Iterator[Documents]:
    """documents.parquet in batches, but for the rows `without`."""
    with pq.ParquetFile(path, memory_map=True) as parquet:
        stays, first = np.ones(parquet.metadata.num_rows, bool), 0
        stays[np.asarray(without, np.int64)] = False
        for batch in parquet.iter_batches(_BATCH_ROWS):
            here, first = stays[first : first + batch.num_rows], first + batch.num_rows
            batch = batch if here.all() else batch.filter(pa.array(here))
            ids, texts, origins = (batch.column(name).cast(pa.binary()).to_pylist() for name in COLUMNS)
            yield ids, texts, origins


def dropped_rows(recipe: recipe.Recipe, out: Path, unit: Unit) -> np.ndarray:
    """The rows of a unit's documents.parquet that are near copies, ascending; none without [dedup]."""
    if not recipe.dedup.minhash:
        return np.empty(0, np.int64)
    folder, _ = stage.result(out, DEDUP, ALL)
    dropped, numbers = _loaded(folder / NUMBERS)
    if str(unit) not in numbers:
        raise ValueError(f"{folder} does not know {unit}, which was planned later; run {DEDUP!r} again")
    begin, end = np.searchsorted(dropped, numbers[str(unit)])
    return dropped[begin:end] - numbers[str(unit)][0]


@stage.remembered
def _loaded(path: Path) -> tuple[np.ndarray, dict[str, list[int]]]:
    out = path.parents[3]  # of DIR/dedup/all/unit-00000/numbers.json
    dropped, numbers = (stage.checked(out, DEDUP, ALL, name) for name in (DROPPED, NUMBERS))
    return np.load(dropped), shards.read_json(numbers, "start again")
