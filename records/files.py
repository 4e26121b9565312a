"""The files of a run: lines that survive a crash whole, files that appear whole, hashes, the version of the code."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any


def code_version(folder: Path) -> str:
    """The git commit of the code in `folder`, `-dirty` with local changes, "unknown" outside a checkout.

    A snapshot (tools.launch) says it in a file, as it may lie inside a checkout of other code.
    """
    for parent in (folder, *folder.parents):
        if (parent / "CODE_VERSION").is_file():
            return (parent / "CODE_VERSION").read_text().strip()

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=30
        ).stdout.strip()

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        dirty = "-dirty" if commit and git("status", "--porcelain", "--untracked-files=no") else ""
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return commit + dirty if commit else "unknown"


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def append_line(path: Path, line: str) -> None:
    """Append one line to a file, on disk when this returns; a half line left by a crash is closed first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b", buffering=0) as file:
        cut = False
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            cut = file.read(1) != b"\n"
        file.write(b"\n" * cut + line.encode() + b"\n")
        os.fsync(file.fileno())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file that others may be appending to; [] without the file.

    A line that a crash cut short, or that is still being written, is left out: `append_line` closes it, so that it
    spoils only itself.
    """
    found = []
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return [each for each in found if isinstance(each, dict)]


def replace_last_line(path: Path, old: str, new: str) -> None:
    """Put `new` in place of the last line of a file, which must be `old`, in one write."""
    with open(path, "r+b", buffering=0) as file:
        start = file.seek(-len(old.encode()) - 1, os.SEEK_END)
        found = file.read()
        assert found == old.encode() + b"\n", f"{path} ends in {found!r}, not in {old!r}"
        file.seek(start)
        file.write(new.encode() + b"\n")
        file.truncate()
        os.fsync(file.fileno())


def write_atomically(path: Path, text: str) -> None:
    """Write beside, flush to disk, rename: a reader sees the old file or the new one, never half of one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
