"""Files that later stages read in slices: every block is compared with its hash when it is read.

`seal` writes the hashes of a finished file beside it, as uint64 in FILE.xxh3. They are read in slices as well: the
hashes of a whole source would be too large for receipts, which every worker parses.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from data_mixtures.stages import stage
from data_mixtures.stages.stage import Unit

BLOCK_BYTES = 1 << 14  # held-out documents lie apart, and each reads a block; smaller ones cost more time to hash
HASHES = ".xxh3"
_READ_BYTES = 1 << 24


def seal(path: Path) -> None:
    """Write the hashes of a file's blocks beside it."""
    with path.open("rb") as file, path.with_name(path.name + HASHES).open("wb") as hashes:
        while data := file.read(_READ_BYTES // BLOCK_BYTES * BLOCK_BYTES):
            hashes.write(_hashes(memoryview(data)).tobytes())


def _hashes(data: memoryview) -> np.ndarray:
    digest = xxhash.xxh3_64_intdigest
    return np.array([digest(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES)], "<u8")


@dataclass(frozen=True)
class CheckedFile:
    """A sealed file of a finished unit, open, as is that of its hashes."""

    place: tuple[Path, str, Unit]  # folder of the data, stage, unit
    name: str
    descriptors: tuple[int, int]

    def __str__(self) -> str:
        return f"{stage.unit_folder(*self.place) / self.name}"

    def read(self, begin: int, end: int) -> memoryview:
        """Bytes begin <= i < end."""
        first, last = begin // BLOCK_BYTES, -(-end // BLOCK_BYTES)
        data = memoryview(bytearray((last - first) * BLOCK_BYTES))
        self.read_blocks(first, last, data)
        return data[begin - first * BLOCK_BYTES : end - first * BLOCK_BYTES]

    def read_blocks(self, first: int, last: int, into: memoryview) -> None:
        """Blocks first <= i < last, into a buffer with room for whole blocks; that of the file's end may be shorter.

        ValueError when they are not what was written: then the unit counts as not done, and is made again.
        """
        size = 0
        while size < len(into) and (count := os.preadv(self.descriptors[0], [into[size:]], first * BLOCK_BYTES + size)):
            size += count
        expected = np.frombuffer(os.pread(self.descriptors[1], 8 * (last - first), 8 * first), "<u8")
        found = _hashes(into[:size])
        if not len(found) == len(expected) == last - first or (found != expected).any():
            stage.forget(*self.place)
            raise ValueError(
                f"{self} is not what {self.place[1]!r} wrote: bytes {first * BLOCK_BYTES} to {last * BLOCK_BYTES} do "
                "not have their hashes. Was it changed, or does a disk or memory fail? Start again from "
                f"{self.place[1]!r} on: the unit is then made again, with the same bytes"
            )


@contextmanager
def opened(out: Path, made_by: str, units: Iterable[Unit], name: str) -> Iterator[list[CheckedFile]]:
    """That file of each unit. ValueError when one is not there, or was freed."""
    with ExitStack() as stack:
        files = []
        for unit in units:
            folder = stage.unit_folder(out, made_by, unit)
            try:
                data, hashes = (stack.enter_context((folder / each).open("rb")) for each in (name, name + HASHES))
            except FileNotFoundError:
                stage.result(out, made_by, unit)  # says so if it was not made yet, or was freed
                raise
            files.append(CheckedFile((out, made_by, unit), name, (data.fileno(), hashes.fileno())))
        yield files
