"""A data folder behind a URL (`--out s3://bucket/data`): stages work in a copy on the local disk.

The copy holds plans, receipts and manifests; data come when they are read, up to KEPT_BYTES, and what
a unit makes goes to the store.
"""

from __future__ import annotations

import functools
import glob
import os
import re
import shutil
import tempfile
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import fsspec

from data_mixtures.readers.unpack import explain_errors
from records.files import hold_lock, host_name

# a folder that holds the file .url is a copy: the file holds the URL of its store
MARK, RECEIPT, MANIFEST, LOCK = ".url", "receipt.json", "source.json", ".lock"
KEPT_BYTES = 4 << 30
# a URL, and a name of the moment: what a worker has of an earlier one is not used
Place = tuple[str, str]


class Store:
    """The store behind a copy's URL; both use the same relative names."""

    def __init__(self, here: Path, url: str) -> None:
        self.here = here
        self.url = url
        with explain_errors(url, "written"):
            self.system, self.root = fsspec.url_to_fs(
                url, use_listings_cache=False, skip_instance_cache=True
            )
        # copies of data on this disk with their bytes, oldest first
        self._kept: dict[Path, int] = {}
        # folders whose receipts have all been copied
        self._listed: set[Path] = set()
        # small files of the folder itself, as they are there
        self._saved: dict[str, tuple[int, int]] = {}

    def name(self, path: Path) -> str:
        return f"{self.root}/{path.relative_to(self.here)}"

    def read_small(self, manifests: bool = False) -> None:
        """Copy the folder's own files and, if `manifests`, published ones."""
        names = self.system.find(self.root, maxdepth=1)
        if manifests:
            # a bucket's folder may have a name that reads as a pattern
            names += self.system.glob(f"{glob.escape(self.root)}/*/{MANIFEST}")
        self._write(name for name in names if Path(name).name != LOCK)
        self._saved = self._stat_small()

    def save(self) -> None:
        """Copy changes and deletions of the folder's own files to the store."""
        # what others have put there stays
        small = self._stat_small()
        for name, _ in small.items() - self._saved.items():
            self.put(self.here / name)
        self.remove(self.here / name for name in self._saved.keys() - small.keys())
        self._saved = small

    def _stat_small(self) -> dict[str, tuple[int, int]]:
        files = (path for path in self.here.iterdir() if path.is_file() and path.name[0] != ".")
        # (bytes, time of change)
        return {path.name: (path.stat().st_size, path.stat().st_mtime_ns) for path in files}

    def _write(self, names: Iterable[str]) -> None:
        paths = list(names)
        # `cat` of an empty list is an error
        contents: Mapping[str, bytes] = self.system.cat(paths) if paths else {}
        for name, content in contents.items():
            path = self.here / name.removeprefix(f"{self.root}/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def read_receipts(self, folder: Path, again: bool = False) -> None:
        """Copy the receipts of all units of a source at once."""
        if again or folder not in self._listed:
            # receipts that the store no longer has
            for unit in folder.glob("unit-*"):
                (unit / RECEIPT).unlink(missing_ok=True)
            self._write(
                name for name in self.system.find(self.name(folder)) if name.endswith(f"/{RECEIPT}")
            )
            self._listed.add(folder)
            if folder.is_dir():
                # the folder's time tells readers that receipts changed
                os.utime(folder)

    def pull(self, path: Path) -> None:
        """Copy a file from the store, unless it exists here or is missing there."""
        if path.exists() or (path.name == RECEIPT and path.parents[1] in self._listed):
            return
        part = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        part.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.system.get_file(self.name(path), str(part))
            part.replace(path)
        except FileNotFoundError:
            return
        finally:
            part.unlink(missing_ok=True)
        if path.suffix != ".json":
            # room for data is limited: the oldest copies go first
            self.drop(KEPT_BYTES)
            self._kept[path] = path.stat().st_size

    def drop(self, keep_bytes: int) -> None:
        while sum(self._kept.values()) > keep_bytes:
            oldest = next(iter(self._kept))
            # whoever has it open or mapped keeps it
            oldest.unlink(missing_ok=True)
            del self._kept[oldest]

    def push(self, folder: Path) -> None:
        """Move the files of a finished unit to the store; only its receipt stays here as well."""
        *files, receipt = sorted(folder.iterdir(), key=lambda path: path.name == RECEIPT)
        self.remove([receipt])
        for path in files:
            self.put(path)
        # last: an object appears whole or not at all, so a receipt is as atomic as a rename
        self.put(receipt)
        for path in files:
            path.unlink()

    def put(self, path: Path) -> None:
        self.system.put_file(str(path), self.name(path))

    def copy(self, path: Path, target: Path) -> None:
        self.system.cp_file(self.name(path), self.name(target))

    def remove(self, paths: Iterable[Path], recursive: bool = False) -> None:
        for path in paths:
            with suppress(FileNotFoundError):
                self.system.rm(self.name(path), recursive=recursive)

    def sizes(self, folder: Path) -> dict[str, int]:
        files = self.system.find(self.name(folder), detail=True)
        return {Path(name).name: info["size"] for name, info in files.items()}

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the store's lock file; ValueError names another holder."""
        # advisory: it works as long as all processes use it, but the bytes of the data do not
        # depend on it
        lock = f"{self.root}/{LOCK}"
        holder_name = f"process {os.getpid()} on {host_name()}"
        try:
            with explain_errors(self.url, "written"):
                self.system.pipe_file(lock, holder_name.encode(), mode="create")
        except FileExistsError:
            holder = self.system.cat_file(lock).decode()
            if not holder.endswith(f" on {host_name()}"):
                busy = f"another process is preparing {self.url} (held by {holder})"
                raise ValueError(
                    f"{busy}; wait for it, or delete {self.url}/{LOCK} if it is gone"
                ) from None
            # a lock that this machine left is stale: no other process here has the copy
            self.system.pipe_file(lock, holder_name.encode())
        try:
            yield
        finally:
            self.system.rm(lock)


def url_of(out: Path) -> str | None:
    """Return the URL that was given as a path; None for a folder."""
    # Path has removed one slash
    match = re.match(r"([a-z][a-z0-9+.-]+):/+(.+)", str(out))
    return f"{match[1]}://{match[2]}" if match else None


# of every folder that this process has asked for, as the system of a store and its listings are kept
_stores: dict[Path, Store | None] = {}


def of(out: Path) -> Store | None:
    """Return the store that a folder is a copy of, by its file .url; None for an ordinary folder."""
    if out not in _stores:
        mark = out / MARK
        _stores[out] = Store(out, mark.read_text(encoding="utf-8")) if mark.is_file() else None
    return _stores[out]


@contextmanager
def open_copy(url: str) -> Iterator[Path]:
    """Yield the main process's copy, locked here and in the store."""
    here = _scratch() / f"{zlib.crc32(url.encode()):08x}"
    problem = f"another process is preparing {url}; wait for it, or use another --out"
    with hold_lock(here.with_suffix(LOCK), problem):
        store = _new(here, url)
        with store.lock():
            store.read_small(manifests=True)
            try:
                yield here
            finally:
                store.save()
                store.drop(0)
                # of units that ran in this process
                shutil.rmtree(_workers_folder(), ignore_errors=True)
                _remove_stale_copies()


def place(out: Path) -> Place | None:
    """Return what a worker needs for its own copy; None for an ordinary folder."""
    return (store.url, uuid.uuid4().hex) if (store := of(out)) else None


@functools.lru_cache(maxsize=1)
def workers_copy(place: Place) -> Path:
    """Make this process's copy, in place of an older one."""
    here = _workers_folder()
    _new(here, place[0]).read_small()
    return here


def _workers_folder() -> Path:
    return _scratch() / f"worker-{os.getpid()}"


def _new(here: Path, url: str) -> Store:
    _remove_stale_copies()
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir(parents=True)
    (here / MARK).write_text(url, encoding="utf-8")
    _stores[here] = store = Store(here, url)
    return store


def _remove_stale_copies() -> None:
    # a killed worker cannot delete its own copy
    for folder in _scratch().glob("worker-*"):
        if not Path(f"/proc/{folder.name.removeprefix('worker-')}").exists():
            shutil.rmtree(folder, ignore_errors=True)


def _scratch() -> Path:
    folder = Path(tempfile.gettempdir()) / f"data_mixtures-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def open_part(out: Path, path: Path) -> BinaryIO:
    """Open a file, here or in the store, to read parts of it; FileNotFoundError if missing."""
    store = of(out)
    file: Any = (
        store.system.open(store.name(path), "rb", cache_type="none")
        if store
        else path.open("rb", 0)
    )
    return file
