"""Packs whole texts into training windows by best-fit-decreasing, with almost no padding.

A window of S + 1 tokens holds texts in its first S, and each of their tokens is an input once; the last
token is the first of the next window and is never trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np
import xxhash

from data_mixtures.mixture import BEGINS, TRAINED


class Text(Protocol):
    """ids: unsigned integers (n,). loss_mask: bool (n,), which of them count as labels."""

    @property
    def ids(self) -> np.ndarray: ...
    @property
    def loss_mask(self) -> np.ndarray: ...


class Piece(NamedTuple):
    """A document, or a part of one longer than a window."""

    ids: np.ndarray
    loss_mask: np.ndarray


class Packed(NamedTuple):
    """Packed windows.

    tokens, flags: (windows * size + 1,), as on disk. order: int64, the documents in the order in which
    they begin there. padding: tokens of no document.
    """

    tokens: np.ndarray
    flags: np.ndarray
    order: np.ndarray
    padding: int


def pack(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Return the indices of the items in each window; lengths are from 1 to size."""
    windows: list[list[int]] = []
    # windows by the room that they have left
    with_room: list[list[int]] = [[] for _ in range(size + 1)]
    # bit r is set while some window has room for r more tokens: the smallest that fits is one bit
    # scan
    rooms = 0
    # the longest first, each into the open window with the least room that is enough (Ding et al.,
    # Fewer Truncations Improve Language Modeling, 2024)
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[item]
        assert 0 < length <= size, f"item {item} has length {length}, a window {size}"
        enough = rooms >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1
            window = with_room[room].pop()
            if not with_room[room]:
                rooms &= ~(1 << room)
        else:
            room = size
            window = len(windows)
            windows.append([])
        windows[window].append(item)
        rest = room - length
        with_room[rest].append(window)
        rooms |= (rest > 0) << rest
    return windows


def shuffle_windows(
    windows: list[list[int]], text_ids: Sequence[int], seed: int
) -> list[list[int]]:
    """Return the windows in the order of epoch 0, by seed and the id of their first text."""
    return sorted(
        windows,
        key=lambda window: xxhash.xxh3_64_intdigest(f"{seed}/{text_ids[window[0]]}".encode()),
    )


def streams(
    windows: Sequence[Sequence[int]], texts: Sequence[Text], size: int, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and flags of consecutive windows, (windows * size + 1,) each, padded."""
    tokens, flags = np.zeros((2, len(windows) * size + 1), dtype)
    for number, window in enumerate(windows):
        at = number * size
        for ids, loss_mask in ((texts[item].ids, texts[item].loss_mask) for item in window):
            span = slice(at, at + len(ids))
            tokens[span] = ids
            flags[span] = loss_mask * TRAINED
            flags[at] |= BEGINS
            at = span.stop
        # here begins padding, or the next window
        flags[at] |= BEGINS
    flags[-1] |= BEGINS
    return tokens, flags


def best_fit(
    stream: np.ndarray, lengths: np.ndarray, document_ids: np.ndarray, size: int, seed: int
) -> Packed:
    """Pack consecutive documents of `stream` into windows.

    Args:
        document_ids: int (documents,), each its own: they decide the order of the windows.
    """
    # a longer document than a window is cut into whole windows and a rest, which share one token
    # with the piece before: so each of a document's tokens but its first is a label once
    later = np.arange(size) > 0
    ends = np.cumsum(lengths, dtype=np.int64)
    pieces = list[Piece]()
    owners = list[int]()
    first = list[bool]()
    for document, (begin, end) in enumerate(
        zip((ends - lengths).tolist(), ends.tolist(), strict=True)
    ):
        for at in range(begin, max(end - 1, begin + 1), size - 1):
            ids = stream[at : min(at + size, end)]
            pieces.append(Piece(ids, later[: len(ids)]))
            owners.append(document)
            first.append(at == begin)
    windows = pack([len(piece.ids) for piece in pieces], size)
    windows = shuffle_windows(windows, document_ids[owners].tolist() if owners else [], seed)
    order = [owners[item] for item in chain.from_iterable(windows) if first[item]]
    tokens, flags = (
        streams(windows, pieces, size, stream.dtype) if windows else (stream[:0], stream[:0])
    )
    padding = len(windows) * size - sum(len(piece.ids) for piece in pieces)
    return Packed(tokens, flags, np.array(order, np.int64), padding)
