"""Held-out documents whose text is also in training: DIR/contained/all/unit-00000/, the rows left out.

A held-out document is left out of validation when documents of training hold `contained_share` of
its runs of 13 words. Words, runs and their search are those of `ngrams`; a document is a passage.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from data_mixtures import document_ids, ngrams, shards
from data_mixtures.shards import Json
from data_mixtures.stages import documents, stage
from data_mixtures.stages.documents import ALL, CONTAINED, Grouped, files_of_all, of_all
from data_mixtures.stages.stage import DOCUMENTS, Stage, Unit

HELD_OUT, SCAN = "held_out", "scan"
GRAMS, FOUND = "grams.npy", "found.npy"
MOST_GRAMS = 64
_GRAM = np.dtype([("head", "<u8"), ("gram", "<u8"), ("document", "<u4")])


class _Texts(Grouped):
    def decides(self, unit: Unit) -> list[Any]:
        """Return what keys say about a group's documents and which are held out."""
        near = [
            documents.near_copies(self.recipe, self.out, member) for member, _ in self.members(unit)
        ]
        digests = [xxhash.xxh3_64_hexdigest(rows.tobytes()) for rows in near]
        return [self.recipe.valid_per_10000_of(unit.source), self.files(unit), digests]

    def texts(self, unit: Unit, held_out: bool) -> Iterator[tuple[np.ndarray, list[str]]]:
        """Yield numbers and texts of the group's held-out documents, or of all others."""
        # a document's number is its row in all units of the group, near copies included
        per_10000 = self.recipe.valid_per_10000_of(unit.source)
        first = 0
        for member, receipt in self.members(unit):
            # near copies are left out before
            near = documents.near_copies(self.recipe, self.out, member)
            numbers = first + np.delete(np.arange(receipt["counts"]["kept"]), near)
            path = stage.check_file(self.out, "filter", member, DOCUMENTS)
            for ids, texts, _ in documents.read_documents(path, near):
                lows = np.array(list(map(document_ids.low_half, ids)), np.uint64)
                selected = document_ids.is_held_out(lows, per_10000) == held_out
                yield (
                    numbers[: len(ids)][selected],
                    [texts[place].decode() for place in np.flatnonzero(selected)],
                )
                numbers = numbers[len(ids) :]
            first += receipt["counts"]["kept"]


class HeldOut(_Texts):
    """The stage `held_out`: grams.npy holds the _GRAM rows of held-out documents."""

    name = HELD_OUT

    def result_key(self, unit: Unit) -> str:
        return stage.key_of(self.name, self.decides(unit))

    def make(self, unit: Unit, folder: Path) -> Json:
        parts = [np.empty(0, _GRAM)]
        count = 0
        for numbers, texts in self.texts(unit, held_out=True):
            heads, grams, passages = ngrams.passage_grams(texts)
            chosen = _smallest(passages, grams)
            rows = np.zeros(len(chosen), _GRAM)
            rows["head"] = heads[chosen]
            rows["gram"] = grams[chosen]
            rows["document"] = numbers[passages[chosen]]
            parts.append(rows)
            count += len(texts)
        shards.save_array(folder / GRAMS, np.concatenate(parts))
        size = sum(receipt["counts"]["kept"] for _, receipt in self.members(unit))
        return {"documents": size, "held_out": count}


def _smallest(passages: np.ndarray, grams: np.ndarray) -> np.ndarray:
    """Return the places of each passage's MOST_GRAMS smallest distinct grams."""
    # the runs with the smallest hashes are a fair sample of many
    order = np.lexsort((grams, passages))
    order = order[ngrams.begins_run(passages[order], grams[order])]
    begins = np.searchsorted(passages[order], passages[order])
    return order[np.arange(len(order)) - begins < MOST_GRAMS]


def _index(work: Stage) -> tuple[ngrams.Index, np.ndarray]:
    groups = tuple((group, first) for group, _, first in of_all(work, HELD_OUT))
    return _build_index(work.out, groups, str(files_of_all(work, HELD_OUT)))


@functools.lru_cache(maxsize=1)
def _build_index(
    out: Path, groups: tuple[tuple[Unit, int], ...], _: str
) -> tuple[ngrams.Index, np.ndarray]:
    # a worker holds the runs of all held-out documents, 64 times 20 bytes each
    rows = [np.load(stage.check_file(out, HELD_OUT, group, GRAMS)) for group, _ in groups]
    pairs = zip(groups, rows, strict=True)
    owners = [
        first + document_grams["document"].astype(np.int64) for (_, first), document_grams in pairs
    ]
    numbers, passages = np.unique(np.concatenate(owners), return_inverse=True)
    heads, grams = (
        np.concatenate([document_grams[name] for document_grams in rows])
        for name in ("head", "gram")
    )
    return ngrams.Index.build(heads, grams, passages, len(numbers)), numbers


class Scan(_Texts):
    """The stage `scan`: found.npy has a bit for each held-out run that training holds."""

    name = SCAN

    def result_key(self, unit: Unit) -> str:
        return stage.key_of(self.name, self.decides(unit), files_of_all(self, HELD_OUT))

    def make(self, unit: Unit, folder: Path) -> Json:
        index, _ = _index(self)
        in_training = np.zeros(len(index.grams), bool)
        if len(in_training):
            for _, texts in self.texts(unit, held_out=False):
                in_training[index.find_grams(texts)[1]] = True
        shards.save_array(folder / FOUND, np.packbits(in_training))
        return {"documents": stage.receipt_of(self.out, HELD_OUT, unit)["counts"]["documents"]}


class Contained(Grouped):
    """The stage `contained`: the rows left out."""

    name = CONTAINED

    def units(self) -> list[Unit]:
        return [ALL]

    def result_key(self, unit: Unit) -> str:
        filtered = [self.files(group) for group, _, _ in of_all(self, SCAN)]
        share = self.recipe.dedup.contained_share
        scanned = files_of_all(self, HELD_OUT), files_of_all(self, SCAN)
        return stage.key_of(self.name, share, filtered, *scanned)

    def make(self, unit: Unit, folder: Path) -> Json:
        index, numbers = _index(self)
        first = index.first
        passages = index.passages
        bits = np.zeros(-(-len(first[1:]) // 8), np.uint8)
        groups = [group for group, _, _ in of_all(self, SCAN)]
        for group in groups:
            bits |= np.load(stage.check_file(self.out, SCAN, group, FOUND))
        in_training = np.unpackbits(bits, count=len(first) - 1).astype(bool)
        trained_passages = passages[np.repeat(in_training, np.diff(first))]
        runs = np.bincount(passages, minlength=len(numbers))
        trained_runs = np.bincount(trained_passages, minlength=len(numbers))
        # validation loses the document, training keeps its text: a held-out file that is only a
        # licence would else remove every file with that licence from training
        contained = numbers[trained_runs >= self.recipe.dedup.contained_share * runs]
        members = [member for group in groups for member in self.members(group)]
        documents.write_rows(folder, members, contained)
        return {"held_out": len(numbers), "contained": len(contained)}
