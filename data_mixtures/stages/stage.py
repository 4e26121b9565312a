"""The base of all stages: units of work, each with a receipt and restartable after a kill.

A unit's result is the folder DIR/<stage>/<source>/unit-NNNNN/, which appears by one rename with its
receipt.json inside. Results do not depend on the workers: a unit reads only its own inputs.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import resource
import shutil
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import xxhash

from data_mixtures import shards, store
from data_mixtures.recipe import Recipe
from data_mixtures.shards import Json
from records.files import file_sha256, hold_lock, write_json

PLAN, RECEIPT = "plan.json", "receipt.json"
PLAN_FORMAT = 1
RAW = "raw.parquet"  # of fetch
DOCUMENTS = "documents.parquet"  # of filter
AGAIN = "run the same command again: it continues with the unfinished units"
# their message alone says what to do: wrong input, a disk or network
FOR_USERS = ValueError, OSError
T = TypeVar("T")
# of what each stage makes, raised when other code gives other results: a test holds the hashes of
# these. Other code that gives the same results makes nothing again
FORMATS = {
    "benchmarks": 2,
    "fetch": 1,
    "filter": 1,
    "signatures": 3,
    "bands": 2,
    "dedup": 2,
    "held_out": 1,
    "scan": 1,
    "contained": 1,
    "tokenizer": 1,
    "tokenize": 1,
    "runs": 1,
    "order": 1,
    "shuffle": 1,
}


@dataclass(frozen=True, order=True)
class Unit:
    """A piece of work of a source, with the same number in every stage from fetch to tokenize."""

    source: str
    number: int

    def __str__(self) -> str:
        return f"{self.source}/unit-{self.number:05d}"


@dataclass(frozen=True)
class Stage:
    """A stage over the units of some sources."""

    # a stage is sent to worker processes, so it holds plain data only
    name: ClassVar[str]  # of the folder of its results in `out`
    recipe: Recipe
    out: Path
    sources: tuple[str, ...]

    def units(self) -> list[Unit]:
        """Return all units in a fixed order; by default those of the plan."""
        return [unit for source in self.sources for unit in list_units(self.out, source)]

    def result_key(self, unit: Unit) -> str:
        """Return the hash (`key_of`) of everything that the unit's result depends on."""
        raise NotImplementedError

    def make(self, unit: Unit, folder: Path) -> Json:
        """Write the unit's files into the empty `folder`; return the counts for its receipt."""
        raise NotImplementedError


def cache_by_file(read: Callable[[Path], T]) -> Callable[[Path], T]:
    """Cache `read` until a file's time or size changes."""

    @functools.lru_cache(maxsize=4)
    def read_cached(path: Path, mtime_ns: int, size: int) -> T:
        return read(path)

    def latest(path: Path) -> T:
        status = path.stat()
        return read_cached(path, status.st_mtime_ns, status.st_size)

    return latest


# of a large tokenizer.json it takes 0.1 s, and each unit asks
sha256_of = cache_by_file(file_sha256)


def read_plan(out: Path) -> Json:
    """Return plan.json: {"format", "sources": {name: {..., "plan_hash", "units": [...]}}}.

    Raises:
        ValueError: there is no plan.
    """
    if not (path := out / PLAN).is_file():
        raise ValueError(
            f"{path} does not exist; run `python -m data_mixtures plan RECIPE --out {out}`"
        )
    return _read_plan(path)


@cache_by_file
def _read_plan(path: Path) -> Json:
    plan = shards.read_json(path, "delete it and plan again")
    if (plan_format := plan.get("format")) != PLAN_FORMAT:
        raise ValueError(
            f"{path} has format {plan_format!r}, this code reads {PLAN_FORMAT}; delete it, plan again"
        )
    return plan


def find_plan(out: Path, source: str) -> Json:
    """Return the plan of a source; ValueError if there is none."""
    if source not in (sources := read_plan(out)["sources"]):
        raise ValueError(
            f"{out / PLAN} lacks source {source!r}; plan it: python -m data_mixtures plan"
        )
    return sources[source]


def list_units(out: Path, source: str) -> list[Unit]:
    return [Unit(source, entry["number"]) for entry in find_plan(out, source)["units"]]


