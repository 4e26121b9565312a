"""Text as hashes of words: all words of a window at once.

A word is hashed as the UTF-8 of its lower case, eight bytes at a time; a gram is a polynomial mod 2**64
over the hashes of its words. So the work is a pass over the bytes that finds where words begin, and a few
operations a word.
"""

from __future__ import annotations

import codecs
import functools
import unicodedata
from collections.abc import Iterator
from typing import Any

import numpy as np

# enough that what a window costs besides its characters is little; a word of more characters counts as several
WINDOW_CHARS = 1 << 19
_CODE_POINTS, _ASSIGNED = 0x110000, 0x40000  # no letter is above the fourth plane
_BYTES, _WORD = 0x5851F42D4C957F2D, 0xD6E8FEB86659FD93  # odd multipliers of the two polynomials
_EIGHT = 8
_LONGEST = 256  # bytes of a word that are hashed, besides its last eight and its length
# what is kept of eight bytes, of which the first n belong to a word
_FIRST = np.array([(1 << 8 * n) - 1 for n in range(_EIGHT + 1)], np.uint64)
_MOSTLY_ASCII = 0.9  # of a text's characters
_OTHERS = "laneformer_fold_others"
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
    """Hashes of words, uint64, and bounds (texts + 1,): text i has hashes[bounds[i]:bounds[i + 1]]."""
    if len(texts) == 1:
        pieces = cut(texts[0], WINDOW_CHARS, _SPACES)
        hashes = np.concatenate([_hashes(*_words(_folded(piece))) for piece in pieces])
        return hashes, np.array([0, len(hashes)])
    parts = list(map(_folded, texts))
    words, starts, ends = _words(b"\0".join(parts))
    behind = np.cumsum([0, *(len(part) + 1 for part in parts)])
    return _hashes(words, starts, ends), np.searchsorted(starts, behind)


def cut(text: str, max_chars: int, behind: str = "\n") -> Iterator[str]:
    """The text in pieces of at most max_chars, cut behind one of these characters where there is one."""
    start = 0
    while len(text) - start > max_chars:
        last = max(text.rfind(character, start, start + max_chars) for character in behind)
        end = last + 1 if last > start else start + max_chars
        yield text[start:end]
        start = end
    yield text[start:]


def _folded(text: str) -> bytes:
    """The UTF-8 of the lower case of a word's characters, zeros for every other one."""
    if text.isascii():
        return text.encode("ascii").translate(_ascii())
    if len(text.encode("ascii", "ignore")) > _MOSTLY_ASCII * len(text):
        return text.encode("ascii", _OTHERS).translate(_ascii())
    return _folded_run(text)


def _folded_run(text: str) -> bytes:
    return _lower(text).tobytes().decode("utf-32-le", "surrogatepass").encode("utf-8", "surrogatepass")


_known_run = functools.lru_cache(1 << 14)(_folded_run)  # of quotes, dashes, names


def _folded_others(error: Any) -> tuple[bytes, int]:
    """What stands in place of a run of characters that are not ASCII; error: UnicodeEncodeError."""
    return _known_run(error.object[error.start : error.end]), error.end


codecs.register_error(_OTHERS, _folded_others)


def _lower(text: str) -> np.ndarray:
    """uint32: the lower case of a word's characters, 0 for all others."""
    return _characters()[np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), "<u4")]


def _words(data: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(bytes, starts, ends) of the words."""
    values = np.frombuffer(data, np.uint8)
    return values, *_runs(values)


def _hashes(data: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """uint64, of the words data[starts[i] : ends[i]] of bytes, none of which is 0."""
    padded = np.concatenate([data, np.zeros(_EIGHT, np.uint8)])
    eight = np.ndarray(len(data) + 1, "<u8", padded, strides=(1,))  # from each byte on
    left = ends - starts
    hashes = eight[starts] & _FIRST.take(left, mode="clip")
    at = np.flatnonzero(left > _EIGHT)
    for done in range(_EIGHT, _LONGEST, _EIGHT):
        if not len(at):
            break
        more = eight[starts[at] + done] & _FIRST.take(left[at] - done, mode="clip")
        hashes[at] = hashes[at] * np.uint64(_BYTES) + more
        at = at[left[at] > done + _EIGHT]
    hashes[at] = hashes[at] * np.uint64(_BYTES) + (eight[ends[at] - _EIGHT] ^ left[at].astype(np.uint64))
    return _mixed(hashes)


def _runs(characters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(starts, ends) of the words."""
    inside = np.zeros(len(characters) + 2, bool)
    np.not_equal(characters, 0, out=inside[1:-1])
    edges = np.flatnonzero(inside[1:] != inside[:-1])
    return edges[::2], edges[1::2]


def gram_hashes(words: np.ndarray, at: np.ndarray, length: int) -> np.ndarray:
    """The hashes of the grams that start at some words: the sum of words[at + i] * multiplier**i."""
    hashes = words[at].copy()
    for i in range(1, length):
        hashes = longer(hashes, words, at, i)
    return hashes


def longer(hashes: np.ndarray, words: np.ndarray, at: np.ndarray, length: int) -> np.ndarray:
    """Hashes of grams of `length` words -> those of one word more."""
    return hashes + words[at + length] * np.uint64(pow(_WORD, length, 1 << 64))


def all_gram_hashes(words: np.ndarray, length: int) -> np.ndarray:
    """`gram_hashes` from every word on; length: a power of two."""
    span = 1
    while span < length:
        words, span = words[:-span] + words[span:] * np.uint64(pow(_WORD, span, 1 << 64)), 2 * span
    return words


def say_something(texts: list[str]) -> np.ndarray:
    """For every word of `word_hashes(texts)` whether it has two letters or more, and so says something."""
    flags = []
    for piece in cut(texts[0], WINDOW_CHARS, _SPACES) if len(texts) == 1 else ["\n".join(texts)]:
        starts, ends = _runs(_lower(piece))
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
def _ascii() -> bytes:
    """For `bytes.translate`; bytes of other characters stay as they are."""
    return _characters()[:128].astype(np.uint8).tobytes() + bytes(range(128, 256))


def _mixed(values: np.ndarray) -> np.ndarray:
    """A bijection of 64 bits, each of which reaches every bit of the result (splitmix64's)."""
    values = values ^ (values >> np.uint64(30))
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values
