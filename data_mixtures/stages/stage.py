"""Stages: the way from text to shards in units of work, each with a receipt, each restartable after any kill.

A unit's result is a folder, DIR/<stage>/<source>/unit-NNNNN/, that appears by one rename with its receipt.json inside:
either it is whole or it is not there. The receipt holds the key (a hash of everything that the result depends on, the
receipts of the stage before included), the size and hash of every file, and the counts. A unit whose receipt has the
right key and whose files have their sizes is not done again; so a change cascades, and a restart costs what was lost.
Results do not depend on how many workers there are: a unit sees its own inputs only. `execute` runs what is not done.

The files of a unit can be freed when the stage after it is through: the receipt stays and says so.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import xxhash

from data_mixtures import shards

RECEIPT = "receipt.json"


@dataclass(frozen=True, order=True)
class Unit:
    """One piece of work of a source; its number is the same in every stage from fetch to tokenize."""

    source: str
    number: int

    def __str__(self) -> str:
        return f"{self.source}/unit-{self.number:05d}"


class Stage(Protocol):
    """One stage over all its units. An object is sent to worker processes, so it holds plain data only."""

    @property
    def name(self) -> str:
        """The folder of its results below `out`."""

    @property
    def out(self) -> Path:
        """The data folder."""

    def units(self) -> list[Unit]:
        """All units, in a fixed order."""

    def key(self, unit: Unit) -> str:
        """A hash of everything that the result depends on: `key_of(modules, parameters, upstream receipts)`."""

    def work(self, unit: Unit, folder: Path) -> dict[str, Any]:
        """Write the unit's files into `folder` (fresh, will be renamed); returns the counts for its receipt."""


def unit_folder(out: Path, stage: str, unit: Unit) -> Path:
    return out / stage / str(unit)


def key_of(modules: Iterable[str], *parts: Any) -> str:
    """sha256 (hex) over the source text of modules of this package and JSON-able parts."""
    code = [_code_hash(name) for name in modules]
    return hashlib.sha256(json.dumps([code, *parts], sort_keys=True, default=str).encode()).hexdigest()


@functools.cache
def _code_hash(module: str) -> str:
    return hashlib.sha256((Path(__file__).parents[1] / module).read_bytes()).hexdigest()


def read_receipt(out: Path, stage: str, unit: Unit) -> dict[str, Any] | None:
    """{"key", "files": {name: {"bytes", "xxh3"}}, "counts"[, "freed"]} of a finished unit, None when there is none."""
    try:
        return json.loads((unit_folder(out, stage, unit) / RECEIPT).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return None


def result(out: Path, stage: str, unit: Unit) -> tuple[Path, dict[str, Any]]:
    """The folder and the receipt of a finished unit. ValueError when that stage has not done it, or was freed."""
    receipt, folder = read_receipt(out, stage, unit), unit_folder(out, stage, unit)
    if receipt is None:
        raise ValueError(f"{out}: {unit} has not been through {stage!r} yet; run that stage first")
    if receipt.get("freed"):
        raise ValueError(f"{folder} was freed, and is needed again; remove {folder.parent} and run {stage!r} again")
    return folder, receipt


def is_done(stage: Stage, unit: Unit) -> bool:
    """Whether the unit's result is there, whole, and made from what `key` says."""
    receipt = read_receipt(stage.out, stage.name, unit)
    if receipt is None or receipt["key"] != stage.key(unit):
        return False
    if receipt.get("freed"):
        return True
    folder = unit_folder(stage.out, stage.name, unit)
    sizes = {name: entry["bytes"] for name, entry in receipt["files"].items()}
    return all((folder / name).is_file() and (folder / name).stat().st_size == sizes[name] for name in sizes)


def free(out: Path, stage: str, unit: Unit) -> int:
    """Delete the files of a finished unit, not its receipt and small JSON; returns the bytes that became free."""
    receipt, folder = read_receipt(out, stage, unit), unit_folder(out, stage, unit)
    assert receipt is not None, f"{unit} of {stage} is not finished, so there is nothing to free"
    # the receipt first: whatever kill comes between, no file is missed that is said to be there
    shards.write_json(folder / RECEIPT, {**receipt, "freed": True})
    there = [folder / name for name in receipt["files"] if (folder / name).is_file() and not name.endswith(".json")]
    freed = sum(path.stat().st_size for path in there)
    for path in there:
        path.unlink()
    return freed


@contextmanager
def exclusive(out: Path) -> Iterator[None]:
    """One preparation per folder at a time. ValueError when there is another."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(f"another process is preparing {out}; wait for it, or use another --out") from error
        yield


def remove_partial(out: Path, stage: str) -> None:
    """What killed runs of this stage left behind; only in `exclusive`."""
    for left in (*(out / stage).glob("*/.*.partial"), *(out / stage).glob("*/.*.old")):
        shutil.rmtree(left) if left.is_dir() else left.unlink()


def do(stage: Stage, unit: Unit) -> None:
    """One unit: work into a folder of another name, add the receipt, rename."""
    final = unit_folder(stage.out, stage.name, unit)
    partial = final.with_name(f".{final.name}.{uuid.uuid4().hex}.partial")
    partial.mkdir(parents=True)
    try:
        counts = stage.work(unit, partial)
        files = {path.name: _entry(path) for path in sorted(partial.iterdir())}
        shards.write_json(partial / RECEIPT, {"key": stage.key(unit), "files": files, "counts": counts})
        shards.publish(partial, final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _entry(path: Path) -> dict[str, Any]:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            digest.update(block)
        os.fsync(file.fileno())  # before the rename that says it is there
    return {"bytes": path.stat().st_size, "xxh3": digest.hexdigest()}
