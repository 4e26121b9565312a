"""tokenize: documents.parquet -> DIR/tokenize/<source>/unit-NNNNN/{documents.npy, tokens.bin, origins.bin}.

The files list documents by (key, high, low): the halves of the 128-bit id, and key = xxh3_64(low,
seed).
"""

from __future__ import annotations

import functools
import heapq
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import xxhash

from data_mixtures import shards, tokenizer
from data_mixtures.document_ids import is_held_out, low_half, shuffle_key
from data_mixtures.recipe import Recipe, TokenizerFile, TokenizerTraining
from data_mixtures.shards import Json
from data_mixtures.stages import blocks, documents, repeats, stage
from data_mixtures.stages.stage import DOCUMENTS, Stage, Unit
from records.files import file_sha256, write_atomically, write_json

INDEX, TOKENS, ORIGINS = SLICED = "documents.npy", "tokens.bin", "origins.bin"
# key, high, low: see `document_ids`. start and length are of its tokens, in tokens of tokens.bin;
# origin and origin_bytes of the JSON that says where it came from, in bytes of origins.bin; bytes is
# the size of its text
_COLUMNS = ("key", "high", "low", "start", "origin"), ("length", "bytes", "origin_bytes")
DOCUMENT = np.dtype(
    [(name, kind) for names, kind in zip(_COLUMNS, ("<u8", "<u4"), strict=True) for name in names]
)
COMPARED_OF, _COMPARED_BYTES, _COMPARED_CHARS = 1000, 1 << 16, 100_000


@dataclass(frozen=True)
class Tokenize(Stage):
    """The stage `tokenize`; `make_tokenizer` must have run before."""

    name = "tokenize"

    def result_key(self, unit: Unit) -> str:
        filtered = stage.receipt_of(self.out, "filter", unit)["files"][DOCUMENTS]
        rows = np.concatenate(
            list(documents.find_left_out(self.recipe, self.out, unit).values())
        ).tobytes()
        left_out = xxhash.xxh3_64_hexdigest(rows) if rows else ""
        decides = [
            self.recipe.filter.repeated_ngrams,
            self.recipe.seed,
            _hashes(self.out),
            left_out,
        ]
        return stage.key_of(self.name, decides, filtered)

    def make(self, unit: Unit, folder: Path) -> Json:
        # after an inexact fast encoding, every file of the folder is written again from its beginning
        return self._encode(unit, folder, fast=True) or self._encode(unit, folder, fast=False)

    def _encode(self, unit: Unit, folder: Path, fast: bool) -> Json:
        """Return the counts, or {} if the fast encoder must not be used for this unit."""
        encoder = _load_tokenizer(shards.tokenizer_path(self.out), tuple(_hashes(self.out)))
        rows = []
        looping = [np.empty(0, bool)]
        encoded_bytes = 0
        drop_repeats = self.recipe.filter.repeated_ngrams
        unsorted = {name: folder / f".{name}.unsorted" for name in (TOKENS, ORIGINS)}
        with unsorted[TOKENS].open("wb") as token_file, unsorted[ORIGINS].open("wb") as origin_file:
            for ids, texts, origins in documents.read_remaining(self.recipe, self.out, unit):
                if fast and not is_exact(encoder, ids, texts, encoded_bytes):
                    return {}
                encoded_bytes += sum(map(len, texts))
                tokens, lengths = encoder.encode(texts, fast)
                token_file.write(tokens.data)
                origin_file.writelines(origins)
                rows.append(describe(ids, self.recipe.seed, lengths, texts, origins))
                looping.append(
                    repeats.find_repeats(tokens, lengths)
                    if drop_repeats
                    else np.zeros(len(ids), bool)
                )
        unit_documents = np.concatenate([np.empty(0, DOCUMENT), *rows])
        # a range of keys is then one slice of every unit, and the order of a source is a merge
        order = by_key(unit_documents)
        ordered = unit_documents[order := order[~np.concatenate(looping)[order]]]
        for name, start, length, dtype in parts(encoder.dtype):
            ordered[start] = np.cumsum(ordered[length], dtype=np.int64) - ordered[length]
            write_ordered(
                folder / name,
                unsorted[name],
                unit_documents[length] * np.int64(dtype.itemsize),
                order,
            )
            unsorted[name].unlink()
        shards.save_array(folder / INDEX, ordered)
        for name in SLICED:
            blocks.seal(folder / name)
        left_out = documents.find_left_out(self.recipe, self.out, unit)
        dropped = {reason: len(rows) for reason, rows in left_out.items()}
        dropped["repeated_ngrams"] = len(unit_documents) - len(ordered)
        slow = 0 if fast and encoder.fast else len(unit_documents)
        return {**totals(ordered), "slow": slow, "dropped": dropped}


