"""Find which passages a text holds, by runs of words; used by decontamination and containment.

A word is a run of letters, digits and combining marks, in lower case. A text holds a passage of at
least 13 words when it has half of the passage's distinct 13-grams, and a shorter one of at least 8
when it has all of its words in a row. Reasons: docs/decisions/data-pipeline.md.
"""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

GRAM_WORDS = 13
SHORTEST_WORDS = 8
_TELLING_WORDS = 3  # of two letters or more, that a gram needs: no alphabets, no lists of numbers
# of texts at a time: enough that what a window costs besides its characters is little
WINDOW_CHARS = 1 << 19
_CODE_POINTS, _ASSIGNED = 0x110000, 0x40000  # no letter is above the fourth plane
_BYTES, _WORD = 0x5851F42D4C957F2D, 0xD6E8FEB86659FD93  # odd multipliers of the two polynomials
_EIGHT = 8
_LONGEST = 256  # bytes of a word that are hashed, besides its last eight and its length
# masks for eight bytes, of which the first n belong to a word
_FIRST = np.array([(1 << 8 * n) - 1 for n in range(_EIGHT + 1)], np.uint64)
# a hash; the first table stays in the cache, the second sees a fifth of the words
_TABLE_ENTRIES = 4, 16
Pair = tuple[np.ndarray, np.ndarray]  # columns of the same length, or words and their bounds
Triple = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Index:
    """Hashes of the grams of passages, and the search for them.

    heads: (H,) uint64, sorted, of the first words of all grams. grams: (G,) uint64, sorted;
    passages[first[i] : first[i + 1]] have grams[i]. needed: by passage, how many of its grams a text
    must have.
    """

    heads: np.ndarray
    grams: np.ndarray
    first: np.ndarray
    passages: np.ndarray
    needed: np.ndarray

    @classmethod
    def build(cls, heads: np.ndarray, grams: np.ndarray, passages: np.ndarray, count: int) -> Index:
        """Build the index from the grams of `count` passages, as `passage_grams` returns them."""
        order = np.lexsort((passages, grams))
        grams = grams[order]
        passages = passages[order]
        # a gram that a passage repeats counts once
        new = begins_run(grams, passages)
        unique, first = np.unique(grams[new], return_index=True)
        owners = passages[new]
        first = np.append(first, len(owners)).astype(np.int64)
        needed = (np.bincount(owners, minlength=count) + 1).astype(np.int32) // 2
        return cls(np.unique(heads), unique, first, owners.astype(np.int32), needed)

    def find_passages(self, texts: list[str]) -> Pair:
        """Return (text, passage) of everything that these texts hold, int64."""
        text, gram = _distinct_pairs(*self.find_grams(texts))[:2]
        counts = self.first[gram + 1] - self.first[gram]
        at = np.arange(counts.sum()) + np.repeat(
            self.first[gram] - np.cumsum(counts) + counts, counts
        )
        passage = self.passages[at].astype(np.int64)
        text, passage, grams = _distinct_pairs(np.repeat(text, counts), passage)
        enough = grams >= self.needed[passage]
        return text[enough], passage[enough]

    def find_grams(self, texts: list[str]) -> Pair:
        """Return (text, place in `grams`) of all grams of these texts, with repeats."""
        pairs = [np.empty((2, 0), np.int64)]
        first = 0
        for window in _windows(texts):
            text, place = self._find_in_window(*_word_hashes(window))
            pairs.append(np.stack([text + first, place]))
            first += len(window)
        text, place = np.concatenate(pairs, axis=1)
        return text, place

    def _find_in_window(self, words: np.ndarray, bounds: np.ndarray) -> Pair:
        """Find the grams of one window; text i is words[bounds[i] : bounds[i + 1]]."""
        heads = words
        # a head is 8 words: two halves of 4, which are two of 2
        for span in (1, 2, 4):
            heads = heads[:-span] + heads[span:] * _power(span)
        at = self._heads_lookup.find(heads)[0]
        hashes = heads[at]
        grams = []
        starts = []
        # the end of the text that holds the gram: no gram spans two texts
        ends = bounds[np.searchsorted(bounds, at, side="right")]
        for length in range(SHORTEST_WORDS, GRAM_WORDS + 1):
            inside = at + length <= ends
            at = at[inside]
            ends = ends[inside]
            hashes = hashes[inside]
            if length > SHORTEST_WORDS:
                hashes = hashes + words[at + length - 1] * _power(length - 1)
            grams.append(hashes)
            starts.append(at)
        of, place = self._grams_lookup.find(np.concatenate(grams))
        return np.searchsorted(bounds, np.concatenate(starts)[of], side="right") - 1, place

    @functools.cached_property
    def _heads_lookup(self) -> _Lookup:
        return _Lookup(self.heads)

    @functools.cached_property
    def _grams_lookup(self) -> _Lookup:
        return _Lookup(self.grams)


