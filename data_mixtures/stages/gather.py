"""Documents copied from where they lie in many files into one order, in constant memory."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow

from data_mixtures.stages import blocks
from data_mixtures.stages.blocks import CheckedFile

READ_BYTES = 1 << 28  # put in order at a time: the more, the longer are the slices that are read of each file
COPY_BYTES = 1 << 20  # returned at a time: few enough to be hashed while they are in the cache


def gather(
    files: Sequence[CheckedFile], units: np.ndarray, starts: np.ndarray, lengths: np.ndarray, dtype: np.dtype
) -> Iterator[np.ndarray]:
    """Documents one after the other, in pieces of dtype.

    Document i is lengths[i] items of files[units[i]] from starts[i] on; those of one file must lie in ascending order.
    """
    begins = starts.astype(np.int64) * dtype.itemsize
    ends = begins + lengths.astype(np.int64) * dtype.itemsize
    for piece in _pieces(_bytes_read(units, begins, ends), READ_BYTES):
        for copied in _in_order(files, units[piece], begins[piece], ends[piece]):
            yield copied.view(dtype)


def _bytes_read(units: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """How much more is read for each document: the blocks that do not hold an earlier one of the same file."""
    order = np.argsort(units, kind="stable")
    unit, first, last = units[order], *_blocks(begins[order], ends[order])
    first[1:] = np.where(unit[1:] == unit[:-1], np.maximum(first[1:], last[:-1]), first[1:])
    read = np.empty(len(order), dtype=np.int64)
    read[order] = (last - first) * blocks.BLOCK_BYTES
    return read


def _blocks(begins: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return begins // blocks.BLOCK_BYTES, -(-ends // blocks.BLOCK_BYTES)


def _pieces(sizes: np.ndarray, limit: int) -> Iterator[slice]:
    """Slices of consecutive documents of at most that size together, at least one document each."""
    ends, begin, before = np.cumsum(sizes), 0, 0
    while begin < len(sizes):
        end = max(int(np.searchsorted(ends, before + limit, side="right")), begin + 1)
        yield slice(begin, end)
        begin, before = end, int(ends[end - 1])


def _in_order(
    files: Sequence[CheckedFile], units: np.ndarray, begins: np.ndarray, ends: np.ndarray
) -> Iterator[np.ndarray]:
    """The bytes of documents that fit into the buffer together."""
    order = np.argsort(units, kind="stable")
    unit, begin, end = units[order], begins[order], ends[order]
    first, last = _blocks(begin, end)
    # documents whose blocks follow each other are read together
    new = np.append(True, (unit[1:] != unit[:-1]) | (first[1:] > last[:-1]))
    reads = np.flatnonzero(new)
    firsts, lasts = first[reads], last[np.append(reads[1:], len(new)) - 1]
    places = blocks.BLOCK_BYTES * np.append(0, np.cumsum(lasts - firsts))
    buffer = _buffer(max(READ_BYTES + (len(files) + 1) * blocks.BLOCK_BYTES, int(places[-1])))
    for number, *read, at, until in zip(unit[reads], firsts, lasts, places[:-1], places[1:], strict=True):
        files[number].read_blocks(int(read[0]), int(read[1]), buffer[at:until].data)
    shift = (places[:-1] - blocks.BLOCK_BYTES * firsts)[np.cumsum(new) - 1]
    # document k is value 2 k, what lies behind it 2 k + 1
    offsets = np.stack([begin + shift, end + shift], axis=1).ravel()
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    yield from taken(offsets, buffer, 2 * rank)


def taken(offsets: np.ndarray, data: np.ndarray, chosen: np.ndarray) -> Iterator[np.ndarray]:
    """Values of a buffer one after the other, in pieces; value k is data[offsets[k] : offsets[k + 1]]."""
    # Arrow copies values of any length at the speed of memory
    buffers = [None, pyarrow.py_buffer(offsets), pyarrow.py_buffer(data)]
    values = pyarrow.LargeBinaryArray.from_buffers(pyarrow.large_binary(), len(offsets) - 1, buffers)
    sizes = np.diff(offsets)[chosen]
    for piece in _pieces(sizes, COPY_BYTES):
        if size := int(sizes[piece].sum()):
            yield np.frombuffer(values.take(pyarrow.array(chosen[piece])).buffers()[2], np.uint8, size)


@functools.lru_cache(maxsize=1)
def _buffer(size: int) -> np.ndarray:
    # kept for the next shard: the first touch of new memory costs more than all that is done with it
    return np.empty(size, dtype=np.uint8)
