"""Best-fit-decreasing packing: whole conversations into windows, so that almost no token of
a window is padding.

The longest first, each into the open window with the least room that is enough. Nothing is cut and nothing
shared: a window of S + 1 tokens holds conversations in its first S, and each of their tokens is an input
once; the token behind them is the first of the next window, which is never trained.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from data_mixtures.mixture import BEGINS, TRAINED

from .conversations import Conversation


def pack(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Indices of the items in each window of `size`; every length is from 1 to size."""
    windows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(size + 1)]  # windows by the room that they have left
    rooms = 0  # bit r: some window has room r
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
            room, window = size, len(windows)
            windows.append([])
        windows[window].append(item)
        left = room - length
        with_room[left].append(window)
        rooms |= (left > 0) << left
    return windows


def shuffled(windows: list[list[int]], keys: Sequence[int], seed: int) -> list[list[int]]:
    """The windows in an order that their first conversations and the seed decide: epoch 0 reads
    them as they lie.
    """
    return sorted(windows, key=lambda window: xxhash.xxh3_64_intdigest(f"{seed}/{keys[window[0]]}".encode()))


def streams(
    windows: Sequence[Sequence[int]], conversations: Sequence[Conversation], size: int, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and flags of windows in a row, (windows * size + 1,) each; the rest of a window is padding."""
    tokens, flags = np.zeros((2, len(windows) * size + 1), dtype)
    for number, window in enumerate(windows):
        at = number * size
        for ids, trained in ((conversations[item].ids, conversations[item].trained) for item in window):
            here = slice(at, at + len(ids))
            tokens[here], flags[here] = ids, trained * TRAINED
            flags[at] |= BEGINS
            at = here.stop
        flags[at] |= BEGINS  # of padding, or of the next window
    flags[-1] |= BEGINS
    return tokens, flags
