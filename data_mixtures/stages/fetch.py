"""fetch: DIR/plan.json -> DIR/fetch/<source>/unit-NNNNN/raw.parquet, checked against what was planned.

Files of a hub dataset keep their bytes: size and sha256 must be the planned ones, the Parquet must open, its text must
be in the planned column. Local files go through `readers` into one column of text; what these leave out is counted.
"""

from __future__ import annotations

import errno
import random
import shutil
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from huggingface_hub import errors as hub_errors

from data_mixtures.readers import content, hub, local
from data_mixtures.recipe import HubSource, Input, LocalSource, Recipe
from data_mixtures.stages import plan, stage
from data_mixtures.stages.stage import RAW, Entry, Stage, Unit, is_done, key_of
from records.files import file_sha256

TEXT_SCHEMA = pyarrow.schema([("text", pyarrow.string())])
ROW_GROUP_BYTES = 8 << 20
ATTEMPTS = 5
FIRST_WAIT_S = 2.0  # doubled with every attempt, with random jitter, so that workers do not retry at the same time
_READERS = ("stages/fetch.py", "readers/local.py")


class Damaged(ValueError):
    """A file that is not what was planned."""


@dataclass(frozen=True)
class Fetch(Stage):
    """One unit: one Parquet file of the hub or of its mirror, or a group of local files."""

    name = "fetch"
    mirror: str | None = None

    def key(self, unit: Unit) -> str:
        entry = stage.planned_unit(self.out, unit)
        if entry["kind"] == "local":
            return key_of(_READERS, entry)
        if entry["kind"] == "resolved":  # wherever the contents come from, they are the same
            return key_of((), entry["files"], entry["rows"])
        described = stage.planned(self.out, unit.source)
        return key_of((), described["repo"], described["revision"], entry)

    def work(self, unit: Unit, folder: Path) -> dict[str, Any]:
        entry = stage.planned_unit(self.out, unit)
        if entry["kind"] == "local":
            return _read_local(entry, folder / RAW)
        if entry["kind"] == "resolved":
            self.remove_parts()
            (path, _, _), (first, count) = entry["files"][0], entry["rows"]
            parts = folder.parent / f".unit-{unit.number:05d}.parts"
            return content.fetch(path, first, count, _input(entry), folder / RAW, parts)
        return self._download(unit, entry, folder / RAW)

    def remove_parts(self) -> None:
        """Delete contents that are in the files of finished units by now."""
        for source in self.sources:
            for folder in (self.out / self.name / source).glob(".unit-*.parts"):
                if is_done(self, Unit(source, int(folder.name[6:11]))):
                    shutil.rmtree(folder, ignore_errors=True)

    def _download(self, unit: Unit, entry: Entry, target: Path) -> dict[str, Any]:
        described = stage.planned(self.out, unit.source)
        wanted = next(each for each in self.recipe.sources if each.name == unit.source)
        assert isinstance(wanted, HubSource), f"{unit} is planned as a Parquet file, its source is not of the hub"
        origin, attempt = hub.origin(self.mirror), 0
        while True:
            try:
                origin.fetch(described["repo"], described["revision"], entry["path"], target)
                rows = check(target, entry, wanted, f"{described['repo']}/{entry['path']}")
                return {"documents": rows, "bytes": entry["bytes"]}
            except Exception as error:
                target.unlink(missing_ok=True)
                attempt += 1
                if attempt == ATTEMPTS or not origin.remote or not _is_transient(error):
                    raise _for_users(error, described, entry) from error
                time.sleep(FIRST_WAIT_S * 2 ** (attempt - 1) * random.uniform(0.5, 1))

    def check_room(self, budget_bytes: int | None) -> None:
        """Refuse before anything is read what would pass the budget (of all that DIR/fetch holds) or the disk."""
        todo: Counter[str] = Counter()
        held = 0
        for unit in self.units():
            if is_done(self, unit):
                receipt = stage.receipt_of(self.out, self.name, unit)
                held += 0 if receipt.get("freed") else sum(entry["bytes"] for entry in receipt["files"].values())
            else:
                todo[unit.source] += stage.planned_unit(self.out, unit).get("bytes", 0)
        need, listed = sum(todo.values()), ", ".join(f"{name} {size:,}" for name, size in todo.items())
        if budget_bytes is not None and held + need > budget_bytes:
            raise ValueError(
                f"{held:,} bytes are fetched and {need:,} are to come ({listed}), more than --budget-bytes "
                f"{budget_bytes:,}; fetch fewer --sources at a time, and `free` what the next stage has read"
            )
        linked = self.mirror is not None and not hub.origin(self.mirror).remote
        free = shutil.disk_usage(self.out).free
        if not linked and need > free:
            raise ValueError(
                f"{need:,} bytes are to be fetched ({listed}), but {self.out} has {free:,} bytes of free disk"
            )


