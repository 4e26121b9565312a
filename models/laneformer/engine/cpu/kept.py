"""Which packed weights stay on the disk: those used last, within one budget over all models, and of models
still there.

They lie beside their model (`.packed/`), or, of a GGUF file or a folder that takes none, in a directory of
the user's cache that is named by a hash of the model's path. That directory also says which path, so that
every copy is found, wherever it lies, and recognised when its model is gone. A file that an engine has
mapped is held by a lock on it, which ends with the mapping; such a file is not removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

FOLDER = ".packed"
SOURCE = "source"  # the file with the model's path
OURS = "[0-9a-f]" * 16  # names of models' directories in the user's cache, where other things lie as well
BUDGET = "LANEFORMER_PACKED_BYTES"
DEFAULT_BYTES = 32 * 10**9
MAX_PLANS = 4  # of one model
ABANDONED_S = 3600  # age of an unfinished file whose writer must have died
LONGEST_HEADER = 2 << 20
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kept:
    """A file of packed weights. source: the model's folder or GGUF file."""

    path: Path
    source: Path
    bytes: int
    used_s: float  # since the epoch


def packed_bytes() -> int:
    """The budget; ValueError where the environment sets no whole number."""
    said = os.environ.get(BUDGET) or str(DEFAULT_BYTES)
    if not said.isdecimal():
        raise ValueError(
            f"{BUDGET} = {said!r} must be a number of bytes, such as {DEFAULT_BYTES}; 0 keeps nothing"
        )
    return int(said)


def user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "laneformer"


def own_directory(source: Path) -> Path:
    """Of a model, in the user's cache."""
    return user_cache() / hashlib.sha256(str(source).encode()).hexdigest()[:16]


def register(source: Path) -> None:
    """Let the model's copies be found; without a place to note it they are not counted."""
    with contextlib.suppress(OSError):
        (directory := own_directory(source)).mkdir(parents=True, exist_ok=True)
        (directory / SOURCE).write_text(str(source))


def kept() -> list[Kept]:
    """All files of packed weights, those used longest ago first."""
    found = []
    for directory, source in directories().items():
        for path in directory.glob("*.bin"):
            with contextlib.suppress(FileNotFoundError):  # another process has removed it
                found.append(Kept(path, source, path.stat().st_size, used_s(path)))
    return sorted(found, key=lambda one: one.used_s)


def directories() -> dict[Path, Path]:
    """Where packed weights lie, and of which model."""
    found: dict[Path, Path] = {}
    for note in user_cache().glob(f"{OURS}/{SOURCE}"):
        source = Path(note.read_text())
        found |= {note.parent: source, source / FOLDER: source}
    return found


def remove_others(new: Path, layout: int) -> None:
    """Remove what the file that was just written leaves no room for: first of all what nobody can use."""
    for directory in user_cache().glob(OURS):
        note = directory / SOURCE
        if not note.exists() or not Path(note.read_text()).exists():
            remove_directory(directory)
    for path in unusable({new.parent, *directories()}, layout):
        remove(path)
    same = [one for one in kept() if one.path.parent == new.parent]
    for one in same[: max(0, len(same) - MAX_PLANS)]:
        remove(one.path)
    left = kept()
    total = sum(one.bytes for one in left)
    for one in left:
        if total > packed_bytes() and one.path != new and remove(one.path):
            total -= one.bytes


def unusable(places: Iterable[Path], layout: int) -> Iterator[Path]:
    """Files of other layouts, marks of files that are gone, and what a writer that died has left."""
    for path in [path for directory in places for path in directory.glob("*.*")]:
        with contextlib.suppress(FileNotFoundError):
            match path.suffix:
                case ".bin" if layout_of(path) != layout:
                    yield path
                case ".checked" if not path.with_suffix(".bin").exists():
                    yield path
                case ".part" if time.time() - path.stat().st_mtime > ABANDONED_S:
                    yield path


def remove(path: Path) -> bool:
    """False where an engine has it."""
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    except FileNotFoundError:
        return True
    except OSError as error:
        log.info("%s stays: %s", path, error)
        return False
    path.with_suffix(".checked").unlink(missing_ok=True)
    log.info("%s is removed", path)
    return True


def remove_directory(directory: Path) -> None:
    """Of a model that is gone, or that nothing names."""
    held = [path for path in directory.glob("*.bin") if not remove(path)]
    if not held:
        shutil.rmtree(directory, ignore_errors=True)


def hold(file: IO[bytes]) -> None:
    """Let nobody remove the file while it, or a mapping of it, is open."""
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)


def used_s(path: Path) -> float:
    mark = path.with_suffix(".checked")  # touched by every start
    return (mark if mark.exists() else path).stat().st_mtime


def layout_of(path: Path) -> Any:
    try:
        with open(path, "rb") as file:
            header = file.read(min(int.from_bytes(file.read(8), "little"), LONGEST_HEADER))
            return json.loads(header)["plan"]["layout"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
