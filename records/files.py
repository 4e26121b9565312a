"""The files of a run: JSON lines, atomic writes, hashes, and the names of code and host."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, TextIO

# what decides a model's answers: config, tokenizer, weights, chat template
MODEL_FILES = ("*.json", "*.safetensors", "*.bin", "*.model", "*.txt", "*.jinja")


JsonObject = dict[str, Any]  # such as a line of a run's files
# numbers of lines that are not JSON; UnicodeDecodeError: not UTF-8
Skipped = dict[int, type[Exception]]

_kept: dict[Path, list[str]] = {}  # lines that wait for room on their disk
_keeping = threading.Lock()


def append_line(path: Path, line: str) -> None:
    """Append one line and flush it to disk; OSError, and the file as it was, where it does not fit."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b", buffering=0) as file:
        # a partial line left by a crash is terminated first
        cut = False
        end = file.seek(0, os.SEEK_END)
        if end:
            file.seek(-1, os.SEEK_END)
            # also true while another process's line is half in the file: a blank line then, which readers skip
            cut = file.read(1) != b"\n"
        _write_at(file, end, b"\n" * cut + line.encode() + b"\n")


def _write_at(file: FileIO, start: int, content: bytes) -> None:
    """Write bytes from `start` on, all or none: OSError."""
    try:
        file.seek(start)
        if file.write(content) != len(
            content
        ):  # the kernel writes what still fits and says how much it was
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)
        os.fsync(file.fileno())
    except OSError:
        file.truncate(start)
        raise


def append_or_keep(path: Path, line: str) -> bool:
    """Append a line, or keep it in memory while the disk is full; return whether all lines are written."""
    with _keeping:
        _kept.setdefault(path, []).append(line)
        for file, lines in _kept.items():
            with survive_full_disk(file):
                while lines:
                    # a line leaves the list only when it is on disk, so the order is kept
                    append_line(file, lines[0])
                    del lines[0]
        return not _kept[path]


@contextmanager
def survive_full_disk(path: Path) -> Iterator[None]:
    """Turn an OSError of this block into a warning that names the disk."""
    try:
        yield
    except OSError as problem:
        target = path.resolve()
        place = next(parent for parent in (target, *target.parents) if parent.exists())
        mount = next(parent for parent in (place, *place.parents) if os.path.ismount(parent))
        usage = shutil.disk_usage(place)
        free = f"{usage.free / 1e9:.3g} of {usage.total / 1e9:.3g} GB free"
        logging.getLogger().warning(
            f"{path} cannot be written: {problem.strerror} (disk {mount}, {free})"
        )


def replace_last_line(path: Path, old: str, new: str) -> None:
    """Replace the last line of a file, which must be `old`, in one write, or in memory on a full disk."""
    if _kept.get(path):
        _kept[path][-1] = new
        return
    with open(path, "r+b", buffering=0) as file:
        start = file.seek(-len(old.encode()) - 1, os.SEEK_END)
        last = file.read()
        assert last == old.encode() + b"\n", f"{path} ends in {last!r}, not in {old!r}"
        try:
            _write_at(file, start, new.encode() + b"\n")
            file.truncate()
        except OSError:
            _kept.setdefault(path, []).append(new)


def read_lines(path: Path, unreadable: list[int] | None = None) -> list[JsonObject]:
    """Read the JSON objects of a file of lines that others append to; no file is an empty one.

    Args:
        unreadable: receives the numbers of the lines that are skipped.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    skipped: Skipped = {}
    values = dict(json_lines(lines, path, skipped))
    # a crash may have cut lines short
    objects = {place: value for place, value in values.items() if isinstance(value, dict)}
    # a last line without an end may be half written: it is no unreadable one
    if unreadable is not None:
        bad = sorted({*skipped, *values} - {*objects})
        unreadable += [place for place in bad if place < len(lines)]
    return list(objects.values())


def json_lines(
    lines: Iterable[str | bytes], name: object, skipped: Skipped | None = None
) -> Iterator[tuple[int, Any]]:
    """Yield (line number from 1, value) of every line that is not blank, NaN and infinity as None.

    Args:
        name: of the source, for the error.
        skipped: receives the lines that are not JSON; without it they are a ValueError.
    """
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                # `json.loads` would guess the encoding of each line
                text = line if isinstance(line, str) else line.decode("utf-8-sig")
                yield number, json.loads(text, parse_constant=lambda constant: None)
            except (ValueError, RecursionError) as error:  # nested thousands deep is not JSON to us
                if skipped is None:
                    raise ValueError(f"{name}:{number}: not JSON: {error}") from None
                skipped[number] = type(error)


def read_json(path: Path, missing: Any = None) -> Any:
    """Read a JSON file; `missing` if there is none, ValueError if it is not JSON."""
    return json.loads(path.read_bytes()) if path.is_file() else missing


def without_none(value: Any) -> Any:
    """Drop the fields that are None at any depth of a JSON value."""
    if isinstance(value, dict):
        return {name: without_none(item) for name, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, list | tuple) else value


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a temporary file, flush and rename it: readers never see a part. Its folder need not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(content if isinstance(content, bytes) else content.encode())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


class Held(ValueError, BlockingIOError):
    """Another process holds a lock."""


def hold_lock(path: Path, problem: str, wait_s: float = 0.0) -> TextIO:
    """Lock a file until the returned handle is closed or the process ends.

    Raises:
        Held: another process still holds it after wait_s seconds.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # a+ creates the file, and does not truncate the holder's name
    lock = open(path, "a+")  # noqa: SIM115 - stays open
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= deadline:
                lock.seek(0)
                holder = lock.read() or "an unknown process"
                lock.close()
                raise Held(f"{problem} (held by {holder})") from None
            time.sleep(0.2)
        except OSError as none:
            raise ValueError(
                f"{path} cannot be locked ({none}); mount its file system with locks (flock)"
            ) from none
    # on a full disk the lock holds without the holder's name
    with suppress(OSError):
        os.ftruncate(lock.fileno(), 0)
        os.write(lock.fileno(), f"process {os.getpid()} on {host_name()}".encode())
    return lock


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def model_sha256(folder: Path) -> str:
    """Hash the names and contents of a model folder's MODEL_FILES."""
    # README, licence and remote code do not count; the same weights in other shards have another hash
    paths = {path for pattern in MODEL_FILES for path in folder.glob(pattern)}
    listing = "".join(f"{path.name} {file_sha256(path)}\n" for path in sorted(paths))
    return hashlib.sha256(listing.encode()).hexdigest()


def host_name() -> str:
    """Return Slurm's name for this node, outside Slurm the host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def code_version(folder: Path) -> str:
    """Return the git commit of a folder's code, with -dirty for local changes, or "unknown"."""
    # a snapshot (tools.launch) may lie inside a checkout of other code
    for parent in (folder, *folder.parents):
        if (parent / "CODE_VERSION").is_file():
            return (parent / "CODE_VERSION").read_text().strip()

    # without names of tags, which may be moved
    git = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        answer = subprocess.run(git, cwd=folder, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return answer.stdout.strip() or "unknown"
