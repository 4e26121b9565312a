"""Read and write a file with the keys and values of one prefix.

    pieces of the segments | header with the ids, JSON | its hash, 32 characters | its length, 8 bytes

A segment holds the keys or values of one KV head of a layer (csrc/kv_memory.h), in an order that does not
depend on the threads.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from . import _core
from .cache_files import hold

FORMAT_VERSION = 2  # raise it when the file's format changes
TAIL_BYTES = 32 + 8
PIECE_BYTES = 4 << 20  # hashed by one thread, written without a pause
BLOCK = 16  # positions whose keys lie together


class Damaged(ValueError):
    """The file is truncated, changed, or of another model."""


@dataclass(frozen=True)
class Layout:
    position_bytes: int
    page: int  # positions that are kept or dropped together
    # of each segment: its layer has a window
    windowed: Sequence[bool]

    def pieces(self, positions: int, dropped: np.ndarray) -> list[tuple[int, int, int]]:
        """Return (segment, first byte, end) of each piece, in the order of the file."""
        # layers with windows have only the pages that a likely start needs
        windowed_runs = list(runs_of_zeros(dropped, self.page, positions))
        pieces = []
        for segment, windowed in enumerate(self.windowed):
            for run in windowed_runs if windowed else [(0, positions)]:
                first, end = (position * self.position_bytes for position in run)
                for begin in range(first, end, PIECE_BYTES):
                    pieces.append((segment, begin, min(begin + PIECE_BYTES, end)))
        return pieces


@dataclass(frozen=True)
class Prefix:
    """The ids of a file, and where sequences can start."""

    # int32 (n,)
    ids: np.ndarray
    # positions where a sequence is likely to start
    starts: list[int]
    # uint8 (pages,), 1 where layers with windows have lost a page
    dropped: np.ndarray

    def count_shared(self, ids: np.ndarray) -> int:
        length = min(len(self.ids), len(ids))
        different = np.flatnonzero(self.ids[:length] != ids[:length])
        return int(different[0]) if len(different) else length


def write(
    path: Path,
    key: str,
    prefix: Prefix,
    layout: Layout,
    segment: Callable[[int], np.ndarray],
    between: Callable[[float], None],
) -> None:
    """Write and lock a file; segment returns uint8 bytes, between takes the seconds of each piece."""
    # prompts are private: only the owner may read the file
    with open(path, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        hold(file, alone=True)
        digests = []
        for index, first, end in layout.pieces(len(prefix.ids), prefix.dropped):
            began_s, piece = time.monotonic(), segment(index)[first:end]
            digests.append(_core.content_hash(piece))
            file.write(piece.data)
            between(time.monotonic() - began_s)
        # the header comes last: a truncated file has none
        header = {
            "key": key,
            "ids": prefix.ids.tolist(),
            "starts": prefix.starts,
            "dropped": prefix.dropped.tolist(),
            "pieces": digests,
        }
        text = json.dumps(header).encode()
        file.write(text + hash_of(text) + len(text).to_bytes(8, "little"))


def file_bytes(prefix: Prefix, layout: Layout) -> int:
    """Return the bytes of a prefix's file without the header."""
    return sum(end - first for _, first, end in layout.pieces(len(prefix.ids), prefix.dropped))


class SavedFile:
    """A file with an intact header; raises Damaged where it is not, or has another key."""

    def __init__(self, path: Path, key: str, layout: Layout):
        self.path, self.layout = path, layout
        with open(path, "rb") as file:
            self.bytes = os.fstat(file.fileno()).st_size
            header = read_header(file, self.bytes)
        if header["key"] != key:
            raise Damaged("it is of another model, or of another build of the engine")
        ids, dropped = np.array(header["ids"], np.int32), np.array(header["dropped"], np.uint8)
        self.prefix = Prefix(ids, header["starts"], dropped)
        self.pieces = list(zip(layout.pieces(len(ids), dropped), header["pieces"], strict=True))

    def fill(self, positions: int, segment: Callable[[int], np.ndarray]) -> None:
        """Read keys and values of the first positions into segments; Damaged where a hash differs."""
        offset = 0
        needed = -(-positions // BLOCK) * BLOCK * self.layout.position_bytes
        with open(self.path, "rb") as file:
            for (index, first, end), digest in self.pieces:
                if first < needed:
                    # hashed in the cache's own memory: nothing can change between check and use
                    piece = segment(index)[first:end]
                    file.seek(offset)
                    if (
                        file.readinto(piece.data) != len(piece)
                        or _core.content_hash(piece) != digest
                    ):
                        raise Damaged("its keys or values are not those that were written")
                offset += end - first


def read_header(file: IO[bytes], size: int) -> dict[str, Any]:
    file.seek(max(0, size - TAIL_BYTES))
    tail = file.read(TAIL_BYTES)
    begin = size - TAIL_BYTES - int.from_bytes(tail[32:], "little")
    if begin >= 0:
        file.seek(begin)
        text = file.read(size - TAIL_BYTES - begin)
        if text and hash_of(text) == tail[:32]:
            return json.loads(text)
    raise Damaged("it is cut, or its header was changed")


def runs_of_zeros(dropped: np.ndarray, page: int, positions: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of positions whose pages are not dropped, as (first, end)."""
    edges = np.flatnonzero(np.diff(np.concatenate([[1], dropped, [1]]) == 0))
    for first, end in edges.reshape(-1, 2).tolist():
        yield first * page, min(end * page, positions)


def hash_of(text: bytes) -> bytes:
    return _core.content_hash(np.frombuffer(text, np.uint8)).encode()
