"""Read a file, local or behind a URL, decompressed according to its suffix.

As with the stock tools, several members, streams or frames in a row, zeros after one, and skippable
frames of zstd are no damage.
"""

from __future__ import annotations

import bz2
import gzip
import io
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

import fsspec
import pyarrow

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}  # of this package, by protocol
_PACKED_BYTES = 1 << 16  # read at a time
CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}


class Unreadable(Exception):
    """A file that gives no text.

    reason: for the manifest. fix: what to do about the file.
    """

    def __init__(self, reason: str, fix: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.fix = fix


def split_codec(name: str) -> tuple[str, str | None]:
    """Split a name into that of the unpacked file, and the compression."""
    plain, suffix = os.path.splitext(name.split("?")[0] if "://" in name else name)
    codec = CODECS.get(suffix.lower())
    return (plain, codec) if codec else (plain + suffix, None)


class _Bzip2(io.RawIOBase):
    # pyarrow fails at an empty stream behind another, and at zeros, which tapes and block devices
    # leave behind the last; Python's own bz2 file takes a stream whose head is damaged for the end,
    # without a word
    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._stream = bz2.BZ2Decompressor()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            packed = b""
            if self._stream.eof:
                packed = self._stream.unused_data.lstrip(b"\0")
                while not packed:
                    if not (part := self._raw.read(_PACKED_BYTES)):
                        return 0
                    packed = part.lstrip(b"\0")
                self._stream = bz2.BZ2Decompressor()
            elif self._stream.needs_input and not (packed := self._raw.read(_PACKED_BYTES)):
                raise EOFError("ends inside of a stream")
            if data := self._stream.decompress(packed, len(buffer)):
                buffer[: len(data)] = data
                return len(data)


_UNPACKERS: dict[str, Callable[[Any], Any]] = {
    "gzip": lambda raw: gzip.GzipFile(fileobj=raw),
    "bz2": _Bzip2,
    # pyarrow finds truncated zstd (docs/decisions/data-pipeline.md)
    "zstd": lambda raw: pyarrow.CompressedInputStream(raw, "zstd"),
}


@contextmanager
def open_input(name: str) -> Iterator[BinaryIO]:
    """Open a file to read its unpacked bytes.

    Raises:
        Unreadable: compressed data are damaged, truncated, or need too much memory.
    """
    codec = split_codec(name)[1]
    with fsspec.open(name, "rb").open() if "://" in name else open(name, "rb") as raw:
        if codec is None:
            yield cast(BinaryIO, raw)
            return
        try:
            with io.BufferedReader(cast(Any, _UNPACKERS[codec](raw)), 1 << 20) as unpacked:
                # an empty file has no end either
                if not unpacked.peek(1) and not raw.tell():
                    raise Unreadable("damaged")
                yield unpacked
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise Unreadable("damaged") from error
        except OSError as error:
            # an error of the disk or network, not of the decompressor
            if type(error) is not OSError or error.errno is not None:
                raise
            if "too much memory" in str(error):
                fix = f"its window is over 128 MiB: zstd -d --long=31 {name}"
                raise Unreadable("long_window", fix) from error
            raise Unreadable("damaged") from error


def can_seek(name: str) -> bool:
    """Return whether a file can be read from its middle."""
    is_plain = split_codec(name)[1] is None
    # a web server may not take ranges; stores do
    return is_plain and ("://" not in name or name.split("://")[0] in EXTRAS)


@contextmanager
def explain_errors(url: str, operation: str = "read") -> Iterator[None]:
    """Turn errors behind a URL into a ValueError with the URL."""
    try:
        yield
    except FileExistsError:
        raise
    except ImportError as error:
        extra = EXTRAS.get(url.split("://")[0])
        fix = f": pip install 'laneformer[{extra}]'" if extra else ""
        raise ValueError(f"{url} needs a package that is missing ({error}){fix}") from error
    # every store raises errors of its own
    except Exception as error:
        raise ValueError(f"{url} cannot be {operation}: {type(error).__name__}: {error}") from error