def is_exact(
    encoder: tokenizer.Tokenizer, ids: list[bytes], texts: list[bytes], before: int
) -> bool:
    """Return whether the fast encoder gives the library's ids for a sample of these documents.

    Args:
        before: bytes of the unit's documents before these.
    """
    # the sample depends on the unit alone, so every worker writes the same bytes
    for identity, text in zip(ids, texts, strict=True):
        chosen = before < _COMPARED_BYTES or int.from_bytes(identity[-4:], "big") % COMPARED_OF == 0
        before += len(text)
        if chosen and not encoder.is_exact(text.decode("utf-8")[:_COMPARED_CHARS]):
            return False
    return True


def parts(tokens: np.dtype) -> tuple[tuple[str, str, str, np.dtype], ...]:
    """Return (file, column of starts, column of lengths, dtype) of tokens and origins."""
    return (TOKENS, "start", "length", tokens), (ORIGINS, "origin", "origin_bytes", np.dtype("u1"))


def by_key(documents: np.ndarray) -> np.ndarray:
    """Return the stable order of documents by (key, high, low)."""
    return np.lexsort((documents["low"], documents["high"], documents["key"]))


def totals(documents: np.ndarray) -> dict[str, int]:
    tokens, size = (int(documents[name].sum(dtype=np.int64)) for name in ("length", "bytes"))
    return {"documents": len(documents), "tokens": tokens, "bytes": size}


def _hashes(out: Path) -> list[str]:
    return list(map(stage.sha256_of, shards.tokenizer_files(out)))


@functools.lru_cache(maxsize=1)
def _load_tokenizer(path: Path, hashes: tuple[str, ...]) -> tokenizer.Tokenizer:
    # every worker has one core
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return tokenizer.load(path)


def describe(
    ids: list[bytes], seed: int, lengths: np.ndarray, texts: list[bytes], origins: list[bytes]
) -> np.ndarray:
    """Return the unordered rows of documents.npy (DOCUMENT)."""
    rows = np.zeros(len(ids), DOCUMENT)
    rows["high"], rows["low"] = np.frombuffer(b"".join(ids), ">u8").reshape(-1, 2).T
    rows["key"] = [shuffle_key(identity, seed) for identity in ids]
    rows["length"] = lengths
    rows["bytes"] = list(map(len, texts))
    rows["origin_bytes"] = list(map(len, origins))
    return rows


def write_ordered(path: Path, unsorted: Path, sizes: np.ndarray, order: np.ndarray) -> None:
    """Write the documents of a file in another order.

    Args:
        sizes: bytes of each document, in the order of `unsorted`.
    """
    offsets = np.append(0, np.cumsum(sizes, dtype=np.int64))
    with path.open("wb") as file:
        if offsets[-1]:
            pieces = blocks.take_values(offsets, np.memmap(unsorted, mode="r"), order)
            file.writelines(piece.data for piece in pieces)