class _Lookup:
    def __init__(self, hashes: np.ndarray) -> None:
        self.hashes = hashes
        # two tables, by a hash's highest bits and by those that follow, keep almost all text away
        # from the binary search
        self._tables = []
        used_bits = 0
        for entries in _TABLE_ENTRIES:
            bits = max(10, (len(hashes) * entries).bit_length())
            shifts = np.uint64(used_bits), np.uint64(64 - bits)
            table = np.zeros(1 << bits, bool)
            table[hashes << shifts[0] >> shifts[1]] = True
            self._tables.append((table, shifts))
            used_bits += bits

    def find(self, hashes: np.ndarray) -> Pair:
        """Return (places of the hashes that this table holds, their places in it)."""
        at = np.arange(len(hashes))
        for table, shifts in self._tables:
            bits = (hashes << shifts[0] >> shifts[1]).view(np.int64)
            inside = np.flatnonzero(table.take(bits, mode="wrap"))
            at = at[inside]
            hashes = hashes[inside]
        place = np.searchsorted(self.hashes, hashes)
        nearest = np.minimum(place, len(self.hashes) - 1)
        inside = np.flatnonzero(self.hashes[nearest] == hashes)
        return at[inside], place[inside]


def begins_run(*columns: np.ndarray) -> np.ndarray:
    """Return which rows differ from the one before in a column: bool (rows,)."""
    begins = np.ones(len(columns[0]), bool)
    begins[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return begins


def passage_grams(texts: list[str]) -> Triple:
    """Return (head uint64, gram uint64, number of the text) of the grams of all texts.

    A text gives all its 13-grams, or the whole of a short one.
    """
    parts = [(np.empty(0, np.uint64), np.empty(0, np.uint64), np.empty(0, np.int64))]
    first = 0
    for window in _windows(texts):
        words, bounds = _word_hashes(window)
        telling = np.concatenate([[0], np.cumsum(_have_two_letters(window))])
        sizes = np.diff(bounds)
        for length in range(SHORTEST_WORDS, GRAM_WORDS + 1):
            at = np.arange(len(words) - length + 1)
            passage = np.searchsorted(bounds, at, side="right") - 1
            begins_gram = (
                sizes[passage] >= length if length == GRAM_WORDS else sizes[passage] == length
            )
            begins_gram &= at + length <= bounds[passage + 1]
            # leave out grams of numbers and single letters
            begins_gram &= telling[at + length] - telling[at] >= _TELLING_WORDS
            at = at[begins_gram]
            heads, grams = (_gram_hashes(words, at, size) for size in (SHORTEST_WORDS, length))
            parts.append((heads, grams, passage[begins_gram] + first))
        first += len(window)
    heads, grams, passages = (np.concatenate(column) for column in zip(*parts, strict=True))
    return heads, grams, passages


def _gram_hashes(words: np.ndarray, at: np.ndarray, length: int) -> np.ndarray:
    """Return the hashes of the grams at words `at`: the sum of words[at + i] * multiplier**i."""
    hashes = words[at].copy()
    for i in range(1, length):
        hashes += words[at + i] * _power(i)
    return hashes


def _power(exponent: int) -> np.uint64:
    return np.uint64(pow(_WORD, exponent, 1 << 64))


def _distinct_pairs(first: np.ndarray, second: np.ndarray) -> Triple:
    """Return (first, second, count) of the distinct pairs, sorted; int64, below 2**31 each."""
    pairs, counts = np.unique(first << 32 | second, return_counts=True)
    return pairs >> 32, pairs & 0xFFFFFFFF, counts


def _windows(texts: list[str]) -> Iterator[list[str]]:
    window: list[str] = []
    size = 0
    for text in texts:
        if window and size + len(text) > WINDOW_CHARS:
            yield window
            window = []
            size = 0
        window.append(text)
        size += len(text) + 1
    if window:
        yield window


def _word_hashes(texts: list[str]) -> Pair:
    """Return hashes (uint64) and bounds (texts + 1,): text i has hashes[bounds[i] : bounds[i + 1]]."""
    parts = [_fold(text) for text in texts]
    data = np.frombuffer(b"\0".join(parts), np.uint8)
    starts, ends = _runs(data)
    behind = np.cumsum([0, *(len(part) + 1 for part in parts)])
    return _hash_words(data, starts, ends), np.searchsorted(starts, behind)


def _fold(text: str) -> bytes:
    """Return the UTF-8 of `_lower`."""
    if text.isascii():
        return text.encode("ascii").translate(_make_fold_table())
    return (
        _lower(text).tobytes().decode("utf-32-le", "surrogatepass").encode("utf-8", "surrogatepass")
    )


def _lower(text: str) -> np.ndarray:
    """Return uint32: the lower case of word characters, 0 for others."""
    return _characters()[np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), "<u4")]


