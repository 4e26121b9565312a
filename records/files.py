"""The files of a run: append and read JSON lines, write files atomically, hash them, and name the
code and the host.
"""

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
Skipped = dict[
    int, type[Exception]
]  # numbers of lines that are not JSON; UnicodeDecodeError: not UTF-8

_kept: dict[Path, list[str]] = {}  # lines that wait for room on their disk
_keeping = threading.Lock()


def append_line(path: Path, line: str) -> None:
    """Append one line and flush it to disk; a partial line left by a crash is terminated first.

    Raises OSError, and leaves the file as it was, where the whole line does not fit.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b", buffering=0) as file:
        cut, end = False, file.seek(0, os.SEEK_END)
        if end:
            file.seek(-1, os.SEEK_END)
            # also true while another process's line is half in the file: a blank line then, which readers skip
            cut = file.read(1) != b"\n"
        _write_at(file, end, b"\n" * cut + line.encode() + b"\n")


def _write_at(file: FileIO, start: int, content: bytes) -> None:
    """Write these bytes from `start` on into an unbuffered file, which ends at `start` if they
    do not fit: OSError.
    """
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
    """`append_line` that survives a full disk: what is refused stays in memory and is written
    before the next line.

    Returns whether all lines that this process has for the file are in it.
    """
    with _keeping:
        _kept.setdefault(path, []).append(line)
        for file, lines in _kept.items():
            with survive_full_disk(file):
                while lines:
                    append_line(file, lines[0])
                    del lines[0]
        return not _kept[path]


@contextmanager
def survive_full_disk(path: Path) -> Iterator[None]:
    """What must not end a training job: an OSError in this block becomes a warning that names the disk."""
    try:
        yield
    except OSError as problem:
        there = path.resolve()
        place = next(each for each in (there, *there.parents) if each.exists())
        mount = next(each for each in (place, *place.parents) if os.path.ismount(each))
        usage = shutil.disk_usage(place)
        free = f"{usage.free / 1e9:.3g} of {usage.total / 1e9:.3g} GB free"
        logging.getLogger().warning(
            f"{path} cannot be written: {problem.strerror} (disk {mount}, {free})"
        )


def replace_last_line(path: Path, old: str, new: str) -> None:
    """Replace the last line of a file, which must be `old`, by `new` in one write; without room for
    it, it is kept.
    """
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
    """The JSON objects of a file of lines that other processes append to; no file is an empty one.

    Lines that are not JSON objects are skipped, as a crash may have cut them short. NaN and infinity become None.
    unreadable: receives the numbers of the skipped lines, but not of a last one without an end, which may be half
    written.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    skipped: Skipped = {}
    values = dict(json_lines(lines, path, skipped))
    objects = {place: value for place, value in values.items() if isinstance(value, dict)}
    if unreadable is not None:
        bad = sorted({*skipped, *values} - {*objects})
        unreadable += [place for place in bad if place < len(lines)]
    return list(objects.values())


def json_lines(
    lines: Iterable[str | bytes], name: object, skipped: Skipped | None = None
) -> Iterator[tuple[int, Any]]:
    """(line number from 1, value) of every line that is not blank, NaN and infinity as None.

    Bytes must be UTF-8; `json.loads` would guess the encoding of each line. Raises ValueError with `name` and
    the line's number for a line that is not JSON, unless `skipped` is given: then that receives the number.
    """
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                text = line if isinstance(line, str) else line.decode("utf-8-sig")
                yield number, json.loads(text, parse_constant=lambda constant: None)
            except (ValueError, RecursionError) as error:  # nested thousands deep is not JSON to us
                if skipped is None:
                    raise ValueError(f"{name}:{number}: not JSON: {error}") from None
                skipped[number] = type(error)


def read_json(path: Path, missing: Any = None) -> Any:
    """The content of a JSON file; `missing` if there is none. Raises ValueError if it is not JSON."""
    return json.loads(path.read_bytes()) if path.is_file() else missing


def without_none(value: Any) -> Any:
    """A value as JSON has it without the fields that are None, at any depth."""
    if isinstance(value, dict):
        return {name: without_none(each) for name, each in value.items() if each is not None}
    return [without_none(each) for each in value] if isinstance(value, list | tuple) else value


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a temporary file, flush it to disk and rename it: readers see the old file or the new
    one, never a part.
    """
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


class Held(ValueError, BlockingIOError):
    """Another process holds a lock."""


def hold_lock(path: Path, problem: str, wait_s: float = 0.0) -> TextIO:
    """Lock a file until the returned handle is closed or the process ends; the file names its holder.

    Raises Held, with `problem` and the holder, if another process still holds it after wait_s seconds.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock, deadline = open(path, "a+"), time.monotonic() + wait_s  # noqa: SIM115 - stays open
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
    with suppress(OSError):  # a full disk: the lock holds without a name, too
        os.ftruncate(lock.fileno(), 0)
        os.write(lock.fileno(), f"process {os.getpid()} on {host_name()}".encode())
    return lock


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def model_sha256(folder: Path) -> str:
    """One hash of a model folder: names and contents of config, tokenizer, weights
    and chat template (MODEL_FILES).

    README, licence and remote code do not count. The same weights in other shards have another hash.
    """
    paths = {path for pattern in MODEL_FILES for path in folder.glob(pattern)}
    listing = "".join(f"{path.name} {file_sha256(path)}\n" for path in sorted(paths))
    return hashlib.sha256(listing.encode()).hexdigest()


def host_name() -> str:
    """Slurm's name for this node, outside Slurm the host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def code_version(folder: Path) -> str:
    """The git commit of the code in `folder`: "-dirty" appended for local changes,
    "unknown" outside a checkout.

    A snapshot (tools.launch) records it in CODE_VERSION, since it may lie inside a checkout of other code.
    """
    for parent in (folder, *folder.parents):
        if (parent / "CODE_VERSION").is_file():
            return (parent / "CODE_VERSION").read_text().strip()

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=30
        )
        return done.stdout.strip()

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        dirty = "-dirty" if commit and git("status", "--porcelain", "--untracked-files=no") else ""
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return commit + dirty if commit else "unknown"
