"""The 128-bit id of a document: xxh3_128 of its text as UTF-8, 16 bytes, big-endian.

Its low half alone decides whether the document is held out, and where the shuffle puts it.
"""

from __future__ import annotations

from typing import Any

import xxhash


def low_half(identity: bytes) -> int:
    return int.from_bytes(identity[8:], "big")


def shuffle_key(identity: bytes, seed: int) -> int:
    """Return what a source is shuffled by, uniform in 64 bits: xxh3_64 of the low half, little-endian."""
    # bytes 15 down to 8
    return xxhash.xxh3_64_intdigest(identity[:7:-1], seed=seed)


def is_held_out(low: Any, valid_per_10000: int) -> Any:
    """Tell whether documents are held out. low: low halves, an int or uint64 of any shape."""
    return low < valid_per_10000 * 2**64 // 10_000