def make_tokenizer(recipe: Recipe, out: Path) -> None:
    """Write DIR/tokenizer.model or .json, given or trained, unless it is there."""
    receipt = out / f"tokenizer.{stage.RECEIPT}"
    settings = recipe.tokenizer
    key = _tokenizer_key(recipe, out)
    recorded = shards.read_json(receipt, "delete it") if receipt.is_file() else None
    if recorded == {"key": key, "sha256": _hashes(out)}:
        return
    is_json = isinstance(settings, TokenizerFile) and settings.path.endswith(".json")
    if not is_json and (out / shards.TOKENIZER_JSON).exists():
        raise ValueError(
            f"{out / shards.TOKENIZER_JSON} is not this recipe's, and would be used; remove it"
        )
    if isinstance(settings, TokenizerTraining):
        model = tokenizer.train(training_sample(recipe, out, settings.train_bytes), settings)
        write_atomically(out / shards.TOKENIZER_MODEL, model)
    else:
        tokenizer.copy_from_recipe(settings, out)
    write_json(receipt, {"key": key, "sha256": _hashes(out)})


def _tokenizer_key(recipe: Recipe, out: Path) -> str:
    settings = recipe.tokenizer
    if isinstance(settings, TokenizerFile):
        return stage.key_of(
            "tokenizer",
            file_sha256(Path(settings.path)),
            tokenizer.load_from_recipe(settings).names,
        )
    receipts = (stage.receipts(out, "filter", source.name) for source in recipe.sources)
    files = [[receipt["files"][DOCUMENTS] for receipt in of_source] for of_source in receipts]
    left_out = None
    if recipe.dedup.minhash:
        units = [unit for source in recipe.sources for unit in stage.list_units(out, source.name)]
        rows = [documents.near_copies(recipe, out, unit).tobytes() for unit in units]
        left_out = [xxhash.xxh3_64_hexdigest(unit_rows) for unit_rows in rows]
    return stage.key_of(
        "tokenizer", asdict(settings), recipe.seed, _find_most_held_out(recipe), files, left_out
    )


def _find_most_held_out(recipe: Recipe) -> int:
    # what any source holds out is not in the training sample
    return max(recipe.valid_per_10000_of(source.name) for source in recipe.sources)


def training_sample(recipe: Recipe, out: Path, train_bytes: int) -> list[str]:
    """Return training documents in shuffled order, train_bytes shared among sources by size."""
    sizes = {}
    for source in recipe.sources:
        counts = stage.counts(out, "filter", source.name)
        sizes[source.name] = sum(count["bytes"] for count in counts)
    # the documents with the smallest keys: a sample that does not depend on units or workers
    total = max(sum(sizes.values()), 1)
    sample = []
    for name, size in sizes.items():
        units = stage.list_units(out, name)
        batches = (batch for unit in units for batch in documents.read_remaining(recipe, out, unit))
        candidates = (
            document for ids, texts, _ in batches for document in zip(ids, texts, strict=True)
        )
        sample += first_documents(candidates, train_bytes * size // total, recipe)
    return sample


def first_documents(
    documents: Iterable[tuple[bytes, bytes]], budget: int, recipe: Recipe
) -> list[str]:
    """Return the documents that training sees first, until they hold `budget` bytes together.

    Args:
        documents: (id, text) in any order.
    """
    held_out = _find_most_held_out(recipe)
    # negative, so that the last in the shuffle's order comes first
    heap: list[tuple[int, int, bytes]] = []
    ids = set[int]()
    size = 0
    for identity, text in documents:
        number = int.from_bytes(identity, "big")
        if is_held_out(low_half(identity), held_out) or number in ids:
            continue
        heapq.heappush(heap, (-shuffle_key(identity, recipe.seed), -number, text))
        ids.add(number)
        size += len(text)
        while heap and size - len(heap[0][2]) >= budget:
            _, negative, last = heapq.heappop(heap)
            ids.remove(-negative)
            size -= len(last)
    return [text.decode("utf-8") for *_, text in sorted(heap, reverse=True)]
