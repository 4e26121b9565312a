"""Near copies: documents.parquet of all sources -> DIR/dedup/<source>/unit-NNNNN/, the rows left out.

MinHash with datatrove's text normalisation, shingles and hash functions: two documents are near
copies when all hashes of a bucket (a band) are equal. A document stays only if it comes first in all
of its bands (docs/decisions/data-pipeline.md). Off by default; `order` drops a source's exact duplicates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import xxhash

from data_mixtures import document_ids, recipe, shards
from data_mixtures.ngrams import begins_run
from data_mixtures.shards import Json
from data_mixtures.stages import blocks, documents, quality, stage
from data_mixtures.stages.documents import ALL, DEDUP, Grouped, files_of_all, of_all
from data_mixtures.stages.stage import DOCUMENTS, Stage, Unit

SIGNATURES, BANDS = "signatures", "bands"
SORTED = "sorted.npy"
ROWS_PER_RANGE = 1 << 25  # about 1.5 GB while they are compared
_BAND = np.dtype([("hash", "<u8"), ("row", "<u4"), ("held_out", "?")])
_NUMBER = np.dtype([("number", "<u8")])
_TRAINED = np.uint64(1 << 63)


@dataclass(frozen=True)
class Signatures(Grouped):
    """The stage `signatures`: sorted.npy holds a _BAND row per band and document, by hash."""

    name = SIGNATURES

    def result_key(self, unit: Unit) -> str:
        settings = asdict(self.recipe.dedup)
        del settings["minhash"], settings["contained_share"]
        packages = quality.versions(("datatrove", "spacy"))
        held_out = self.recipe.valid_per_10000_of(unit.source)
        return stage.key_of(self.name, settings, packages, held_out, self.files(unit))

    def make(self, unit: Unit, folder: Path) -> Json:
        sign = signer(self.recipe.dedup)
        lows = list[int]()
        hashes = [np.empty(0, np.uint64)]
        for member, _ in self.members(unit):
            path = stage.check_file(self.out, "filter", member, DOCUMENTS)
            for ids, texts, _ in documents.read_documents(path):
                new = list(map(document_ids.low_half, ids))
                hashes += map(sign, map(bytes.decode, texts), new)
                lows += new
        rows = np.zeros(len(lows) * self.recipe.dedup.buckets, _BAND)
        rows["hash"] = np.concatenate(hashes)
        held_out = document_ids.is_held_out(
            np.array(lows, np.uint64), self.recipe.valid_per_10000_of(unit.source)
        )
        for name, values in (("row", np.arange(len(lows))), ("held_out", held_out)):
            rows[name] = np.repeat(values, self.recipe.dedup.buckets)
        rows = rows[np.argsort(rows["hash"], kind="stable")]
        write_sorted(folder, rows)
        return {"documents": len(lows)}


def signer(settings: recipe.Dedup) -> Callable[[str, int], np.ndarray]:
    """Return a function (text, low half of its id) -> uint64 hashes of the bands."""
    from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature
    from datatrove.utils.word_tokenizers import WordTokenizer

    # splits at spaces, after punctuation is removed: the words of spaCy, ten times as fast
    class Words(WordTokenizer):
        def word_tokenize(self, text: str) -> list[str]:
            return text.split()

        sent_tokenize = span_tokenize = word_tokenize  # not used

    config = MinhashConfig(settings.n_grams, settings.buckets, settings.hashes_per_bucket)
    config.norm_config.norm_numbers = not settings.numbers
    step = MinhashDedupSignature("unused", config, settings.language or Words())
    # xxhash 4 takes bytes, datatrove gives text
    step._hash_func = lambda text: xxhash.xxh64_intdigest(text.encode())

    def sign(text: str, low: int) -> np.ndarray:
        shingles = step.get_shingles(text)
        # text without shingles gets its id, so that such texts are no near copies of each other
        if not shingles.size:
            return np.full(settings.buckets, low, np.uint64)
        bands = enumerate(np.array(step.get_signature(shingles), "<u8"))
        return np.array(
            [xxhash.xxh3_64_intdigest(band_hashes.data, seed=band) for band, band_hashes in bands],
            np.uint64,
        )

    return sign


def write_sorted(folder: Path, rows: np.ndarray) -> None:
    shards.save_array(folder / SORTED, rows)
    blocks.seal(folder / SORTED)


@dataclass(frozen=True)
class Bands(Stage):
    """The stage `bands`: a unit is a range of hashes."""

    # writes the numbers (_NUMBER) of documents that are not first in a band, each once, ascending.
    # A number is a document's place in all units of all sources
    name = BANDS

    def units(self) -> list[Unit]:
        return [Unit(ALL.source, number) for number in range(self.ranges())]

    def ranges(self) -> int:
        count = sum(receipt["counts"]["documents"] for _, receipt, _ in of_all(self, SIGNATURES))
        return max(-(-count * self.recipe.dedup.buckets // ROWS_PER_RANGE), 1)

    def result_key(self, unit: Unit) -> str:
        return stage.key_of(self.name, unit.number, self.ranges(), files_of_all(self, SIGNATURES))

    def make(self, unit: Unit, folder: Path) -> Json:
        count = self.ranges()
        low = unit.number * 2**64 // count
        high = (unit.number + 1) * 2**64 // count
        hashes = [np.empty(0, np.uint64)]
        ranks = [np.empty(0, np.uint64)]
        for group, _, first in of_all(self, SIGNATURES):
            with blocks.open_files(self.out, SIGNATURES, [group], SORTED) as (file,):
                rows = file.read_rows("hash", low, high)
            hashes.append(rows["hash"])
            # held-out documents rank before the rest, so that no run trains on a near copy of its
            # validation; then the recipe's order counts
            trained = np.where(rows["held_out"], np.uint64(0), _TRAINED)
            ranks.append(rows["row"].astype(np.uint64) + np.uint64(first) + trained)
        # so no two documents that stay share a band. No pairs, no clusters: linear in documents
        later = np.unique(not_first(np.concatenate(hashes), np.concatenate(ranks)) & ~_TRAINED)
        write_sorted(folder, later.view(_NUMBER))
        return {"rows": sum(map(len, hashes)), "later": len(later)}


def not_first(hashes: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """Return the ranks that share a hash with a lower rank, once per such hash."""
    order = np.lexsort((ranks, hashes))
    hashes = hashes[order]
    ranks = ranks[order]
    new = begins_run(hashes)
    return ranks[ranks != ranks[new][np.cumsum(new) - 1]]


@dataclass(frozen=True)
class Dedup(Grouped):
    """The stage `dedup`: the rows of a group that are left out."""

    name = DEDUP

    def _bands(self) -> list[Unit]:
        return Bands(self.recipe, self.out, self.sources).units()

    def result_key(self, unit: Unit) -> str:
        receipts = stage.receipts(self.out, BANDS, ALL.source, len(self._bands()))
        later = [receipt["files"] for receipt in receipts]
        return stage.key_of(self.name, str(unit), self.files(unit), later)

    def make(self, unit: Unit, folder: Path) -> Json:
        # its rows of all ranges: every row is written once and read once
        _, receipt, first = next(group for group in of_all(self, SIGNATURES) if group[0] == unit)
        count = receipt["counts"]["documents"]
        with blocks.open_files(self.out, BANDS, self._bands(), SORTED) as files:
            ranges = [file.read_rows("number", first, first + count)["number"] for file in files]
        numbers = np.unique(np.concatenate(ranges)).astype(np.int64) - first
        documents.write_rows(folder, self.members(unit), numbers)
        return {"documents": count, documents.NEAR_DUPLICATE: len(numbers)}