def check(path: Path, entry: Entry, wanted: HubSource, where: str) -> int:
    """A fetched file against its plan; returns its rows. Damaged says what differs."""
    size = path.stat().st_size
    if size != entry["bytes"]:
        raise Damaged(f"{where} came with {size:,} bytes, the plan says {entry['bytes']:,}: truncated, or another file")
    if entry["sha256"] is not None and (found := file_sha256(path)) != entry["sha256"]:
        raise Damaged(f"{where} came with sha256 {found}, the plan says {entry['sha256']}")
    try:
        with pyarrow.parquet.ParquetFile(path) as parquet:
            schema, rows = parquet.schema_arrow, parquet.metadata.num_rows
    except pyarrow.ArrowInvalid as error:
        raise Damaged(f"{where} is not a complete Parquet file ({error}): truncated, or another file") from error
    if (column := plan.text_column(schema, wanted, where)) != entry["text_column"]:
        raise Damaged(f"{where} has its text in the column {column!r}, the plan says {entry['text_column']!r}")
    return rows


def _is_transient(error: Exception) -> bool:
    """Whether another attempt may succeed: after network errors and damaged transfers, not a refusal or a full disk."""
    if isinstance(error, hub_errors.HfHubHTTPError):
        return error.response.status_code not in (401, 403, 404)
    if isinstance(error, FileNotFoundError | PermissionError | hub_errors.EntryNotFoundError):
        return False
    return getattr(error, "errno", None) not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _for_users(error: Exception, described: Entry, entry: Entry) -> Exception:
    where = f"{described['repo']}/{entry['path']} @ {described['revision']}"
    if isinstance(error, FileNotFoundError | hub_errors.EntryNotFoundError):
        return ValueError(
            f"{where} is planned and no longer there; has the mirror changed? Delete plan.json and plan again"
        )
    if isinstance(error, Damaged) or getattr(error, "errno", None) is not None:
        return error
    return ValueError(f"{where}: {type(error).__name__}: {error}")


def _input(entry: Entry) -> Input:
    given = entry["input"]
    return Input(**{**given, "paths": tuple(given["paths"]), "exclude": tuple(given["exclude"])})


def _read_local(entry: Entry, target: Path) -> dict[str, Any]:
    source_input = _input(entry)
    dropped: Counter[str] = Counter()
    documents, size = 0, 0
    paths = [Path(path) for path, _, _ in entry["files"]]
    texts = local.documents(source_input, paths, dropped)
    with pyarrow.parquet.ParquetWriter(target, TEXT_SCHEMA, compression="zstd") as writer:
        try:
            for batch in stage.grouped(texts, len, ROW_GROUP_BYTES):
                writer.write_batch(pyarrow.record_batch([batch], schema=TEXT_SCHEMA))
                documents += len(batch)
                size += sum(len(text.encode()) for text in batch)
        except FileNotFoundError as error:
            raise ValueError(
                f"{error.filename} is planned and no longer there; start again, which lists the files again"
            ) from error
    return {"documents": documents, "bytes": size, "dropped": dict(sorted(dropped.items()))}


def check_enough(recipe: Recipe, out: Path, sources: tuple[str, ...]) -> None:
    """ValueError names the first source without enough text, which a run would soon repeat."""
    for each in recipe.sources:
        if each.name not in sources:
            continue
        counts = [receipt["counts"] for receipt in stage.receipts(out, "fetch", each.name)]
        total = sum(count["bytes"] for count in counts)
        if isinstance(each, LocalSource) and total < each.min_bytes:
            kinds = [f"{i.kind}: {len(local.find(i, local.roots(out, recipe.folder)))} files" for i in each.inputs]
            raise ValueError(
                f"source {each.name!r} found {total} bytes of text on this machine ({', '.join(kinds)}), it needs at "
                f"least min_bytes = {each.min_bytes}; add paths with such text to its inputs, or lower min_bytes"
            )
        if isinstance(each, HubSource) and not sum(count["documents"] for count in counts):
            raise ValueError(f"source {each.name!r} has {len(counts)} files of {each.repo}, and not one row in them")
