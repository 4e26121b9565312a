"""One byte a block, shared by the processes that one launcher started on this node: what one marks, all see.

The bytes are a file in /dev/shm. Its users hold a shared flock, which the kernel releases however a process
ends. Before a file is opened, files that nobody holds are deleted: no mark outlives the attempt that made it.
Where there is no such file (no /dev/shm, no room), each process has bytes of its own.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FOLDER = Path("/dev/shm")
PREFIX = f"laneformer-checked-{os.getuid()}-"


class NodeMarks:
    """`count` bytes, 0 until a process of this attempt sets them. name: equal where the
    blocks are; None: unshared.
    """

    def __init__(self, count: int, name: str | None) -> None:
        self.bytes: bytearray | mmap.mmap = bytearray(count)
        self._file: int | None = None
        if name and count:
            with suppress(OSError):
                self._file = _join(f"{PREFIX}{name}-{_attempt()}", count)
                self.bytes = mmap.mmap(self._file, count)
                weakref.finalize(self, _leave, self._file)

    @contextmanager
    def claimed(self, number: int) -> Iterator[None]:
        """Keep the other processes from one byte meanwhile; the threads of this process it does not know."""
        if self._file is None:
            yield
            return
        with suppress(OSError):  # threads of two processes can look like a deadlock: then both do the work
            fcntl.lockf(self._file, fcntl.LOCK_EX, 1, number)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, number)


def _attempt() -> str:
    """The launcher of this process, by number and start time, and how often it has
    started its processes again.
    """
    parent = os.getppid()
    started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    return f"{parent}-{started}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _join(name: str, count: int) -> int:
    _delete_unused()
    while True:
        file = os.open(FOLDER / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        fcntl.flock(file, fcntl.LOCK_SH)
        if os.fstat(file).st_nlink:
            break
        os.close(file)  # deleted before it was locked
    try:
        os.posix_fallocate(file, 0, count)  # without it, a full /dev/shm would be a SIGBUS later
    except OSError:
        _leave(file)
        raise
    return file


def _leave(file: int) -> None:
    fcntl.flock(file, fcntl.LOCK_UN)  # the map holds a duplicate of the descriptor
    os.close(file)
    _delete_unused()


def _delete_unused() -> None:
    for path in FOLDER.glob(f"{PREFIX}*"):
        with suppress(OSError):
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(file).st_nlink:  # else the name may be another file's by now
                    path.unlink()
            finally:
                os.close(file)
