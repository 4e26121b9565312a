"""The bytes of a file, here or behind a URL, unpacked as its suffix says.

What the stock tools read is not damaged: several members or frames in a row, zeros behind a member of gzip, skippable
frames of zstd. bzip2 and zstd go through pyarrow, which finds what is truncated (decisions/data-pipeline.md).
"""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

import fsspec
import pyarrow

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}  # of this package, by protocol
CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}


class Unreadable(Exception):
    """A file that gives no text.

    reason: what the manifest counts. fix: what to do about the file, where that is known.
    """

    def __init__(self, reason: str, fix: str = "") -> None:
        super().__init__(reason)
        self.reason, self.fix = reason, fix


def split_codec(name: str) -> tuple[str, str | None]:
    """Split a name into that of the unpacked file, and the compression."""
    plain, suffix = os.path.splitext(name.split("?")[0] if "://" in name else name)
    codec = CODECS.get(suffix.lower())
    return (plain, codec) if codec else (plain + suffix, None)


@contextmanager
def open_input(name: str) -> Iterator[BinaryIO]:
    """Open a file to read its unpacked bytes.

    Raises:
        Unreadable: what is compressed is damaged or truncated, or needs more memory than is given to it.
    """
    codec = split_codec(name)[1]
    with fsspec.open(name, "rb").open() if "://" in name else open(name, "rb") as raw:
        if codec is None:
            yield cast(BinaryIO, raw)
            return
        # pyarrow takes the zeros behind a member, which tapes and block devices leave, for a member
        unpacker = (
            gzip.GzipFile(fileobj=raw)
            if codec == "gzip"
            else pyarrow.CompressedInputStream(raw, codec)
        )
        try:
            with io.BufferedReader(cast(Any, unpacker), 1 << 20) as unpacked:
                if not unpacked.peek(1) and not raw.tell():  # an empty file has no end either
                    raise Unreadable("damaged")
                yield unpacked
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise Unreadable("damaged") from error
        except OSError as error:
            if type(error) is not OSError or error.errno is not None:  # not of what unpacks
                raise
            if "too much memory" in str(error):
                fix = f"its window is over 128 MiB: zstd -d --long=31 {name}"
                raise Unreadable("long_window", fix) from error
            raise Unreadable("damaged") from error


def can_seek(name: str) -> bool:
    """Whether a file can be read from its middle on: it is not compressed, and on a disk or in a store."""
    return split_codec(name)[1] is None and ("://" not in name or name.split("://")[0] in EXTRAS)


@contextmanager
def explain_errors(url: str, done: str = "read") -> Iterator[None]:
    """What goes wrong behind a URL, as a ValueError with the URL; every store has errors of its own."""
    try:
        yield
    except FileExistsError:
        raise
    except ImportError as error:
        extra = EXTRAS.get(url.split("://")[0])
        fix = f": pip install 'laneformer[{extra}]'" if extra else ""
        raise ValueError(f"{url} needs a package that is missing ({error}){fix}") from error
    except Exception as error:
        raise ValueError(f"{url} cannot be {done}: {type(error).__name__}: {error}") from error
