"""The directory with the files of prefixes (saved_file.py): which fits a prompt best, and which goes first.

Other models, and other processes, may use it too: a file's name begins with the key of its model, and all
share one limit. Files that are cut, changed, or not what their name says are removed with a warning.
"""

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

KEY_DIGITS = 16  # of a name
log = logging.getLogger(__name__)


class TooLarge(OSError):
    """One file would be beyond the limit."""


class SavedFolder:
    """OSError where the directory cannot be used.

    limit_bytes: of all files there. start_in: where a sequence can start that shares so many ids with a
    prefix whose pages are dropped like this.
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
            cache_files.remove(part)  # where its writer, which holds it, is gone
        for path in directory.glob(f"{key[:KEY_DIGITS]}-*.kv"):
            self._add(path)

    def __len__(self) -> int:
        return len(self._files)

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self._list_files())

    def best(self, ids: np.ndarray) -> tuple[SavedFile, int] | None:
        """With which a prompt starts the latest, and where."""
        starts = [
            (self._start_in(file.prefix.dropped, file.prefix.count_shared(ids)), file)
            for file in self._list_files()
        ]
        if not starts:
            return None
        start, file = max(starts, key=lambda one: one[0])
        return file, start

    def part(self, prefix: Prefix) -> Path:
        """Where to write a prefix; there is room for it then, and those used longest ago are gone. Else
        TooLarge.
        """
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
        """The file that was written takes its name; those that it contains go."""
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
