"""Choose among the files of saved prefixes (saved_file.py): the best for a prompt, the ones to remove."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from . import _core, cache_files
from .cache_files import CacheFile
from .saved_file import Damaged, Layout, Prefix, SavedFile, file_bytes

KEY_DIGITS = 16  # of the model's key, at the beginning of a file's name
log = logging.getLogger(__name__)


class TooLarge(OSError):
    """The file alone would exceed the limit."""


class SavedFolder:
    """A directory of saved prefixes, shared with other models and processes; OSError where unusable.

    limit_bytes: of all files there, those of other models included.
    start_in: takes a prefix's `dropped` and the number of shared ids; returns where a sequence can start.
    """

    def __init__(
        self,
        directory: Path,
        limit_bytes: int,
        key: str,
        layout: Layout,
        start_in: Callable[[np.ndarray, int], int],
    ):
        self.directory, self.limit_bytes = directory, limit_bytes
        self.key, self.layout = key, layout
        self._start_in = start_in
        self._files: dict[Path, SavedFile] = {}  # of this key
        self._lock = threading.Lock()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for part in directory.glob("*.part"):
            cache_files.remove(part)  # stays while its writer lives, which holds it
        for path in directory.glob(f"{key[:KEY_DIGITS]}-*.kv"):
            self._add(path)

    def __len__(self) -> int:
        return len(self._files)

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self._list_files())

    def best(self, ids: np.ndarray) -> tuple[SavedFile, int] | None:
        """Return the file with which a prompt starts latest, and the start."""
        starts = [
            (self._start_in(file.prefix.dropped, file.prefix.count_shared(ids)), file)
            for file in self._list_files()
        ]
        if not starts:
            return None
        start, file = max(starts, key=lambda one: one[0])
        return file, start

    def part(self, prefix: Prefix) -> Path:
        """Make room by removing the oldest files; return the path to write a prefix to, or raise TooLarge."""
        size = file_bytes(prefix, self.layout)
        if size > self.limit_bytes:
            raise TooLarge(
                f"a prefix of {size} bytes is more than cache_dir_bytes = {self.limit_bytes}"
            )
        files = []
        for path in self.directory.glob("*.kv"):
            with contextlib.suppress(FileNotFoundError):  # another process has removed it
                stat = path.stat()
                files.append(CacheFile(stat.st_mtime_ns, path, stat.st_size))
        cache_files.remove_oldest(files, self.limit_bytes - size, self._remove)
        return self._path(prefix).with_suffix(f".{os.getpid()}.part")

    def publish(self, part: Path, prefix: Prefix) -> None:
        """Rename a written file to its final name; remove the files whose prefix it contains."""
        path = self._path(prefix)
        os.replace(part, path)
        new = self._add(path)
        if new is None:
            return
        for old in self._list_files():
            length = len(old.prefix.ids)
            contained = (
                length < len(new.prefix.ids) and new.prefix.count_shared(old.prefix.ids) == length
            )
            if contained and self._start_in(new.prefix.dropped, length) == length:
                self._remove(old.path)

    def reject(self, path: Path, why: Exception) -> None:
        if not isinstance(why, FileNotFoundError):
            log.warning("%s is removed, as it cannot be used: %s", path, why)
        self._remove(path)

    def _path(self, prefix: Prefix) -> Path:
        digits = _core.content_hash(prefix.ids)[:KEY_DIGITS]
        return self.directory / f"{self.key[:KEY_DIGITS]}-{digits}.kv"

    def _add(self, path: Path) -> SavedFile | None:
        try:
            file = SavedFile(path, self.key, self.layout)
        except (Damaged, OSError) as error:
            self.reject(path, error)
            return None
        with self._lock:
            self._files[path] = file
        return file

    def _list_files(self) -> list[SavedFile]:
        with self._lock:
            return list(self._files.values())

    def _remove(self, path: Path) -> bool:
        with self._lock:
            self._files.pop(path, None)
        return cache_files.remove(path)
