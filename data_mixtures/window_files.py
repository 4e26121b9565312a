"""Windows of memory-mapped token files, whose bytes are checked before their first use."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import DTypeLike

from data_mixtures import shards
from data_mixtures.shards import Json

# a map holds a file descriptor: a process has 1,024, a 6T-token corpus 11,000 shards
OPEN_FILES = 256
CHUNK_BYTES = 1 << 20  # stays in a core's own cache between reading and hashing
CHECKS_AT_A_TIME = 64  # making a lock takes 20 us
DIGEST_BYTES = 8
TokenFile = tuple[str, Json]  # path, its entry of the manifest


class WindowFiles:
    """Many files of windows, safe for any number of threads; at most OPEN_FILES are mapped at a time."""

    def __init__(self, files: Sequence[TokenFile], seq_len: int) -> None:
        """Raise ValueError when an entry's hashes do not cover its bytes."""
        self.seq_len = seq_len
        self._paths = [path for path, _ in files]
        self._bytes = [entry["bytes"] for _, entry in files]
        self._dtypes = [shards.token_dtype(entry) for _, entry in files]
        self._digests = [bytes.fromhex("".join(entry["xxh3_blocks"])) for _, entry in files]
        blocks = [len(digests) // DIGEST_BYTES for digests in self._digests]
        for path, size, count in zip(self._paths, self._bytes, blocks, strict=True):
            if count != -(-size // shards.BLOCK_BYTES):
                raise ValueError(
                    f"the manifest of {path} has {count} block hashes for {size} bytes, one for each "
                    f"{shards.BLOCK_BYTES} is needed; prepare the data again"
                )
        # by file, a byte a block; 1: it is good
        self._checked = [bytearray(count) for count in blocks]
        self._checking = [threading.Lock() for _ in range(CHECKS_AT_A_TIME)]
        # one that is left out while a thread still reads it stays open for that thread
        self._map = functools.lru_cache(OPEN_FILES)(self._open_map)

    def read_windows(
        self, files: np.ndarray, windows: np.ndarray, dtype: DTypeLike = np.int64
    ) -> np.ndarray:
        """Read windows of files, by number (n,): (n, S + 1). ValueError for a damaged block."""
        rows = np.empty((len(files), self.seq_len + 1), dtype)
        for row, file, window in zip(rows, files.tolist(), windows.tolist(), strict=True):
            self._read_window(file, window, row)
        return rows

    def _read_window(self, file: int, window: int, out: np.ndarray) -> None:
        first = window * self.seq_len
        end = first + self.seq_len + 1
        checked = self._checked[file]
        width = self._dtypes[file].itemsize
        for block in range(
            first * width // shards.BLOCK_BYTES, (end * width - 1) // shards.BLOCK_BYTES + 1
        ):
            # the first reader of a block compares all of it with its xxh3 in the manifest; damage
            # ends the read
            if not checked[block]:
                self._check(file, block)
        out[:] = self._map(file)[first:end]

    def _open_map(self, file: int) -> np.ndarray:
        return np.memmap(self._paths[file], dtype=self._dtypes[file], mode="r")

    def _check(self, file: int, block: int) -> None:
        with self._checking[file % CHECKS_AT_A_TIME]:
            # another thread may have checked it while this one waited
            if not self._checked[file][block]:
                self._compare(file, block)
                self._checked[file][block] = 1

    def _compare(self, file: int, block: int) -> None:
        path = self._paths[file]
        begin = block * shards.BLOCK_BYTES
        end = min(begin + shards.BLOCK_BYTES, self._bytes[file])
        place = f"{path}: block {block} of {len(self._checked[file])} (bytes {begin} to {end})"
        # reads the file, not the map: other threads go on, and a broken disk gives an error where a
        # map would kill the process (SIGBUS). The block is then in the page cache, read ahead for
        # what follows
        try:
            digest = _digest(path, begin, end)
        except OSError as problem:
            raise ValueError(f"{place} cannot be read: {problem}. {_FIX}") from problem
        expected = self._digests[file][block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES]
        if digest != expected:
            raise ValueError(
                f"{place} is damaged: its xxh3 is {digest.hex()}, the manifest says {expected.hex()}. {_FIX}"
            )


_FIX = (
    "No token of it was used. Restore the file from a copy, or run `python -m data_mixtures verify RECIPE --out DIR`, "
    "which finds all damage and prints the commands that make these files again with the same bytes (packed "
    "conversations: pack them again). The job then resumes with the same lock"
)


def _digest(path: str, begin: int, end: int) -> bytes:
    """Return the xxh3 of bytes begin <= i < end of a file, fewer if the file ends early."""
    digest = xxhash.xxh3_64()
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        file.seek(begin)
        while begin < end and (count := file.readinto(buffer[: end - begin])):
            digest.update(buffer[:count])
            begin += count
    return digest.digest()
