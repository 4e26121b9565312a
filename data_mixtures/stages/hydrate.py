"""hydrate: metadata of code (repository, commit, path) -> DIR/hydrate/<source>/unit-NNNNN/raw.parquet with the text.

The code datasets list files without their content. A resolver supplies it: "local:FOLDER" reads
FOLDER/<repo>/<commit>/<path>; "module:attribute" names your own callable, which takes a list of rows and returns, for
each row, its bytes or the reason why there are none. Missing content is counted by reason; too much is an error.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet

from data_mixtures import recipe
from data_mixtures.stages import fetch, stage
from data_mixtures.stages.stage import RAW, Stage, Unit, key_of

ROWS = 1024  # in one call of a resolver


class Row(NamedTuple):
    """One file of a repository; blob_id is the sha1 of its git object, if the metadata says it."""

    repo: str
    commit_id: str
    rel_path: str
    blob_id: str | None = None


@dataclass(frozen=True)
class Missing:
    """Why a resolver has no content for a row; counted under this name."""

    reason: str


Resolver = Callable[[list[Row]], Iterable[bytes | Missing]]


@dataclass(frozen=True)
class Hydrate(Stage):
    """One unit: the rows of one fetched Parquet file, in their order, those without content left out."""

    name = "hydrate"

    def units(self) -> list[Unit]:
        return [unit for name in self.check() for unit in stage.planned_units(self.out, name)]

    def check(self) -> list[str]:
        """The sources to hydrate. ValueError says what to do when there is no resolver for them."""
        hub = [each for each in self.recipe.sources if isinstance(each, recipe.HubSource) and each.name in self.sources]
        names = [each.name for each in hub if each.needs_hydration]
        if names and self.recipe.hydrate is None:
            raise ValueError(
                f"{', '.join(names)} list files without their text: add [hydrate] with a resolver to the recipe, or "
                "leave them out (without = [...]), as nemotron-no-hydration.toml does"
            )
        if names:
            resolver(self._settings.resolver)
        return names

    @property
    def _settings(self) -> recipe.Hydrate:
        assert self.recipe.hydrate is not None, "units() has refused a recipe without a resolver"
        return self.recipe.hydrate

    def key(self, unit: Unit) -> str:
        files = stage.made_files(self.out, "fetch", unit)
        # a resolver is known by its name alone: when it returns other content, delete DIR/hydrate
        return key_of(("stages/hydrate.py",), self._settings.resolver, self._settings.max_missing_share, files)

    def work(self, unit: Unit, folder: Path) -> dict[str, Any]:
        settings = self._settings
        raw = stage.checked(self.out, "fetch", unit, RAW)
        counts = {"rows": 0, "documents": 0, "bytes": 0}
        missing: Counter[str] = Counter()
        resolve = resolver(settings.resolver)
        with pyarrow.parquet.ParquetWriter(folder / RAW, fetch.TEXT_SCHEMA, compression="zstd") as writer:
            for rows in _rows(raw):
                texts = _texts(rows, resolve, settings.resolver, missing)
                counts["rows"] += len(rows)
                counts["documents"] += len(texts)
                counts["bytes"] += sum(len(text.encode()) for text in texts)
                writer.write_batch(pyarrow.record_batch([texts], schema=fetch.TEXT_SCHEMA))
        assert counts["rows"] == counts["documents"] + missing.total(), "rows must be hydrated or counted as missing"
        share = missing.total() / max(counts["rows"], 1)
        if share > settings.max_missing_share:
            raise ValueError(
                f"{missing.total():,} of {counts['rows']:,} files ({share:.2%}) have no content from "
                f"{settings.resolver} ({', '.join(f'{k} {v:,}' for k, v in missing.most_common())}); "
                f"hydrate.max_missing_share is {settings.max_missing_share}"
            )
        return {**counts, "dropped": dict(sorted(missing.items()))}


def _rows(path: Path) -> Iterator[list[Row]]:
    with pyarrow.parquet.ParquetFile(path) as parquet:
        columns = [name for name in Row._fields if name in parquet.schema_arrow.names]
        for batch in parquet.iter_batches(ROWS, columns=columns):
            yield [Row(**row) for row in batch.to_pylist()]


def _texts(rows: list[Row], resolve: Resolver, name: str, missing: Counter[str]) -> list[str]:
    contents = list(itertools.islice(resolve(rows), len(rows) + 1))
    if len(contents) != len(rows):
        raise ValueError(f"resolver {name!r} answered {len(contents)} times to {len(rows)} rows, not once to each")
    texts = []
    for row, content in zip(rows, contents, strict=True):
        if isinstance(content, Missing):
            missing[content.reason] += 1
        elif row.blob_id is not None and git_blob_sha1(content) != row.blob_id:
            missing["wrong_sha1"] += 1
        else:
            try:
                texts.append(content.decode("utf-8"))
            except UnicodeDecodeError:
                missing["not_utf8"] += 1
    return texts


def git_blob_sha1(content: bytes) -> str:
    """The name that git gives to a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def resolver(name: str) -> Resolver:
    """A resolver by its name in a recipe. ValueError when there is no such folder, module or attribute."""
    kind, _, where = name.partition(":")
    if kind == "local":
        if not Path(where).is_dir():
            raise ValueError(f"hydrate.resolver = {name!r}: there is no such folder")
        return functools.partial(_local, Path(where).resolve())
    try:
        return getattr(importlib.import_module(kind), where)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"hydrate.resolver = {name!r} cannot be imported: {error}") from error


def _local(root: Path, rows: list[Row]) -> Iterator[bytes | Missing]:
    """Content from ROOT/<repo>/<commit>/<path>."""
    for row in rows:
        path = (root / row.repo / row.commit_id / row.rel_path).resolve()
        if not path.is_relative_to(root):  # a path of the metadata must not lead out of the folder
            yield Missing("unsafe_path")
            continue
        try:
            yield path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            yield Missing("not_there")
        except (IsADirectoryError, PermissionError):
            yield Missing("not_readable")
