"""fetch: DIR/plan.json -> DIR/fetch/<source>/unit-NNNNN/raw.parquet, checked against the plan.

Parquet files keep their bytes. Text and JSON lines become two columns, text and origin; what the
`readers` leave out is counted.
"""

from __future__ import annotations

import errno
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import fsspec
import pyarrow
import pyarrow.parquet
from huggingface_hub import errors as hub_errors

from data_mixtures import store
from data_mixtures.readers import content, hub, local
from data_mixtures.readers.columns import encode_origin, origin_columns
from data_mixtures.readers.unpack import open_input
from data_mixtures.recipe import HubSource, Input, LocalSource, Recipe
from data_mixtures.shards import Json
from data_mixtures.stages import plan, stage
from data_mixtures.stages.stage import RAW, Stage, Unit, is_done, key_of
from records.files import file_sha256

TEXT_SCHEMA = pyarrow.schema([("text", pyarrow.string()), ("origin", pyarrow.string())])
ROW_GROUP_BYTES = 8 << 20
NAMES_SHOWN = 20  # of lost files, on a screen
ATTEMPTS = 5
FIRST_WAIT_S = 2.0  # doubled with every attempt


class DiffersFromPlan(ValueError):
    """A file that was fetched differs from its plan; another attempt may bring the right bytes."""


@dataclass(frozen=True)
class Fetch(Stage):
    """The stage `fetch`."""

    # a unit is a Parquet file or row groups of it, a group of files of text or JSON lines, or a
    # part of one such file
    name = "fetch"
    mirror: str | None = None

    def result_key(self, unit: Unit) -> str:
        entry = stage.find_unit_plan(self.out, unit)
        if entry["kind"] == "local":
            return key_of(self.name, entry, self._portable(entry))
        # contents are named by their hash: the same wherever they come from
        if entry["kind"] == "resolved":
            return key_of(self.name, entry["files"], entry["row_groups"])
        described = stage.find_plan(self.out, unit.source)
        return key_of(self.name, described.get("repo"), described.get("revision"), entry)

    def _portable(self, entry: Json) -> dict[str, str]:
        roots = local.roots(self.out, self.recipe.folder)
        return {name: local.portable(name, roots) for name, _, _ in entry["files"]}

    def make(self, unit: Unit, folder: Path) -> Json:
        entry = stage.find_unit_plan(self.out, unit)
        target = folder / RAW
        if entry["kind"] == "resolved":
            return self._fetch_contents(unit, entry, target)
        if entry["kind"] == "local":
            remote = any("://" in name for name, _, _ in entry["files"])
            return _retry(lambda: _read_local(entry, target, self._portable(entry)), target, remote)
        if "file" in entry:
            copy = _copy_groups if "row_groups" in entry else _copy
            return _retry(lambda: copy(entry, target), target, "://" in entry["file"][0])
        return self._download(stage.find_plan(self.out, unit.source), entry, target)

    def _fetch_contents(self, unit: Unit, entry: Json, target: Path) -> Json:
        local.check_unchanged(entry["files"])
        self.remove_parts()
        parts = target.parents[1] / f".unit-{unit.number:05d}.parts"
        content.take_over(stage.unit_folder(self.out, self.name, unit) / RAW, parts)
        ((path, name),) = self._portable(entry).items()
        return content.fetch(
            path, name, entry["row_groups"], Input(**entry["input"]), target, parts
        )

    def _download(self, planned: Json, entry: Json, target: Path) -> Json:
        host = hub.connect(self.mirror)
        repo = planned["repo"]
        revision = planned["revision"]
        where = f"{repo}/{entry['path']}"

        def download() -> Json:
            host.fetch(repo, revision, entry["path"], target)
            return check(target, entry, where)

        try:
            return _retry(download, target, host.remote)
        except (FileNotFoundError, hub_errors.EntryNotFoundError) as error:
            gone = f"{where} @ {revision} is planned and no longer there"
            raise ValueError(
                f"{gone}; has the mirror changed? Delete plan.json and plan again"
            ) from error
        except hub_errors.HfHubHTTPError as error:
            raise ValueError(f"{where} @ {revision}: {error}") from error

    def remove_parts(self) -> None:
        for source in self.sources:
            for folder in (self.out / self.name / source).glob(".unit-*.parts"):
                if is_done(self, Unit(source, int(folder.name[6:11]))):
                    shutil.rmtree(folder, ignore_errors=True)

    def check_room(self, budget_bytes: int | None) -> None:
        """Raise ValueError if the units to fetch exceed the budget or the free disk."""
        fetched_bytes = needed_bytes = linked_bytes = 0
        linked = self.mirror is not None and not hub.connect(self.mirror).remote
        for unit in self.units():
            entry = stage.find_unit_plan(self.out, unit)
            if is_done(self, unit):
                receipt = stage.receipt_of(self.out, self.name, unit)
                fetched_bytes += (
                    0
                    if receipt.get("freed")
                    else sum(file["bytes"] for file in receipt["files"].values())
                )
                continue
            needed_bytes += entry.get("bytes", 0)
            if linked or "://" not in entry.get("file", ["://"])[0]:
                linked_bytes += entry.get("bytes", 0)
        if budget_bytes is not None and fetched_bytes + needed_bytes > budget_bytes:
            raise ValueError(
                f"{fetched_bytes:,} bytes are fetched and {needed_bytes:,} are to come, more than --budget-bytes "
                f"{budget_bytes:,}; fetch fewer --sources at a time, and `free` what the next stage has read"
            )
        free = shutil.disk_usage(self.out).free
        if store.of(self.out) is None and needed_bytes - linked_bytes > free:
            raise ValueError(
                f"{needed_bytes - linked_bytes:,} bytes are to be fetched, but {self.out} has {free:,} "
                "bytes of free disk"
            )


