"""Files of a cache that several processes share: held by locks while somebody uses them, removed by age.

A lock ends with the process that took it, so nothing that was killed is in anybody's way.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, NamedTuple

log = logging.getLogger(__name__)


class CacheFile(NamedTuple):
    """In order: by when it was used last, in seconds or nanoseconds since the epoch.

    source: of packed weights, the model's folder or GGUF file.
    """

    used: float
    path: Path
    bytes: int
    source: Path = Path()


def hold(file: IO[bytes], alone: bool = False) -> None:
    """Let nobody remove the file while it, or a mapping of it, is open. alone: OSError where another holds it."""
    if alone:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)


def remove(path: Path) -> bool:
    """False where somebody holds it."""
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
    """Until those that are left are within the limit."""
    ordered = sorted(files)
    total = sum(file.bytes for file in ordered)
    for file in ordered:
        if total <= limit_bytes:
            return
        if remove(file.path):
            total -= file.bytes