def _hash_words(data: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return uint64 hashes of the words data[starts[i] : ends[i]]."""
    # UTF-8, eight bytes at a time: a few operations a word
    padded = np.concatenate([data, np.zeros(_EIGHT, np.uint8)])
    # eight[i]: the eight bytes from byte i on, without a copy
    eight = np.ndarray(len(data) + 1, "<u8", padded, strides=(1,))
    sizes = ends - starts
    hashes = eight[starts] & _FIRST.take(sizes, mode="clip")
    at = np.flatnonzero(sizes > _EIGHT)
    for offset in range(_EIGHT, _LONGEST, _EIGHT):
        if not len(at):
            break
        next_eight = eight[starts[at] + offset] & _FIRST.take(sizes[at] - offset, mode="clip")
        hashes[at] = hashes[at] * np.uint64(_BYTES) + next_eight
        at = at[sizes[at] > offset + _EIGHT]
    hashes[at] = hashes[at] * np.uint64(_BYTES) + (
        eight[ends[at] - _EIGHT] ^ sizes[at].astype(np.uint64)
    )
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        # splitmix64's bijection: each of 64 bits reaches every bit of the result
        hashes = (hashes ^ (hashes >> np.uint64(shift))) * np.uint64(factor)
    return hashes


def _runs(characters: np.ndarray) -> Pair:
    """Return (starts, ends) of the words."""
    inside = np.zeros(len(characters) + 2, bool)
    np.not_equal(characters, 0, out=inside[1:-1])
    edges = np.flatnonzero(inside[1:] != inside[:-1])
    return edges[::2], edges[1::2]


def _have_two_letters(texts: list[str]) -> np.ndarray:
    """Return whether each word of `_word_hashes(texts)` has two letters or more."""
    text = "\n".join(texts)
    starts, ends = _runs(_lower(text))
    letters = np.cumsum([0, *(character.isalpha() for character in text)])
    return letters[ends] - letters[starts] >= 2


@functools.cache
def _characters() -> np.ndarray:
    """Return uint32 (code points,): the lower case of a letter, digit or mark, else 0."""
    folded = np.zeros(_CODE_POINTS, np.uint32)
    for code in range(_ASSIGNED):
        character = chr(code)
        if unicodedata.category(character)[0] in "LMN":
            lower = character.lower()
            folded[code] = ord(lower) if len(lower) == 1 else code
    return folded


@functools.cache
def _make_fold_table() -> bytes:
    return _characters()[:128].astype(np.uint8).tobytes() + bytes(range(128, 256))
