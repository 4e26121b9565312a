"""Keep the packed weights used last within one disk budget for all models."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..home import user_cache
from . import cache_files
from .cache_files import CacheFile

FOLDER = ".packed"
SOURCE = "source"  # the file with the model's path
# names of models' directories in the user's cache, which has other entries, too
OURS = "[0-9a-f]" * 16
BUDGET = "LANEFORMER_PACKED_BYTES"
DEFAULT_BYTES = 32 * 10**9
MAX_PLANS = 4  # of one model
LONGEST_HEADER = 2 << 20


def read_budget() -> int:
    """Return the budget in bytes; ValueError where the environment's is not a whole number."""
    budget = os.environ.get(BUDGET) or str(DEFAULT_BYTES)
    if not budget.isdecimal():
        raise ValueError(
            f"{BUDGET} = {budget!r} must be a number of bytes, such as {DEFAULT_BYTES}; 0 keeps nothing"
        )
    return int(budget)


def own_directory(source: Path) -> Path:
    # for GGUF files, and folders that take no `.packed`; SOURCE leads to copies beside the model
    return user_cache() / hashlib.sha256(os.fsencode(source)).hexdigest()[:16]


def register(source: Path) -> None:
    """Note the model's path, so that the budget counts its packed weights."""
    # where the note cannot be written they are not counted
    directory = own_directory(source)
    with contextlib.suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / SOURCE).write_bytes(os.fsencode(source))


def list_packed() -> list[CacheFile]:
    files = []
    for directory, source in directories().items():
        for path in directory.glob("*.bin"):
            with contextlib.suppress(FileNotFoundError):  # another process has removed it
                files.append(CacheFile(last_use_s(path), path, path.stat().st_size, source))
    return sorted(files)


def directories() -> dict[Path, Path]:
    """Return each directory of packed weights with its model."""
    places: dict[Path, Path] = {}
    for note in user_cache().glob(f"{OURS}/{SOURCE}"):
        source = Path(os.fsdecode(note.read_bytes()))
        places |= {note.parent: source, source / FOLDER: source}
    return places


def remove_others(new: Path, layout: int) -> None:
    """Remove files that nobody can use, then the oldest ones that the new file leaves no room for."""
    for directory in user_cache().glob(OURS):
        note = directory / SOURCE
        if not note.exists() or not Path(os.fsdecode(note.read_bytes())).exists():
            remove_directory(directory)
    remove_unusable({new.parent, *directories()}, layout)
    same = [file.path for file in list_packed() if file.path.parent == new.parent]
    for path in same[: max(0, len(same) - MAX_PLANS)]:
        remove(path)
    others = [file for file in list_packed() if file.path != new]
    cache_files.remove_oldest(others, read_budget() - new.stat().st_size, remove)


def remove_unusable(places: Iterable[Path], layout: int) -> None:
    """Remove files of other layouts, marks without files, and files of dead writers."""
    for path in [path for directory in places for path in directory.glob("*.*")]:
        lost_mark = path.suffix == ".checked" and not path.with_suffix(".bin").exists()
        other_layout = path.suffix == ".bin" and layout_of(path) != layout
        if lost_mark or other_layout or path.suffix == ".part":  # a live writer holds it
            remove(path)


def remove(path: Path) -> bool:
    """Remove the file and its mark; return False where an engine uses it."""
    if not cache_files.remove(path):
        return False
    path.with_suffix(".checked").unlink(missing_ok=True)
    return True


def remove_directory(directory: Path) -> None:
    """Remove a model's directory, unless an engine uses a file."""
    removed = [remove(path) for path in directory.glob("*.bin")]
    if all(removed):
        shutil.rmtree(directory, ignore_errors=True)


def last_use_s(path: Path) -> float:
    mark = path.with_suffix(".checked")  # touched by every start
    return (mark if mark.exists() else path).stat().st_mtime


def layout_of(path: Path) -> Any:
    try:
        with open(path, "rb") as file:
            header = file.read(min(int.from_bytes(file.read(8), "little"), LONGEST_HEADER))
            return json.loads(header)["plan"]["layout"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
