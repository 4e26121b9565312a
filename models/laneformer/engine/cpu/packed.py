"""Packed weights kept beside the model: the next start maps them instead of packing again.

A file holds one thread plan's tapes and the embedding, each at a multiple of 2 MiB so that the kernel can map
it with huge pages; where the file system has none, they are copied. Its name is a hash of the layout, dtype
and thread plan; its header holds hashes of the safetensors that it was made from and of every part. A file is
read through and compared with them once, and again whenever its inode says that it was touched since
(`.checked` beside it); so a start need not read the weights twice. Anything that does not fit is packed
again. A folder keeps the plans that were used last; the rest, and files of other layouts, are removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import mmap
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np

from ..machine import file_system, this_machine
from . import _core

LAYOUT_VERSION = 2  # of tiles, tapes and this file; raise it when any of them changes
FOLDER = ".packed"
SMALL_PAGES = ("tmpfs", "ramfs")  # file systems that map 4 KiB pages
ALIGNMENT = 2 << 20
MAX_PLANS = 4  # that a folder keeps
ABANDONED_S = 3600  # age of an unfinished file whose writer must have died
log = logging.getLogger(__name__)


class PackedWeights:
    """The cache of one model folder for one plan: `load` into a decoder, or `save` what it has packed."""

    def __init__(self, folder: Path, files: list[Path]):
        self.folder, self.files = folder.resolve(), files
        self._content: str | None = None

    def load(self, decoder: _core.Decoder, plan: dict[str, Any]) -> bool:
        """Map the tapes of a valid file into the decoder; False where there is none."""
        for directory in self.directories():
            path = directory / file_name(plan)
            if path.is_file() and self._load(decoder, plan, path):
                return True
        return False

    def save(self, decoder: _core.Decoder, plan: dict[str, Any]) -> None:
        """Write the decoder's tapes into the first directory that takes them;
        nothing half-written stays behind.
        """
        for directory in self.directories():
            try:
                directory.mkdir(parents=True, exist_ok=True)
                self._save(decoder, plan, directory / file_name(plan))
                prune(directory)
                return
            except OSError as error:
                log.info("packed weights cannot be kept in %s: %s", directory, error)

    def directories(self) -> list[Path]:
        """Where files are looked for and written, the first choice first."""
        user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return [
            self.folder / FOLDER,
            user / "laneformer" / hashlib.sha256(str(self.folder).encode()).hexdigest()[:16],
        ]

    def _load(self, decoder: _core.Decoder, plan: dict[str, Any], path: Path) -> bool:
        try:
            data, header = read_header(path)
            if header["plan"] != plan or not self._is_source_of(header):
                return False
            parts = [data[at : at + size] for at, size, _ in header["parts"]]
            sizes = [len(decoder.part(i)) for i in range(decoder.parts)]
            fits = [len(part) for part in parts] == sizes
            intact = fits and (is_checked(path) or self._is_intact(path, parts, header))
        except (OSError, ValueError, TypeError, KeyError) as error:
            log.info("%s is damaged and will be replaced: %r", path, error)
            return False
        if not intact:
            log.info("%s is damaged and will be replaced", path)
            return False
        for i, part in enumerate(parts):
            decoder.map_part(i, part)
        if this_machine().nodes > 1 or file_system(path) in SMALL_PAGES:
            decoder.copy_parts()
        mark_used(path)
        return True

    def _is_intact(self, path: Path, parts: list[np.ndarray], header: dict[str, Any]) -> bool:
        before = stamps([path])
        intact = [_core.content_hash(part) for part in parts] == [digest for _, _, digest in header["parts"]]
        if intact:
            remember_checked(path, before)
        return intact

    def _is_source_of(self, header: dict[str, Any]) -> bool:
        """Untouched files need not be read; others are compared."""
        return header.get("stamps") == stamps(self.files) or header.get("content") == self._source_hash()

    def _source_hash(self) -> str:
        if self._content is None:
            hashes = [_core.content_hash(np.memmap(path, np.uint8, "r")) for path in self.files]
            self._content = hashlib.sha256(" ".join(hashes).encode()).hexdigest()
        return self._content

    def _save(self, decoder: _core.Decoder, plan: dict[str, Any], path: Path) -> None:
        parts = [decoder.part(i) for i in range(decoder.parts)]
        header: dict[str, Any] = {
            "plan": plan,
            "stamps": stamps(self.files),
            "content": self._source_hash(),
            "parts": [],
        }
        end = ALIGNMENT
        for part in parts:
            header["parts"].append([end, len(part), _core.content_hash(part)])
            end += -(-len(part) // ALIGNMENT) * ALIGNMENT
        if shutil.disk_usage(path.parent).free < 2 * end:
            raise OSError(f"{end / 1e9:.1f} GB would fill more than half of the free space")
        text = json.dumps(header).encode()
        assert len(text) + 8 <= ALIGNMENT, "the header outgrew its place"
        unfinished = path.with_suffix(f".{os.getpid()}.part")
        try:
            with open(unfinished, "wb") as file:
                file.write(len(text).to_bytes(8, "little") + text)
                for (at, _, _), part in zip(header["parts"], parts, strict=True):
                    file.seek(at)
                    file.write(part.data)
                file.truncate(end)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, path)
            remember_checked(path, stamps([path]))
        finally:
            unfinished.unlink(missing_ok=True)


def file_name(plan: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:16] + ".bin"


def stamps(files: list[Path]) -> list[list[int]]:
    """What changes whenever a file is written or replaced; an inode's change time cannot be set by hand."""
    stats = [path.stat() for path in files]
    return [[s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns] for s in stats]