def group_size(units: int, most: int, largest: int) -> int:
    """Return the units per group for about `most` groups, at most `largest`."""
    return max(min(-(-units // most), largest), 1)


def find_unit_plan(out: Path, unit: Unit) -> Json:
    return find_plan(out, unit.source)["units"][unit.number]


def unit_folder(out: Path, made_by: str, unit: Unit) -> Path:
    return out / made_by / str(unit)


def key_of(name: str, *parts: Any) -> str:
    """Return the sha256 (hex) of a stage's name, format and parts."""
    content = json.dumps([name, FORMATS[name], *parts], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()


@functools.cache
def code_sha256() -> str:
    # receipts record which code made a unit; it decides nothing
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def read_receipt(out: Path, made_by: str, unit: Unit) -> Json | None:
    """Return a unit's {"key", "code", "files": {name: {"bytes", "xxh3"}}, "counts"[, "freed"]}, or None."""
    path = unit_folder(out, made_by, unit) / RECEIPT
    if remote := store.of(out):
        remote.pull(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return None


def receipt_of(out: Path, made_by: str, unit: Unit) -> Json:
    """Return the receipt of a finished unit; ValueError if it is unfinished."""
    if (receipt := read_receipt(out, made_by, unit)) is None:
        raise ValueError(
            f"{out}: {unit} has not been through {made_by!r} yet; run that stage first"
        )
    return receipt


def receipts(out: Path, made_by: str, source: str, count: int | None = None) -> tuple[Json, ...]:
    """Return the receipts of a source's first `count` units (default: all); ValueError if one is missing."""
    folder = out / made_by / source
    if remote := store.of(out):
        remote.read_receipts(folder)
    # a unit appears by a rename in this folder, so its time tells when receipts must be read again
    changed_ns = folder.stat().st_mtime_ns if folder.is_dir() else 0
    count = len(list_units(out, source)) if count is None else count
    return _receipts(out, made_by, source, count, changed_ns)


@functools.lru_cache(maxsize=256)
def _receipts(
    out: Path, made_by: str, source: str, count: int, changed_ns: int
) -> tuple[Json, ...]:
    return tuple(receipt_of(out, made_by, Unit(source, number)) for number in range(count))


def counts(out: Path, made_by: str, source: str, count: int | None = None) -> list[Json]:
    return [receipt["counts"] for receipt in receipts(out, made_by, source, count)]


def result(out: Path, made_by: str, unit: Unit) -> tuple[Path, Json]:
    """Return folder and receipt of a finished unit; ValueError if it is unfinished or freed."""
    receipt = receipt_of(out, made_by, unit)
    folder = unit_folder(out, made_by, unit)
    if receipt.get("freed"):
        raise ValueError(
            f"{folder} was freed, and is needed again; remove it (or all of {folder.parent}) and run {made_by!r} again"
        )
    if remote := store.of(out):
        for name in receipt["files"]:
            if name.endswith(".json"):
                remote.pull(folder / name)
    return folder, receipt


def check_file(out: Path, made_by: str, unit: Unit, name: str) -> Path:
    """Return the path of a finished unit's file after comparing its bytes with the receipt.

    Raises:
        ValueError: they differ; the unit then counts as not done.
    """
    folder, receipt = result(out, made_by, unit)
    path = folder / name
    expected = receipt["files"][name]
    if remote := store.of(out):
        remote.pull(path)
    entry = _entry(path) if path.is_file() else {"bytes": 0, "xxh3": "none"}
    if entry == expected:
        return path
    # a link of a mirror's file stays: the next start would take over what that file holds now
    if made_by == "fetch" and path.is_file() and path.stat().st_nlink > 1:
        fix = f"It is a link of a mirror's file: restore that one, or remove {folder} to read it as it is now"
    else:
        forget(out, made_by, unit)
        fix = "Was it changed, or does a disk or memory fail? Start again: the unit is then made again"
    raise ValueError(
        f"{path} is not what {made_by!r} wrote: {entry['bytes']} bytes with xxh3 {entry['xxh3']}, its receipt says "
        f"{expected['bytes']} with {expected['xxh3']}. {fix}"
    )


def forget(out: Path, made_by: str, unit: Unit) -> None:
    """Mark a unit as not done."""
    folder = unit_folder(out, made_by, unit)
    if folder.is_dir():
        (folder / RECEIPT).unlink(missing_ok=True)
        # the folder's time tells readers that receipts changed
        os.utime(folder.parent)
    if remote := store.of(out):
        remote.remove([folder / RECEIPT])


def is_done(work: Stage, unit: Unit) -> bool:
    """Return whether the unit's result is complete and has its current key."""
    # the key covers the receipts of the previous stage, so a change cascades, and a restart repeats
    # only what was lost
    receipt = read_receipt(work.out, work.name, unit)
    if receipt is None or receipt["key"] != work.result_key(unit):
        return False
    # a store loses no file
    if receipt.get("freed") or store.of(work.out):
        return True
    folder = unit_folder(work.out, work.name, unit)
    files = ((folder / name, entry["bytes"]) for name, entry in receipt["files"].items())
    return all(path.is_file() and path.stat().st_size == size for path, size in files)


def free(out: Path, made_by: str, unit: Unit) -> int:
    """Delete a finished unit's files except JSON; return the bytes freed."""
    receipt = receipt_of(out, made_by, unit)
    folder = unit_folder(out, made_by, unit)
    # the receipt first: after a kill in between, no receipt lists a file that is gone
    write_json(folder / RECEIPT, {**receipt, "freed": True})
    files = receipt["files"].items()
    large = {folder / name: entry["bytes"] for name, entry in files if not name.endswith(".json")}
    if remote := store.of(out):
        remote.put(folder / RECEIPT)
        remote.remove(large)
    for path in large:
        path.unlink(missing_ok=True)
    return 0 if receipt.get("freed") else sum(large.values())


@contextmanager
def exclusive(out: Path) -> Iterator[Path]:
    """Lock a folder or URL for one preparation; yield the folder to work in.

    Raises:
        ValueError: another process is preparing it.
    """
    # workers inherit it: all runs of a source are open at a time
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    problem = f"another process is preparing {out}; wait for it, or use another --out"
    if url := store.url_of(out):
        with store.open_copy(url) as copy:
            yield copy
    else:
        with hold_lock(out / ".lock", problem):
            yield out


def remove_partial(out: Path, made_by: str) -> None:
    """Delete what killed runs of this stage left; only in `exclusive`."""
    for path in (*(out / made_by).glob("*/.*.partial"), *(out / made_by).glob("*/.*.old")):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def do(work: Stage, unit: Unit) -> None:
    # work in a folder of another name; the rename at the end makes the result appear at once
    final = unit_folder(work.out, work.name, unit)
    partial = final.with_name(f".{final.name}.{uuid.uuid4().hex}.partial")
    partial.mkdir(parents=True)
    try:
        counts = work.make(unit, partial)
        files = {path.name: _entry(path, sync=True) for path in sorted(partial.iterdir())}
        receipt = {
            "key": work.result_key(unit),
            "code": code_sha256(),
            "files": files,
            "counts": counts,
        }
        write_json(partial / RECEIPT, receipt)
        shards.publish(partial, final)
        if remote := store.of(work.out):
            remote.push(final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def attempt_unit(work: Stage, unit: Unit, place: store.Place | None = None) -> Json | None:
    """Do one unit and return what went wrong, or None.

    Args:
        place: the store that holds the data, if this process has no folder of it.
    """
    try:
        if place is not None:
            work = replace(work, out=store.workers_copy(place))
        # a worker that was lost may have left its receipt
        if not is_done(work, unit):
            do(work, unit)
    # failures are returned as plain data, since not every exception can be pickled
    except FOR_USERS as error:
        return {"user": True, "message": f"{work.name} {unit}: {error}"}
    except Exception:
        return {"user": False, "message": f"{work.name} {unit} failed:\n{traceback.format_exc()}"}
    return None


def _entry(path: Path, sync: bool = False) -> Json:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_128)
        if sync:
            # the bytes must be on disk before the rename that says so
            os.fsync(file.fileno())
        return {"bytes": file.tell(), "xxh3": digest.hexdigest()}
