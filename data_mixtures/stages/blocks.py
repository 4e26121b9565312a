"""Files that later stages read in slices; every block is compared with its hash when it is read.

`seal` writes the hashes of a finished file beside it, as uint64 in FILE.xxh3.
"""

from __future__ import annotations

import functools
import io
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow
import xxhash

from data_mixtures import store
from data_mixtures.stages import stage
from data_mixtures.stages.stage import Unit

# held-out documents lie apart, and each reads one; smaller ones take longer to hash
BLOCK_BYTES = 1 << 14
HASHES = ".xxh3"
_SEALED_BYTES = 1 << 24  # read at a time
_HEADER_BYTES = 256  # of a .npy file
# put in order at a time: the more, the longer are the slices that are read of each file
READ_BYTES = 1 << 28
COPY_BYTES = 1 << 20  # returned at a time: few enough to be hashed while they are in the cache


def seal(path: Path) -> None:
    """Write the hashes of a file's blocks beside it."""
    # not in receipts, which every worker parses: the hashes of a whole source are too large
    with path.open("rb") as file, path.with_name(path.name + HASHES).open("wb") as hashes:
        while data := file.read(_SEALED_BYTES // BLOCK_BYTES * BLOCK_BYTES):
            hashes.write(_hashes(memoryview(data)).tobytes())


def _hashes(data: memoryview) -> np.ndarray:
    digest = xxhash.xxh3_64_intdigest
    return np.array(
        [digest(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES)], "<u8"
    )


@dataclass(frozen=True)
class CheckedFile:
    """An open sealed file of a finished unit, with its hashes."""

    place: tuple[Path, str, Unit]  # folder of the data, stage, unit
    name: str
    data: BinaryIO
    hashes: BinaryIO

    def __str__(self) -> str:
        return f"{stage.unit_folder(*self.place) / self.name}"

    def read(self, begin: int, end: int) -> memoryview:
        first = begin // BLOCK_BYTES
        last = -(-end // BLOCK_BYTES)
        data = memoryview(bytearray((last - first) * BLOCK_BYTES))
        self.read_blocks(first, last, data)
        return data[begin - first * BLOCK_BYTES : end - first * BLOCK_BYTES]

    def read_rows(self, column: str, low: int, high: int) -> np.ndarray:
        """Return the rows with low <= column < high of a .npy file that is sorted by that column."""
        header = io.BytesIO(self.read(0, _HEADER_BYTES))
        np.lib.format.read_magic(header)
        (count,), _, dtype = np.lib.format.read_array_header_1_0(header)

        def rows(first: int, last: int) -> np.ndarray:
            begin, end = (header.tell() + row * dtype.itemsize for row in (first, last))
            return np.frombuffer(self.read(begin, end), dtype)

        def key(row: int) -> int:
            return int(rows(row, row + 1)[column][0])

        return rows(*(bisect_left(range(count), bound, key=key) for bound in (low, high)))

    def read_blocks(self, first: int, last: int, into: memoryview) -> None:
        """Read blocks first <= i < last into a buffer with room for whole blocks.

        Raises:
            ValueError: the bytes differ from what was written; the unit then counts as not done.
        """
        size = read_at(self.data, first * BLOCK_BYTES, into)
        expected = np.zeros(last - first, "<u8")
        read_at(self.hashes, 8 * first, expected.view(np.uint8).data)
        # the last block of the file may be shorter
        hashes = _hashes(into[:size])
        if len(hashes) != last - first or (hashes != expected).any():
            stage.forget(*self.place)
            raise ValueError(
                f"{self} is not what {self.place[1]!r} wrote: bytes {first * BLOCK_BYTES} to {last * BLOCK_BYTES} do "
                "not have their hashes. Was it changed, or does a disk or memory fail? Start again from "
                f"{self.place[1]!r} on: the unit is then made again, with the same bytes"
            )


def read_at(file: Any, place: int, into: memoryview) -> int:
    """Fill a buffer from `place` on; return how many bytes were there."""
    size = 0
    file.seek(place)
    while size < len(into) and (count := file.readinto(into[size:])):
        size += count
    return size


@contextmanager
def open_files(
    out: Path, made_by: str, units: Iterable[Unit], name: str
) -> Iterator[list[CheckedFile]]:
    """Open file `name` of each unit; ValueError if one is missing or freed."""
    with ExitStack() as stack:
        files = []
        for unit in units:
            folder = stage.unit_folder(out, made_by, unit)
            paths = folder / name, folder / (name + HASHES)
            try:
                data, hashes = (stack.enter_context(store.open_part(out, path)) for path in paths)
            except FileNotFoundError:
                # raises the error that says so if it was not made yet, or was freed
                stage.result(out, made_by, unit)
                raise
            files.append(CheckedFile((out, made_by, unit), name, data, hashes))
        yield files


def gather(
    files: Sequence[CheckedFile],
    units: np.ndarray,
    starts: np.ndarray,
    lengths: np.ndarray,
    dtype: np.dtype,
) -> Iterator[np.ndarray]:
    """Yield documents one after another in pieces, in constant memory.

    Document i is lengths[i] items of files[units[i]] from starts[i] on; within a file, starts must
    ascend.
    """
    begins = starts.astype(np.int64) * dtype.itemsize
    ends = begins + lengths.astype(np.int64) * dtype.itemsize
    for piece in _pieces(_bytes_read(units, begins, ends), READ_BYTES):
        for copied in _in_order(files, units[piece], begins[piece], ends[piece]):
            yield copied.view(dtype)


def _bytes_read(units: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    # estimates the memory of a piece: a block that an earlier document of the same file has read
    # is not read again
    order = np.argsort(units, kind="stable")
    unit, first, last = units[order], *_blocks(begins[order], ends[order])
    same_file = unit[1:] == unit[:-1]
    first[1:] = np.where(same_file, np.maximum(first[1:], last[:-1]), first[1:])
    read_bytes = np.empty(len(order), dtype=np.int64)
    read_bytes[order] = (last - first) * BLOCK_BYTES
    return read_bytes


def _blocks(begins: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return begins // BLOCK_BYTES, -(-ends // BLOCK_BYTES)


def _pieces(sizes: np.ndarray, limit: int) -> Iterator[slice]:
    """Yield slices of consecutive documents, at most `limit` bytes or one document each."""
    ends = np.cumsum(sizes)
    begin = 0
    before = 0
    while begin < len(sizes):
        end = max(int(np.searchsorted(ends, before + limit, side="right")), begin + 1)
        yield slice(begin, end)
        begin = end
        before = int(ends[end - 1])


def _in_order(
    files: Sequence[CheckedFile], units: np.ndarray, begins: np.ndarray, ends: np.ndarray
) -> Iterator[np.ndarray]:
    """Yield bytes begins[i] <= place < ends[i] of files[units[i]] for each document i, in pieces."""
    order = np.argsort(units, kind="stable")
    unit = units[order]
    begin = begins[order]
    end = ends[order]
    first, last = _blocks(begin, end)
    # An example with blocks of 4 bytes: documents 0, 1 and 2 are bytes 13 to 17 of file 1, 2 to 5 of
    # file 0, and 6 to 7 of file 0. By file they are 1, 2, 0, in blocks [0, 2), [1, 2) and [3, 5). The
    # first two meet, so there are two reads: blocks [0, 2) of file 0 come to bytes 0 to 8 of the
    # buffer, blocks [3, 5) of file 1 to 8 to 16, which is 4 bytes before their place in the file.
    # The offsets are 2, 5, 6, 7, 9, 13, and documents 0, 1, 2 are the values 4, 0, 2 between them.
    #
    # documents whose blocks follow each other are read together
    other_file = unit[1:] != unit[:-1]
    new = np.append(True, other_file | (first[1:] > last[:-1]))
    reads = np.flatnonzero(new)
    firsts = first[reads]
    lasts = last[np.append(reads[1:], len(new)) - 1]
    buffer_begins = BLOCK_BYTES * np.append(0, np.cumsum(lasts - firsts))
    # the same size for every piece, so that one buffer serves all; a long document may need more
    usual = READ_BYTES + (len(files) + 1) * BLOCK_BYTES
    buffer = _buffer(max(usual, int(buffer_begins[-1])))
    for number, begin_block, end_block, at, until in zip(
        unit[reads], firsts, lasts, buffer_begins[:-1], buffer_begins[1:], strict=True
    ):
        files[number].read_blocks(int(begin_block), int(end_block), buffer[at:until].data)
    # bytes by which a document lies further on in the buffer than in its file
    shift = (buffer_begins[:-1] - BLOCK_BYTES * firsts)[np.cumsum(new) - 1]
    # in the order of reading, document k is value 2 k, and what lies behind it is value 2 k + 1
    offsets = np.stack([begin + shift, end + shift], axis=1).ravel()
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    yield from take_values(offsets, buffer, 2 * rank)


def take_values(offsets: np.ndarray, data: np.ndarray, chosen: np.ndarray) -> Iterator[np.ndarray]:
    """Yield chosen values of a buffer in pieces; value k is data[offsets[k] : offsets[k + 1]]."""
    # Arrow copies values of any length at the speed of memory
    buffers = [None, pyarrow.py_buffer(offsets), pyarrow.py_buffer(data)]
    values = pyarrow.LargeBinaryArray.from_buffers(
        pyarrow.large_binary(), len(offsets) - 1, buffers
    )
    sizes = np.diff(offsets)[chosen]
    for piece in _pieces(sizes, COPY_BYTES):
        if size := int(sizes[piece].sum()):
            yield np.frombuffer(
                values.take(pyarrow.array(chosen[piece])).buffers()[2], np.uint8, size
            )


@functools.lru_cache(maxsize=1)
def _buffer(size: int) -> np.ndarray:
    # kept for the next shard: the first touch of new memory costs more than all work on it
    return np.empty(size, dtype=np.uint8)
