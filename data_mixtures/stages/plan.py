"""plan: a recipe -> DIR/plan.json, the list of every file that will be read.

Every source gets its units in a stable order: one Parquet file each, with its size and hash, or a
group of local files.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import pyarrow
import pyarrow.parquet
import xxhash

from data_mixtures.readers import content, hub, local
from data_mixtures.readers.columns import holds_text
from data_mixtures.readers.unpack import can_seek, open_input
from data_mixtures.recipe import HubSource, Input, LocalSource, Recipe, Source, check_known, nearest
from data_mixtures.shards import Json
from data_mixtures.stages.stage import PLAN, PLAN_FORMAT, read_plan
from records.files import write_json

UNIT_BYTES = 64 << 20  # of local files in one unit
S = TypeVar("S", bound=Source)
T = TypeVar("T")
R = TypeVar("R")


def make(recipe: Recipe, out: Path, names: Iterable[str], mirror: str | None = None) -> Json:
    """Plan the named sources, keep the others, and write plan.json.

    Raises:
        ValueError: names all repositories and sources that cannot be planned.
    """
    before = read_plan(out)["sources"] if (out / PLAN).is_file() else {}
    chosen = [source for source in recipe.sources if source.name in set(names)]
    check_known("source", names, [source.name for source in recipe.sources])
    on_disk = [source for source in chosen if isinstance(source, LocalSource)]
    if recipe.corpus is not None and on_disk:
        _write_corpus(recipe.corpus, out / "corpus")
    remote = [each for each in chosen if isinstance(each, HubSource)]
    # an equal spec keeps its plan: a branch such as `main` is not resolved again, and stays at the commit that it
    # was then (`revision` in plan.json, which the table of `plan` shows). Local files are listed every time
    new = [each for each in remote if before.get(each.name, {}).get("spec") != _spec(each)]
    planned = _plan_hub(hub.connect(mirror), new) if new else {}
    planned |= _plan_each(on_disk, lambda source: _local(source, local.roots(out, recipe.folder)))
    sources = {**before, **planned}
    order = [source.name for source in recipe.sources if source.name in sources]
    plan = {"format": PLAN_FORMAT, "sources": {name: sources[name] for name in order}}
    if not (out / PLAN).is_file() or plan != read_plan(out):
        write_json(out / PLAN, plan)
    return plan


def _write_corpus(module: str, folder: Path) -> None:
    command = [sys.executable, "-m", module, "--out", str(folder)]
    process = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if process.returncode:
        raise ValueError(
            f"corpus = {module!r} ended with exit status {process.returncode}:\n{process.stderr.strip()}"
        )


def _spec(source: HubSource) -> Json:
    # the fields that decide a source's files and columns
    names = ("repo", "revision", "configs", "files", "text_columns", "licence", "gate")
    # lists in place of tuples, as plan.json has it
    return json.loads(json.dumps({name: getattr(source, name) for name in names}))


def _hash(decides: Any) -> str:
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()


def _number_units(source: Source, entries: Iterable[Json]) -> list[Json]:
    return [
        {"source": source.name, "number": number, **entry} for number, entry in enumerate(entries)
    ]


def _local(source: LocalSource, roots: Mapping[str, str]) -> Json:
    entries: list[Json] = []
    decides: list[Any] = []
    for source_input in source.inputs:
        files = local.find(source_input, roots)
        local.check_kind(source_input, files)
        _check_field(source_input, files[0][0])
        # how a listed file is read; it was found by the rest, and more that is found leaves its
        # unit as it is
        settings = asdict(replace(source_input, paths=("*",), exclude=(), files=None))
        for group, rows, parts in _groups(source_input, files):
            # a file may get another time or folder without other content: it is read again, but the
            # data is the same
            names = [[local.portable(name, roots), size] for name, size, _ in group]
            entry: Json = {"kind": "local", "input": settings, "files": group}
            if source_input.kind == "resolved":
                entry |= {"kind": "resolved", "row_groups": rows}
            elif source_input.kind == "parquet":
                facts = {"bytes": group[0][1], "sha256": None, "text_column": source_input.field}
                entry = {"kind": "parquet", "path": names[0][0], "file": group[0], **facts}
            entries += [{**entry, **part} for part in parts]
            decides.append(["resolved", *names[0], rows] if rows else [settings, names])
    described = {
        "kind": "local",
        "category": source.category,
        "units": _number_units(source, entries),
    }
    return {**described, "plan_hash": _hash(decides)}


def _groups(
    source_input: Input, files: list[local.FileVersion]
) -> Iterator[tuple[list[local.FileVersion], list[int], list[Json]]]:
    """Yield files of a group, row groups (of contents), and the plan of each unit."""
    if source_input.kind == "resolved":
        one_unit: list[Json] = [{}]
        yield from (([file], rows, one_unit) for file in files for rows in content.units(file[0]))
    elif source_input.kind == "parquet":
        yield from (([file], [], _row_groups(*file[:2])) for file in files)
    # the cap is on the text found, so a capped input is one unit
    elif source_input.max_bytes is not None:
        yield files, [], [{}]
    else:
        for group in local.group_by_size(files, lambda file: file[1], UNIT_BYTES):
            yield group, [], _ranges(group) if source_input.kind == "jsonl" else [{}]


def size_of(entry: Json) -> int:
    if "range" in entry:
        return entry["range"][1] - entry["range"][0]
    return entry.get("bytes", 0) + sum(file[1] for file in entry.get("files", ()))


def _ranges(group: list[local.FileVersion]) -> list[Json]:
    """Split the last file of a group into byte ranges if it is large and seekable."""
    # only the last file of a group can be large
    *small, large = group
    if large[1] <= UNIT_BYTES or not can_seek(large[0]):
        return [{}]
    begins = range(0, large[1], UNIT_BYTES)
    ranges = [
        {"files": [large], "range": [begin, min(begin + UNIT_BYTES, large[1])]} for begin in begins
    ]
    return [{"files": small}, *ranges] if small else ranges


def _row_groups(name: str, size: int) -> list[Json]:
    """Split a Parquet file into row groups of about UNIT_BYTES."""
    # a small remote file stays whole
    if not can_seek(name) or ("://" in name and size <= UNIT_BYTES):
        return [{}]
    try:
        with open_input(name) as file:
            metadata = pyarrow.parquet.read_metadata(file)
    except (pyarrow.ArrowInvalid, FileNotFoundError, PermissionError):
        # `fetch` says what is wrong with it
        return [{}]
    parts = list[Json]()
    first = 0
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    for numbers in local.group_by_size(
        range(len(groups)), lambda n: groups[n].total_byte_size, UNIT_BYTES
    ):
        size, rows = (
            sum(getattr(groups[n], of) for n in numbers) for of in ("total_byte_size", "num_rows")
        )
        parts.append({"row_groups": numbers, "first_row": first, "bytes": size})
        first += rows
    return parts if len(parts) > 1 else [{}]


def _check_field(source_input: Input, name: str) -> None:
    # damage is no error here: it is counted when the file is read
    if source_input.kind == "parquet":
        with open_input(name) as file:
            _column_of(file, (source_input.field,), name)
    elif source_input.kind == "jsonl" and (
        problem := local.find_first_problem(name, source_input.field)
    ):
        raise ValueError(problem)


def describe_shared_files(plan: Json) -> Iterator[str]:
    """Yield sentences on files that several sources read, whose text then counts in each."""
    places: dict[tuple[str, str], set[str]] = {}
    for source, entry in plan["sources"].items():
        for unit in entry["units"]:
            # a hub's unit has a path, one of Parquet a file, one of text several
            file = unit.get("file", [unit.get("path")])
            for name, *_ in unit.get("files", [file]):
                places.setdefault((entry.get("repo", ""), name), set()).add(source)
    pairs: dict[tuple[str, ...], list[str]] = {}
    for (_, name), readers in places.items():
        if len(readers) > 1:
            pairs.setdefault(tuple(sorted(readers)), []).append(name)
    for sources, names in pairs.items():
        yield f"{len(names)} files are in {' and '.join(sources)}, whose shares then hold the same text: {names[0]} ..."


def _plan_hub(host: hub.Mirror, hub_sources: list[HubSource]) -> dict[str, Json]:
    # access to all repositories is checked before any file is listed
    sources: dict[tuple[str, str], list[str]] = {}
    for source in hub_sources:
        sources.setdefault((source.repo, source.revision), []).append(source.name)
    repositories = {", ".join(names): repository for repository, names in sources.items()}
    answers = _ask_each(
        repositories, lambda repository: host.revision(*repository), "repositories cannot be read"
    )
    commits = {repositories[names]: commit for names, commit in answers.items()}
    return _plan_each(
        hub_sources, lambda source: _hub(host, source, commits[source.repo, source.revision])
    )


def _plan_each(sources: Iterable[S], ask: Callable[[S], Json]) -> dict[str, Json]:
    return _ask_each(
        {source.name: source for source in sources}, ask, "sources are not as the recipe says"
    )


def _ask_each(items: Mapping[str, T], ask: Callable[[T], R], problem: str) -> dict[str, R]:
    answers = {}
    refused = []
    for name, item in items.items():
        try:
            answers[name] = ask(item)
        except ValueError as error:
            refused.append(f"  {name}: {error}")
    # one error for all
    if refused:
        raise ValueError("\n".join([f"{len(refused)} {problem}; nothing was read:", *refused]))
    return answers


def _hub(host: hub.Mirror, source: HubSource, revision: str) -> Json:
    entries: list[Json] = []
    for config in source.configs:
        files = host.files(source.repo, revision, config)
        if not files:
            near = nearest(config, host.folders(source.repo, revision), "its folders:")
            raise ValueError(f"{source.repo} @ {revision} has no Parquet file in {config}/; {near}")
        if source.files is not None:
            files = sorted(files, key=lambda file: xxhash.xxh3_64_intdigest(file.path.encode()))[
                : source.files
            ]
        # the column is read from the footer of each folder's first file, never assumed
        with host.open(source.repo, revision, files[0].path) as opened:
            column = _column_of(
                opened, source.text_columns, f"{source.repo} @ {revision}: {files[0].path}"
            )
        entries += [{"kind": "parquet", **asdict(file), "text_column": column} for file in files]
    units = _number_units(source, entries)
    facts = {"kind": "hub", "category": source.category, "repo": source.repo, "revision": revision}
    terms = {"licence": source.licence, "gate": source.gate, "spec": _spec(source)}
    # a mirror knows no hashes: its plan and the hub's plan of the same files are not the same plan
    return {**facts, **terms, "units": units, "plan_hash": _hash([source.repo, revision, units])}


def _column_of(file: BinaryIO, names: tuple[str, ...], where: str) -> str:
    try:
        schema = pyarrow.parquet.read_schema(file)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ValueError(f"{where} has no readable Parquet footer: {error}") from error
    return text_column(schema, names, where)


def text_column(schema: pyarrow.Schema, names: tuple[str, ...], where: str) -> str:
    """Return which of `names` is the text column; ValueError lists the columns there are."""
    columns = f"its columns: {', '.join(f'{field.name} ({field.type})' for field in schema)}"
    texts = {field.name for field in schema if holds_text(field.type)}
    matches = [name for name in names if name in texts]
    if len(matches) == 1 and (count := schema.names.count(matches[0])) > 1:
        raise ValueError(f"{where} has {count} columns named {matches[0]}; give them other names")
    if len(matches) != 1:
        raise ValueError(
            f"{where} must have exactly one column of text or bytes named {' or '.join(names)}; {columns}. "
            "Look at the file and name its column of text as `field` of the input, or text_columns of a hub source"
        )
    return matches[0]
