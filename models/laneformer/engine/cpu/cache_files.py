"""Share cache files between processes: lock those in use, remove the oldest others."""

from __future__ import annotations

import contextlib
import fcntl
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, NamedTuple

log = logging.getLogger(__name__)


class CacheFile(NamedTuple):
    """A file that sorts by its last use."""

    # seconds or nanoseconds since the epoch: the first field, which decides the order
    used: float
    path: Path
    bytes: int
    # of packed weights: the model's folder or GGUF file
    source: Path = Path()


def hold(file: IO[bytes], alone: bool = False) -> None:
    """Protect the file from removal while it or a mapping of it is open; alone: OSError where it is held."""
    # the kernel drops the lock of a process that dies
    if alone:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)


def remove(path: Path) -> bool:
    """Remove the file; return False where a process holds it."""
    try:
        with open(path, "rb") as file:
            hold(file, alone=True)
            path.unlink()
    except FileNotFoundError:
        return True
    except OSError as error:
        log.info("%s stays: %s", path, error)
        return False
    log.info("%s is removed", path)
    return True


def remove_oldest(
    files: Iterable[CacheFile], limit_bytes: int, remove: Callable[[Path], bool]
) -> None:
    ordered = sorted(files)
    total = sum(file.bytes for file in ordered)
    for file in ordered:
        if total <= limit_bytes:
            return
        if remove(file.path):
            total -= file.bytes
