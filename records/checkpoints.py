"""Checkpoint folders on disk: which are complete, which may be deleted, and how one is moved out of the way.

checkpoint/step-N           complete once `.metadata` exists and every data file has the size that it states; beside
                            them model.json, the architecture, and checksums.json, the SHA-256 of every file
checkpoint/.trash-*         being deleted: renamed first, so that a half-deleted one never looks complete
checkpoint-aside/step-N.T   damaged, or abandoned by a rollback; kept for inspection, never overwritten
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import pickle
import re
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from records.files import JsonObject, file_sha256, read_json, write_atomically

BYTES_PER_PARAMETER = 12  # float32: the weight, and AdamW's two moments
STEP_FOLDER = re.compile(r"step-(\d+)$")
# any of these makes a run folder
RUN_FILES = ("config.toml", "model.json", "lineage.json", "metrics.jsonl")
TRASH = ".trash-"
CHECKSUMS, ARCHITECTURE = "checksums.json", "model.json"
logger = logging.getLogger()


def step_folders(folder: Path) -> dict[int, Path]:
    """Return {N: path} of every `step-N`, complete or not, newest first."""
    # by number: as text, step-100 would come before step-20
    paths = [path for path in folder.glob("step-*") if STEP_FOLDER.match(path.name)]
    return {step_of(path): path for path in sorted(paths, key=step_of, reverse=True)}


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def locate_checkpoint(checkpoint: Path) -> Path:
    """Return RUN/checkpoint/step-N as an absolute path within its run."""
    # any part may be a link: the path as given, or, where that lies in no run, as links lead
    plain = Path(os.path.abspath(checkpoint))
    real = checkpoint.resolve()
    return real if _is_in_run(real) and not _is_in_run(plain) else plain


def _is_in_run(checkpoint: Path) -> bool:
    run = checkpoint.parent.parent
    return bool(STEP_FOLDER.match(checkpoint.name)) and any(
        (run / name).is_file() for name in RUN_FILES
    )


def run_folder(checkpoint: Path) -> Path:
    """Return a checkpoint's run folder, which need not exist."""
    return locate_checkpoint(checkpoint).parent.parent


def check_is_checkpoint(folder: Path) -> None:
    """Raise ValueError for what is no RUN/checkpoint/step-N, with the steps that the run has."""
    if (folder / ".metadata").is_file():
        return
    # of a run, of its checkpoints, of a step beside this one
    places = (folder / "checkpoint", folder, folder.parent)
    paths = next(filter(None, map(step_folders, places)), {}).values()
    have = f"; there are {', '.join(map(str, paths))}" if paths else ""
    raise ValueError(f"{folder} is no checkpoint; give RUN/checkpoint/step-N{have}")


def newest_saved_step(folder: Path) -> int:
    """Return the newest step whose save has finished (`.metadata` is written last), or -1."""
    return next(
        (step for step, path in step_folders(folder).items() if (path / ".metadata").is_file()), -1
    )


def newest_complete_checkpoint(folder: Path, damaged: Iterable[Path] = ()) -> Path | None:
    """Find the newest complete `step-N` folder; None if there is none yet.

    Args:
        damaged: complete ones that are not to be used.

    Raises:
        ValueError: there are several checkpoints, and all are damaged.
    """
    steps = step_folders(folder)
    # a checkpoint that is still being saved is incomplete, too: the one before it is used
    for path in steps.values():
        if path not in damaged:
            try:
                check_complete(path)
                return path
            except ValueError as problem:
                logger.warning(f"Skipping a checkpoint: {problem}")
    saved = [path for path in steps.values() if (path / ".metadata").is_file()]
    # a disk problem, not a new run
    if saved and len(steps) > 1:
        raise ValueError(
            f"all {len(steps)} checkpoints in {folder} are incomplete or damaged; repair or move them away before "
            "starting again"
        )
    return None


def read_metadata(folder: Path) -> Any:
    """Read DCP's index of a checkpoint; ValueError if it is missing or damaged."""
    try:
        content = (folder / ".metadata").read_bytes()
        expected = read_checksums(folder).get(".metadata")
        # a damaged pickle is an arbitrary program for its reader: any exception may come, and C's unpickler allocates
        # what a flipped bit asks for; without a checksum, Python's reader is used, whose memory is a dict
        if expected is None:
            return pickle._Unpickler(io.BytesIO(content)).load()
        if hashlib.sha256(content).hexdigest() != expected:
            raise ValueError(f"its SHA-256 is not the one in {CHECKSUMS}")
        return pickle.loads(content)
    except Exception as problem:
        what = f"{type(problem).__name__}: {problem}"
        raise ValueError(
            f"{folder} is not a complete checkpoint: .metadata cannot be read ({what})"
        ) from problem