def _retry(work: Callable[[], Json], target: Path, remote: bool) -> Json:
    attempt = 1
    while True:
        try:
            return work()
        except Exception as error:
            target.unlink(missing_ok=True)
            if attempt == ATTEMPTS or not remote or not _is_transient(error):
                raise
        # with random jitter, so that workers do not ask together
        time.sleep(FIRST_WAIT_S * 2 ** (attempt - 1) * random.uniform(0.5, 1))
        attempt += 1


def _copy(entry: Json, target: Path) -> Json:
    local.check_unchanged([entry["file"]])
    system, name = fsspec.url_to_fs(entry["file"][0])
    hub.copy_or_link(system, name, target)
    return check(target, entry, entry["file"][0])


def _copy_groups(entry: Json, target: Path) -> Json:
    """Copy row groups of a Parquet file: text and columns of the origin."""
    name = entry["file"][0]
    rows = 0
    local.check_unchanged([entry["file"]])
    with (
        _complete(name),
        open_input(name) as file,
        pyarrow.parquet.ParquetFile(file) as parquet,
    ):
        schema = parquet.schema_arrow
        plan.text_column(schema, (entry["text_column"],), name)
        columns = entry["text_column"], *origin_columns(schema)
        chosen = [column for column in schema.names if column in columns]
        plain = pyarrow.schema([schema.field(column) for column in chosen])
        with pyarrow.parquet.ParquetWriter(target, plain, compression="zstd") as writer:
            for number in entry["row_groups"]:
                table = parquet.read_row_group(number, chosen)
                rows += table.num_rows
                writer.write_table(table.select(chosen).cast(plain))
    local.check_unchanged([entry["file"]])
    return {"documents": rows, "bytes": target.stat().st_size}


@contextmanager
def _complete(name: str) -> Iterator[None]:
    try:
        yield
    except pyarrow.ArrowInvalid as error:
        raise DiffersFromPlan(
            f"{name} is not a complete Parquet file ({error}): truncated, or another file"
        ) from error


def check(path: Path, entry: Json, where: str) -> Json:
    """Compare a file with its plan and return its counts; DiffersFromPlan says what differs."""
    if (size := path.stat().st_size) != entry["bytes"]:
        raise DiffersFromPlan(
            f"{where} came with {size:,} bytes, the plan says {entry['bytes']:,}: truncated, or another file"
        )
    if entry["sha256"] is not None and (sha256 := file_sha256(path)) != entry["sha256"]:
        raise DiffersFromPlan(f"{where} came with sha256 {sha256}, the plan says {entry['sha256']}")
    with _complete(where), pyarrow.parquet.ParquetFile(path) as parquet:
        schema = parquet.schema_arrow
        rows = parquet.metadata.num_rows
    plan.text_column(schema, (entry["text_column"],), where)
    return {"documents": rows, "bytes": size}


def _is_transient(error: Exception) -> bool:
    if isinstance(error, hub_errors.HfHubHTTPError):
        return error.response.status_code not in (401, 403, 404)
    if isinstance(error, DiffersFromPlan):
        return True
    # refusals, other errors of this package, and full disks are final
    if isinstance(error, FileNotFoundError | PermissionError | ValueError | local.DamagedFile):
        return False
    return getattr(error, "errno", None) not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _read_local(entry: Json, target: Path, names: Mapping[str, str]) -> Json:
    # a damaged file gives no documents at all: all files are read again without it
    damaged: dict[str, tuple[local.Unreadable, int]] = {}
    while True:
        dropped = local.Dropped()
        for name, (problem, rows) in damaged.items():
            # and all that is behind, which nobody can count
            dropped.add_file(name, problem, rows + 1)
        try:
            local.check_unchanged(entry["files"])
            readable = {name: portable for name, portable in names.items() if name not in damaged}
            counts = _write(entry, readable, target, dropped)
            local.check_unchanged(entry["files"])
        except local.DamagedFile as error:
            name, problem, rows = error.args
            damaged[name] = problem, rows
            continue
        size = plan.size_of(entry)
        sizes = {
            name: size if "range" in entry else file_bytes for name, file_bytes, _ in entry["files"]
        }
        lost_bytes = {names[name]: sizes[name] for name in sorted(dropped.files)}
        return {
            **counts,
            "lines": dropped.lines,
            "file_bytes": size,
            "lost_file_bytes": sum(lost_bytes.values()),
            "lost_files": lost_bytes,
            "dropped": dict(sorted(dropped.items())),
            "lone_surrogates": dropped.surrogates,
            "examples": list(dropped.examples.items()),
        }


