"""Text as hashes of words: all characters of a window at once."""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Iterator

import numpy as np

# arrays of one window stay in the cache; a word of more characters than this counts as several
WINDOW_CHARS = 1 << 16
_CODE_POINTS, _ASSIGNED = 0x110000, 0x40000  # no letter is above the fourth plane
_CHARACTER, _WORD = 0x5851F42D4C957F2D, 0xD6E8FEB86659FD93  # odd multipliers of the two polynomials
_SPACES = "\n "  # between which a text of more than one window is cut


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


def word_hashes(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of all words, uint64, and bounds int64 (texts + 1,): text i has hashes[bounds[i]:bounds[i + 1]]."""
    if len(texts) == 1:
        hashes = np.concatenate([_window(piece)[0] for piece in cut(texts[0], WINDOW_CHARS, _SPACES)])
        return hashes, np.array([0, len(hashes)])
    hashes, starts = _window("\n".join(texts))
    sizes = np.array([len(text) + 1 for text in texts])
    return hashes, np.searchsorted(starts, np.concatenate([[0], np.cumsum(sizes)]))


def cut(text: str, max_chars: int, behind: str = "\n") -> Iterator[str]:
    """The text in pieces of at most max_chars, cut behind one of these characters, or anywhere
    where there is none.
    """
    start = 0
    while len(text) - start > max_chars:
        last = max(text.rfind(character, start, start + max_chars) for character in behind)
        end = last + 1 if last > start else start + max_chars
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
    """The text's characters as numbers: the lower case of a word's characters, 0 for all
    others; uint8 or uint32.
    """
    if text.isascii():
        return np.frombuffer(
            text.encode("ascii").translate(_characters()[:256].astype(np.uint8).tobytes()), np.uint8
        )
    return _characters()[np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), "<u4")]


def _runs(characters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(starts, ends) of the words."""
    edges = np.flatnonzero(np.diff(characters != 0, prepend=False, append=False))
    return edges[::2], edges[1::2]


def gram_hashes(words: np.ndarray, at: np.ndarray | slice, length: int) -> np.ndarray:
    """The hashes of the grams that start at some words: the sum of words[at + i] * multiplier**i."""
    hashes = words[at].copy()
    for i in range(1, length):
        hashes += words[i:][at] * np.uint64(pow(_WORD, i, 1 << 64))
    return hashes


def say_something(texts: list[str]) -> np.ndarray:
    """For every word of `word_hashes(texts)` whether it has two letters or more: the
    words that say something.
    """
    flags = []
    for piece in cut(texts[0], WINDOW_CHARS, _SPACES) if len(texts) == 1 else ["\n".join(texts)]:
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
