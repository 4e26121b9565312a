"""Checkpoint folders on disk: which are complete, which may be deleted, and how one is moved out of the way.

checkpoint/step-N           complete once `.metadata` exists and every data file has the size that it states
checkpoint/.trash-*         being deleted: renamed first, so that a half-deleted one never looks complete
checkpoint-aside/step-N.T   damaged, or abandoned by a rollback; kept for inspection, never overwritten
"""

from __future__ import annotations

import logging
import pickle
import re
import shutil
import time
from pathlib import Path
from typing import Any

STEP_FOLDER = re.compile(r"step-(\d+)$")
TRASH = ".trash-"
logger = logging.getLogger()


def step_folders(folder: Path) -> dict[int, Path]:
    """{N: path} of every `step-N` in the checkpoint folder, complete or not, newest first."""
    found = {int(m[1]): path for path in folder.glob("step-*") if (m := STEP_FOLDER.search(path.name))}
    return dict(sorted(found.items(), reverse=True))


def newest_saved_step(folder: Path) -> int:
    """The newest step whose save has finished (`.metadata` is written last); -1 if there is none."""
    return next((step for step, path in step_folders(folder).items() if (path / ".metadata").is_file()), -1)


def newest_complete_checkpoint(folder: Path) -> Path | None:
    """The newest complete `step-N` folder, None if there is none yet; logs a warning for incomplete ones.

    Raises ValueError if there are several checkpoints and all are damaged: a disk problem, not a new run.
    """
    steps = step_folders(folder)
    for path in steps.values():
        try:
            check_complete(path)
        except ValueError as problem:
            logger.warning(f"Skipping a checkpoint: {problem}")
            continue
        return path
    saved = [path for path in steps.values() if (path / ".metadata").is_file()]
    if saved and len(steps) > 1:
        raise ValueError(
            f"all {len(steps)} checkpoints in {folder} are incomplete; repair or move them away before starting again"
        )
    return None


def read_metadata(folder: Path) -> Any:
    """DCP's index of a checkpoint. Raises ValueError if it is missing or unreadable."""
    try:
        with open(folder / ".metadata", "rb") as file:
            return pickle.load(file)
    except (OSError, EOFError, pickle.UnpicklingError) as problem:
        raise ValueError(f"{folder} is not a complete checkpoint: .metadata cannot be read ({problem})") from problem


def check_complete(folder: Path) -> None:
    """Raise ValueError for the first data file that is shorter than `.metadata` states."""
    needed_bytes: dict[str, int] = {}
    for entry in read_metadata(folder).storage_data.values():
        name = entry.relative_path
        needed_bytes[name] = max(needed_bytes.get(name, 0), entry.offset + entry.length)
    for name, size_bytes in needed_bytes.items():
        path = folder / name
        have_bytes = path.stat().st_size if path.is_file() else 0
        if have_bytes < size_bytes:
            raise ValueError(f"{path} holds {have_bytes} bytes, but .metadata states {size_bytes}")


def superseded(folder: Path, keep_latest: int, keep_every_steps: int) -> list[Path]:
    """Checkpoints that may be deleted, newest first: complete, and older than the `keep_latest` newest complete ones.

    Multiples of keep_every_steps are kept, and so are incomplete folders: one may be being written.
    """
    kept, gone = 0, []
    for step, path in step_folders(folder).items():
        if keep_every_steps and step % keep_every_steps == 0 and kept >= keep_latest:
            continue
        try:
            check_complete(path)
        except ValueError:
            continue
        kept += 1
        if kept > keep_latest:
            gone.append(path)
    return gone


def to_trash(path: Path) -> Path:
    """Rename a checkpoint so that it no longer counts as one; the caller deletes the returned folder."""
    trash = path.with_name(f"{TRASH}{path.name}.{time.time_ns()}")
    path.rename(trash)
    return trash


def clear_branch(folder: Path, start: Path | None) -> dict[str, str]:
    """Move checkpoints newer than `start` away (None: all, the job starts elsewhere). Returns {name: what was done}.

    A newer checkpoint would be overwritten file by file while its old `.metadata` still declares it complete. It is set
    aside; a folder without `.metadata` never was a checkpoint and is deleted, and so is trash left by a crash.
    """
    first = -1 if start is None else int(start.name.removeprefix("step-"))
    done = {}
    for step, path in step_folders(folder).items():
        if step <= first:
            break
        if (path / ".metadata").is_file():
            aside = folder.with_name(f"{folder.name}-aside")
            aside.mkdir(exist_ok=True)
            when = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{time.time_ns() % 10**9:09d}"
            done[path.name] = f"set aside as {path.rename(aside / f'{path.name}.{when}')}"
        else:
            to_trash(path)
            done[path.name] = "deleted: never completed"
    for trash in folder.glob(f"{TRASH}*"):
        shutil.rmtree(trash, ignore_errors=True)
    return done