def _write(entry: Json, names: Mapping[str, str], target: Path, dropped: local.Dropped) -> Json:
    span = tuple(entry["range"]) if "range" in entry else None
    documents = 0
    size = 0
    rows = local.documents(Input(**entry["input"]), names, dropped, span)
    with pyarrow.parquet.ParquetWriter(target, TEXT_SCHEMA, compression="zstd") as writer:
        for group in local.group_by_size(rows, lambda document: len(document[0]), ROW_GROUP_BYTES):
            texts = [text for text, *_ in group]
            origins = [encode_origin(names[name], row, fields) for _, name, row, fields in group]
            writer.write_batch(pyarrow.record_batch([texts, origins], schema=TEXT_SCHEMA))
            documents += len(texts)
            size += sum(len(text.encode()) for text in texts)
    return {"documents": documents, "bytes": size}


def sum_lost_files(fetched: Iterable[Json]) -> Json:
    """Return {"files": {name: bytes}, "share" of all bytes} of the files lost as a whole."""
    files = Counter[str]()
    total_bytes = 0
    for counts in fetched:
        files.update(counts.get("lost_files", {}))
        total_bytes += counts.get("file_bytes", 0)
    return {"files": dict(sorted(files.items())), "share": files.total() / max(total_bytes, 1)}


def describe_lost_files(lost_files: Json) -> str:
    """Name lost files in a sentence; empty for none."""
    names = list(lost_files["files"])
    if not names:
        return ""
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    share = (
        f"{len(names)} file{'s' * (len(names) > 1)} lost ({lost_files['share']:.1%} of the bytes)"
    )
    return f"{share}: {', '.join(names[:NAMES_SHOWN])}{more}"


def check_dropped(
    recipe: Recipe, out: Path, sources: tuple[str, ...], stages: tuple[str, ...]
) -> None:
    """Raise ValueError for a source that lost more than max_dropped_share."""
    for source in sources:
        fetched = stage.counts(out, "fetch", source)
        entries = stage.find_plan(out, source)["units"]
        losses = Counter[str]()
        examples = dict[str, str]()
        for name in stages:
            for entry, counts in zip(entries, stage.counts(out, name, source), strict=True):
                place = entry.get("path", str(Unit(source, entry["number"])))
                for reason in local.DAMAGE:
                    if count := counts.get("dropped", {}).get(reason):
                        losses[reason] += count
                        examples.setdefault(
                            reason, dict(counts.get("examples", ())).get(reason, place)
                        )
        documents = sum(
            counts["documents"] + sum(counts.get("dropped", {}).values()) for counts in fetched
        )
        # a file that is lost is one document at least, and nobody knows how many more
        names = "lost_file_bytes", "file_bytes"
        lost_bytes, size = (sum(counts.get(name, 0) for counts in fetched) for name in names)
        share = max(losses.total() / max(documents, 1), lost_bytes / max(size, 1))
        if share > recipe.max_dropped_share:
            reasons = "; ".join(
                f"{losses[reason]:,} {reason}, such as {place}"
                for reason, place in examples.items()
            )
            raise ValueError(
                f"source {source!r}: {share:.1%} could not be read ({losses.total():,} of {documents:,} documents, "
                f"{lost_bytes:,} of {size:,} bytes of files): {reasons}. Repair or exclude them, or raise "
                f"max_dropped_share = {recipe.max_dropped_share} in the recipe"
            )


def check_enough(recipe: Recipe, out: Path, sources: tuple[str, ...]) -> None:
    for source in map(recipe.source, sources):
        counts = stage.counts(out, "fetch", source.name)
        total = sum(count["bytes"] for count in counts)
        if isinstance(source, LocalSource) and total < source.min_bytes:
            raise ValueError(
                f"source {source.name!r} has {total} bytes of text, it needs at least min_bytes = "
                f"{source.min_bytes}; add paths with such text to its inputs, or lower min_bytes"
            )
        if isinstance(source, HubSource) and not sum(count["documents"] for count in counts):
            raise ValueError(
                f"source {source.name!r} has {len(counts)} files of {source.repo}, and not one row"
            )