def is_checked(path: Path) -> bool:
    """Whether the file has not been touched since its hashes were last compared."""
    try:
        return bool(json.loads(path.with_suffix(".checked").read_text()) == stamps([path]))
    except (OSError, ValueError):
        return False


def remember_checked(path: Path, seen: list[list[int]]) -> None:
    try:
        path.with_suffix(".checked").write_text(json.dumps(seen))
    except OSError as error:  # a read-only folder: the next start compares again
        log.info("%s cannot be marked as checked: %s", path, error)


def mark_used(path: Path) -> None:
    with contextlib.suppress(OSError):  # a read-only folder
        os.utime(path.with_suffix(".checked"))


def prune(directory: Path) -> None:
    """Remove files of other layouts, the plans used longest ago, and what a writer that died has left."""
    used = {
        path: (mark if (mark := path.with_suffix(".checked")).exists() else path)
        for path in directory.glob("*.bin")
    }
    latest = sorted(used, key=lambda path: used[path].stat().st_mtime_ns, reverse=True)
    kept = [path for path in latest if layout_of(path) == LAYOUT_VERSION][:MAX_PLANS]
    old = [path for path in directory.glob("*.part") if time.time() - path.stat().st_mtime > ABANDONED_S]
    for path in [*(set(latest) - set(kept)), *old]:
        log.info("%s is removed", path)
        path.unlink(missing_ok=True)
        path.with_suffix(".checked").unlink(missing_ok=True)


def layout_of(path: Path) -> Any:
    try:
        with open(path, "rb") as file:
            return json.loads(file.read(min(int.from_bytes(file.read(8), "little"), ALIGNMENT)))["plan"][
                "layout"
            ]
    except (OSError, ValueError, TypeError, KeyError):
        return None


def read_header(path: Path) -> tuple[np.ndarray, dict[str, Any]]:
    """The file as mapped bytes, and its header; ValueError where it is no such file."""
    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_POPULATE", 0)
    with open(path, "rb") as file:
        data = np.frombuffer(mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ), np.uint8)
    size = int.from_bytes(data[:8].tobytes(), "little")
    return data, json.loads(data[8 : 8 + min(size, ALIGNMENT)].tobytes())
