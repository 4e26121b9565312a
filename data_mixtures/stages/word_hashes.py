"""Text as hashes of words: in lower case, split at all that is no letter, digit or combining mark, vectorised.

A word's hash is a polynomial mod 2**64 over its characters, mixed; a gram's is a polynomial over its words' hashes. The
sum over a word is the difference of two running sums, so a character costs one multiplication and one addition.
"""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Iterator

import numpy as np

WINDOW_CHARS = 1 << 16  # arrays of one window stay in the cache; a word of more characters than this counts as several
_CODE_POINTS, _ASSIGNED = 0x110000, 0x40000  # no letter is above the fourth plane
_CHARACTER, _WORD = 0x5851F42D4C957F2D, 0xD6E8FEB86659FD93  # odd multipliers of the two polynomials


def groups(texts: list[str]) -> Iterator[list[str]]:
    """Texts in runs of about one window; a longer text is alone."""
    group: list[str] = []
    size = 0
    for text in texts:
        if group and size + len(text) > WINDOW_CHARS:
            yield group
            group, size = [], 0
        group.append(text)
        size += len(text) + 1
    if group:
        yield group


def words(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of all words, uint64, and bounds int64 (texts + 1,): text i has hashes[bounds[i]:bounds[i + 1]]."""
    if len(texts) == 1:
        hashes = np.concatenate([_window(piece)[0] for piece in _pieces(texts[0])])
        return hashes, np.array([0, len(hashes)])
    hashes, starts = _window("\n".join(texts))
    sizes = np.array([len(text) + 1 for text in texts])
    return hashes, np.searchsorted(starts, np.concatenate([[0], np.cumsum(sizes)]))


def _pieces(text: str) -> Iterator[str]:
    """A text in pieces of at most one window, cut between words."""
    start = 0
    while len(text) - start > WINDOW_CHARS:
        cut = max(text.rfind(separator, start, start + WINDOW_CHARS) for separator in "\n ")
        end = cut if cut > start else start + WINDOW_CHARS
        yield text[start:end]
        start = end
    yield text[start:]


def _window(text: str) -> tuple[np.ndarray, np.ndarray]:
    """(hash, start in characters) of every word."""
    characters = _folded(text)
    starts, ends = _runs(characters)
    powers, inverses = _powers(1 << max(WINDOW_CHARS, len(text)).bit_length())
    sums = np.zeros(len(characters) + 1, np.uint64)
    np.cumsum(characters * powers[: len(characters)], out=sums[1:])
    return _mixed((sums[ends] - sums[starts]) * inverses[starts]), starts


def _folded(text: str) -> np.ndarray:
    """The text's characters as numbers: the lower case of a word's characters, 0 for all others; uint8 or uint32."""
    if text.isascii():
        return np.frombuffer(text.encode("ascii").translate(_characters()[:256].astype(np.uint8).tobytes()), np.uint8)
    return _characters()[np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), "<u4")]


def _runs(characters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(starts, ends) of the words."""
    edges = np.flatnonzero(np.diff(characters != 0, prepend=False, append=False))
    return edges[::2], edges[1::2]


def grams(words: np.ndarray, length: int) -> np.ndarray:
    """The hash of the gram that starts at each word."""
    return grams_at(words, slice(max(len(words) - length + 1, 0)), length)


def grams_at(words: np.ndarray, at: np.ndarray | slice, length: int) -> np.ndarray:
    """The hashes of the grams that start at some words: the sum of words[at + i] * multiplier**i."""
    hashes = words[at].copy()
    for i in range(1, length):
        hashes += words[i:][at] * np.uint64(pow(_WORD, i, 1 << 64))
    return hashes


def say_something(texts: list[str]) -> np.ndarray:
    """For every word of `words(texts)` whether it has two letters in a row or more: the words that say something."""
    flags = []
    for piece in _pieces(texts[0]) if len(texts) == 1 else ["\n".join(texts)]:
        starts, ends = _runs(_folded(piece))
        letters = np.array([character.isalpha() for character in piece], dtype=np.int64)
        counts = np.concatenate([[0], np.cumsum(letters)])
        flags.append(counts[ends] - counts[starts] >= 2)
    return np.concatenate(flags)


@functools.cache
def _characters() -> np.ndarray:
    """uint32 (code points,): the lower case of a letter, digit or combining mark, 0 for all others."""
    folded = np.zeros(_CODE_POINTS, np.uint32)
    for code in range(_ASSIGNED):
        character = chr(code)
        if unicodedata.category(character)[0] in "LMN":
            lower = character.lower()
            folded[code] = ord(lower) if len(lower) == 1 else code
    return folded


@functools.cache
def _powers(count: int) -> tuple[np.ndarray, np.ndarray]:
    """uint64 (count,) each: the character multiplier to the power of 0, 1, ..., and the inverses."""
    bases = np.array([_CHARACTER, pow(_CHARACTER, -1, 1 << 64)], np.uint64)
    powers = np.cumprod(np.repeat(bases[:, None], count, axis=1), axis=1, dtype=np.uint64)
    powers = np.concatenate([np.ones((2, 1), np.uint64), powers[:, :-1]], axis=1)
    return powers[0], powers[1]


def _mixed(values: np.ndarray) -> np.ndarray:
    """A bijection of 64 bits in which every bit of the input reaches every bit of the output (splitmix64's)."""
    values = values ^ (values >> np.uint64(30))
    values = values * np.uint64(0xBF58476D1CE4E5B9)
    values = values ^ (values >> np.uint64(27))
    values = values * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
