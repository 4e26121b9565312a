"""Keep packed weights in a file beside the model, which the next start maps."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import mmap
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from ..machine import file_system, memory_bytes, this_machine
from . import _core
from .cache_files import hold
from .packed_files import BUDGET, FOLDER, own_directory, read_budget, register, remove_others

LAYOUT_VERSION = 5  # of tiles, tapes and this format; raise it when any of them changes
SMALL_PAGES = ("tmpfs", "ramfs")  # file systems that map pages of 4 KiB
ALIGNMENT = 2 << 20  # of tapes and embedding, so that the kernel can map them with huge pages
log = logging.getLogger(__name__)


class PackedWeights:
    """The packed weights of one model; each file holds the tapes of one thread plan, and the embedding."""

    def __init__(self, folder: Path, files: list[Path]):
        self.folder, self.files = folder.resolve(), files
        self._content: str | None = None

    def load(self, decoder: _core.Decoder, plan: dict[str, Any]) -> bool:
        """Map the tapes of a valid file into the decoder; return False where there is none."""
        for directory in self.directories():
            path = directory / file_name(plan)
            if path.is_file() and self._load(decoder, plan, path):
                return True
        return False

    def save(self, decoder: _core.Decoder, plan: dict[str, Any]) -> None:
        """Write the decoder's tapes to the first directory that takes them."""
        for directory in self.directories():
            try:
                directory.mkdir(parents=True, exist_ok=True)
                register(self.folder)
                self._save(decoder, plan, directory / file_name(plan))
                remove_others(directory / file_name(plan), LAYOUT_VERSION)
                return
            except OSError as error:
                log.info("packed weights cannot be kept in %s: %s", directory, error)

    def directories(self) -> list[Path]:
        # in order of preference
        return [self.folder / FOLDER, own_directory(self.folder)]

    def _load(self, decoder: _core.Decoder, plan: dict[str, Any], path: Path) -> bool:
        try:
            data, header = read_header(path)
            if header["plan"] != plan or not self._is_source_of(header):
                return False
            parts = [data[begin : begin + size] for begin, size, _ in header["parts"]]
            sizes = [len(decoder.part(i)) for i in range(decoder.parts)]
            fits = [len(part) for part in parts] == sizes
            # the first start that maps a file compares its hashes, later ones if its inode changed
            intact = fits and (is_checked(path) or self._is_intact(path, parts, header))
        except (OSError, ValueError, TypeError, KeyError) as error:
            log.info("%s is damaged and will be replaced: %r", path, error)
            return False
        if not intact:
            log.info("%s is damaged and will be replaced", path)
            return False
        for i, part in enumerate(parts):
            decoder.map_part(i, part)
        # in place, reads without huge pages, or from another memory node, would be slow
        if this_machine().nodes > 1 or file_system(path) in SMALL_PAGES:
            decoder.copy_parts()
        with contextlib.suppress(OSError):  # a read-only folder
            os.utime(path.with_suffix(".checked"))
        return True

    def _is_intact(self, path: Path, parts: list[np.ndarray], header: dict[str, Any]) -> bool:
        before = stamps([path])
        if [_core.content_hash(part) for part in parts] != [
            digest for _, _, digest in header["parts"]
        ]:
            return False
        # the mark must not reach the disk before the data that it vouches for
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        with contextlib.suppress(OSError):  # a read-only folder: the next start compares again
            path.with_suffix(".checked").write_text(json.dumps(before))
        return True

    def _is_source_of(self, header: dict[str, Any]) -> bool:
        # equal stamps spare reading the model's files
        return (
            header.get("stamps") == stamps(self.files)
            or header.get("content") == self._source_hash()
        )

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
        if end > (budget := read_budget()):
            raise OSError(f"{end / 1e9:.1f} GB are more than {BUDGET} = {budget}")
        text = json.dumps(header).encode()
        assert len(text) + 8 <= ALIGNMENT, "the header outgrew its place"
        # written under another name: no start can map half a file
        unfinished = path.with_suffix(f".{os.getpid()}.part")
        try:
            with open(unfinished, "wb") as file:
                hold(file)
                file.write(len(text).to_bytes(8, "little") + text)
                for (begin, _, _), part in zip(header["parts"], parts, strict=True):
                    file.seek(begin)
                    file.write(part.data)
                file.truncate(end)
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)


def file_name(plan: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:16] + ".bin"


def stamps(files: list[Path]) -> list[list[int]]:
    """Return values that change whenever a file is written or replaced."""
    # an inode's change time cannot be set by hand, unlike its modification time
    stats = [path.stat() for path in files]
    return [[s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns] for s in stats]


def is_checked(path: Path) -> bool:
    # unchanged since its hashes were last compared
    try:
        return bool(json.loads(path.with_suffix(".checked").read_text()) == stamps([path]))
    except (OSError, ValueError):
        return False


def read_header(path: Path) -> tuple[np.ndarray, dict[str, Any]]:
    """Return the file as mapped bytes, and its header; ValueError for another kind of file."""
    # populating more than the memory would evict the first pages before they are used
    fits = path.stat().st_size < memory_bytes()
    flags = mmap.MAP_PRIVATE | (getattr(mmap, "MAP_POPULATE", 0) if fits else 0)
    with open(path, "rb") as file:
        hold(file)  # the mapping keeps the lock
        data = np.frombuffer(
            mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ), np.uint8
        )
    size = int.from_bytes(data[:8].tobytes(), "little")
    return data, json.loads(data[8 : 8 + min(size, ALIGNMENT)].tobytes())