def check_complete(folder: Path) -> None:
    """Raise ValueError for the first data file that is shorter than `.metadata` states."""
    needed_bytes: dict[str, int] = {}
    try:
        for entry in read_metadata(folder).storage_data.values():
            name = str(entry.relative_path)
            needed_bytes[name] = max(needed_bytes.get(name, 0), int(entry.offset + entry.length))
        sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    except (AttributeError, TypeError) as problem:
        raise ValueError(
            f"{folder} is not a complete checkpoint: .metadata is damaged ({problem})"
        ) from problem
    except OSError as problem:
        raise ValueError(f"{folder} is being deleted, or cannot be read: {problem}") from problem
    for name, size_bytes in needed_bytes.items():
        if (have_bytes := sizes.get(name, 0)) < size_bytes:
            raise ValueError(
                f"{folder / name} holds {have_bytes} bytes, but .metadata states {size_bytes}"
            )


def read_checksums(folder: Path) -> dict[str, str]:
    """Return {file name: SHA-256}; {} if none were written. ValueError if they are damaged."""
    sums = read_json(folder / CHECKSUMS, {})
    if not isinstance(sums, dict):
        raise ValueError(f"{folder / CHECKSUMS} is damaged")
    return sums


def check_contents(folder: Path, part: int = 0, parts: int = 1) -> None:
    """Raise ValueError for the first file whose SHA-256 is not the one that was saved.

    Args:
        part: of `parts`; every rank reads its share of the files.
    """
    sums = read_checksums(folder)
    if not sums and part == 0:
        logger.warning(f"{folder} has no {CHECKSUMS}: its contents cannot be checked")
    # every rank reads a share: a 2B model has 24 GB (BYTES_PER_PARAMETER)
    for name in sorted(sums)[part::parts]:
        try:
            actual = file_sha256(folder / name)
        except OSError as problem:
            raise ValueError(f"{folder / name} cannot be read: {problem}") from problem
        if actual != sums[name]:
            raise ValueError(
                f"{folder / name} is damaged: its SHA-256 is {actual[:12]}, saved was {sums[name][:12]}"
            )


def write_checksums(folder: Path) -> None:
    """Write the checksums of a complete checkpoint that `train` has not saved."""
    sums = {
        path.name: file_sha256(path) for path in (*folder.glob("*.distcp"), folder / ".metadata")
    }
    write_atomically(folder / CHECKSUMS, json.dumps(sums, indent=0, sort_keys=True) + "\n")


def read_architecture(checkpoint: Path) -> JsonObject | None:
    """Read the model's config from the checkpoint, else from its run folder; None if neither has it."""
    config = read_json(checkpoint / ARCHITECTURE)
    return config or read_json(run_folder(checkpoint) / ARCHITECTURE)


def list_superseded(folder: Path, keep_latest: int, keep_every_steps: int) -> list[Path]:
    """List the checkpoints that may be deleted, newest first."""
    # incomplete folders stay: one may be being written
    complete = 0
    removable = []
    for step, path in step_folders(folder).items():
        # a permanent checkpoint among the newest ones counts as one of keep_latest
        if keep_every_steps and step % keep_every_steps == 0 and complete >= keep_latest:
            continue
        try:
            check_complete(path)
        except ValueError:
            continue
        complete += 1
        if complete > keep_latest:
            removable.append(path)
    return removable


def to_trash(path: Path) -> Path:
    """Rename a checkpoint so that it no longer counts as one; the caller deletes the returned folder."""
    trash = path.with_name(f"{TRASH}{path.name}.{time.time_ns()}")
    path.rename(trash)
    return trash


def clear_branch(folder: Path, start: Path | None) -> dict[str, str]:
    """Move checkpoints newer than `start` away (None: all of them).

    Returns:
        {name: what was done}.
    """
    first = -1 if start is None else step_of(start)
    # a newer checkpoint would be overwritten file by file while its old `.metadata` still declares it complete
    removals = {}
    for step, path in step_folders(folder).items():
        if step <= first:
            break
        if (path / ".metadata").is_file():
            aside = folder.with_name(f"{folder.name}-aside")
            aside.mkdir(exist_ok=True)
            # nanoseconds keep apart two that are moved aside within one second
            when = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{time.time_ns() % 10**9:09d}"
            removals[path.name] = f"set aside as {path.rename(aside / f'{path.name}.{when}')}"
        else:
            to_trash(path)
            removals[path.name] = "deleted: never completed"
    for trash in folder.glob(f"{TRASH}*"):
        shutil.rmtree(trash, ignore_errors=True)
    return removals
