"""plan: a recipe -> DIR/plan.json, every file that will be read, before any is.

First the access to all repositories is checked, and all that refuse are named at once. Then every source gets its units
in a stable order: one Parquet file each, with its size and hash, or a group of local files. The columns are read from
the footer of each folder's first file, never assumed. The plan of a hub source is kept, as a revision does not change;
local files are listed again at every start, after the recipe's `corpus` program has written its own.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from data_mixtures import shards
from data_mixtures.readers import files, hub
from data_mixtures.recipe import HubSource, Input, LocalSource, Recipe, check_known
from data_mixtures.stages.stage import PLAN, PLAN_FORMAT, Entry, read_plan

UNIT_BYTES = 64 << 20  # of local files in one unit
METADATA_COLUMNS = ("repo", "commit_id", "rel_path")


def make(recipe: Recipe, out: Path, names: Iterable[str], mirror: str | None = None) -> dict[str, Any]:
    """Plan the named sources (others in plan.json stay) and write plan.json. ValueError names all that is refused."""
    before = read_plan(out)["sources"] if (out / PLAN).is_file() else {}
    chosen = [each for each in recipe.sources if each.name in set(names)]
    check_known("source", names, [each.name for each in recipe.sources])
    local = [each for each in chosen if isinstance(each, LocalSource)]
    if recipe.corpus is not None and local:
        _write_corpus(recipe.corpus, Path(files.roots(out)["corpus"]))
    planned = {each.name: _local(each, out) for each in local}
    remote = [each for each in chosen if isinstance(each, HubSource)]
    same = [each for each in remote if before.get(each.name, {}).get("spec") == _spec(each)]
    planned |= {each.name: before[each.name] for each in same}
    new = [each for each in remote if each not in same]
    if new:
        planned |= _ask(hub.origin(mirror), new)
    order = [each.name for each in recipe.sources]
    known = {**before, **planned}
    plan = {"format": PLAN_FORMAT, "sources": {name: known[name] for name in order if name in known}}
    if not (out / PLAN).is_file() or plan != read_plan(out):
        out.mkdir(parents=True, exist_ok=True)
        shards.write_json(out / PLAN, plan)
    return plan


def _write_corpus(module: str, folder: Path) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--out", str(folder)], stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise ValueError(f"corpus = {module!r} ended with exit status {done.returncode}:\n{done.stderr.strip()}")


def _spec(each: HubSource) -> Entry:
    """What of a source decides its files and columns; not what others counted, nor its category."""
    names = ("repo", "revision", "configs", "text_columns", "needs_hydration", "licence", "gate")
    return json.loads(json.dumps({name: getattr(each, name) for name in names}))


def _hashed(entry: Entry, decides: Any) -> Entry:
    text = json.dumps(decides, sort_keys=True)
    return {**entry, "plan_hash": hashlib.sha256(text.encode()).hexdigest()}


def _local(each: LocalSource, out: Path) -> Entry:
    """Files in the order in which they are read; a capped input is one unit, as its cap is on the text found."""
    roots = files.roots(out)
    parts: list[tuple[Input, list[list[Any]]]] = []
    for source_input in each.inputs:
        found = [[_name(path), *_size_and_time(path)] for path in files.find(source_input, roots)]
        groups = [found] if source_input.max_bytes is not None else _groups(found)
        parts += [(source_input, group) for group in groups if group]
    entries = [
        {"source": each.name, "number": number, "kind": "local", "input": asdict(part), "files": group}
        for number, (part, group) in enumerate(parts)
    ]
    # a file may get another time or folder without other content: it is then read again, but the data is the same
    decides = [
        [asdict(part), [[files.portable(path, roots), size] for path, size, _ in group]] for part, group in parts
    ]
    return _hashed({"kind": "local", "category": each.category, "units": entries}, decides)


def _name(path: Path) -> str:
    name = str(path)
    try:
        name.encode("utf-8")  # as JSON will want it
    except UnicodeEncodeError as error:
        raise ValueError(f"the name of the file {name!r} is not UTF-8; rename it, or exclude it") from error
    return name


def _size_and_time(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _groups(found: list[list[Any]]) -> list[list[list[Any]]]:
    groups: list[list[list[Any]]] = []
    size = UNIT_BYTES
    for entry in found:
        if size >= UNIT_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += entry[1]
    return groups


def _ask(origin: hub.Origin, wanted: list[HubSource]) -> dict[str, Entry]:
    """Access first, for all; then files and columns, for all. One error names every source that fails, and why."""
    revisions: dict[tuple[str, str], str] = {}
    refused: dict[str, list[str]] = {}
    for each in wanted:
        try:
            if (each.repo, each.revision) not in revisions:
                revisions[each.repo, each.revision] = origin.revision(each.repo, each.revision)
        except ValueError as error:
            refused.setdefault(f"{each.repo} @ {each.revision}: {error}", []).append(each.name)
    _stop_at(refused, f"{len(refused)} repositories refuse to be read")
    planned = {}
    for each in wanted:
        try:
            planned[each.name] = _hub(origin, each, revisions[each.repo, each.revision])
        except ValueError as error:
            refused.setdefault(str(error), []).append(each.name)
    _stop_at(refused, f"{len(refused)} sources are not as the recipe says")
    return planned


def _stop_at(refused: dict[str, list[str]], what: str) -> None:
    if refused:
        lines = [f"  {', '.join(names)}: {why}" for why, names in refused.items()]
        raise ValueError("\n".join([f"{what}; nothing was read:", *lines]))


def _hub(origin: hub.Origin, each: HubSource, revision: str) -> Entry:
    entries: list[Entry] = []
    for config in each.configs:
        found = origin.files(each.repo, revision, config)
        if not found:
            near = difflib.get_close_matches(config, there := origin.folders(each.repo, revision), n=1)
            raise ValueError(
                f"{each.repo} @ {revision} has no Parquet file in {config}/; "
                + (f"did you mean {near[0]!r}?" if near else f"its folders: {there}")
            )
        column = _text_column(origin, each, revision, found[0].path)
        for file in found:
            number = {"source": each.name, "number": len(entries), "kind": "parquet"}
            entries.append({**number, **dataclasses.asdict(file), "text_column": column})
    facts = {"kind": "hub", "category": each.category, "repo": each.repo, "revision": revision}
    terms = {"licence": each.licence, "gate": each.gate, "spec": _spec(each)}
    # a mirror knows no hashes: its plan and the hub's plan of the same files are not the same plan
    return _hashed({**facts, **terms, "units": entries}, [each.repo, revision, entries])


def _text_column(origin: hub.Origin, each: HubSource, revision: str, path: str) -> str | None:
    """The column of text by the file's footer; None for metadata, whose columns are checked instead."""
    try:
        with origin.open(each.repo, revision, path) as file:
            schema = pyarrow.parquet.read_schema(file)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ValueError(f"{each.repo} @ {revision}: {path} has no readable Parquet footer: {error}") from error
    return text_column(schema, each, f"{each.repo}/{path}")


def text_column(schema: pyarrow.Schema, each: HubSource, where: str) -> str | None:
    """Which column of a file holds the text. ValueError names the columns of a layout that is not known."""
    columns = (
        f"its columns: {', '.join(f'{name} ({kind})' for name, kind in zip(schema.names, schema.types, strict=True))}"
    )
    texts = {
        field.name
        for field in schema
        if pyarrow.types.is_string(field.type) or pyarrow.types.is_large_string(field.type)
    }
    if each.needs_hydration:
        if not texts.issuperset(METADATA_COLUMNS):
            raise ValueError(f"{where} must have the columns {', '.join(METADATA_COLUMNS)} of strings; {columns}")
        return None
    found = [name for name in each.text_columns if name in texts]
    if len(found) != 1:
        raise ValueError(
            f"{where} must have exactly one column of strings named {' or '.join(each.text_columns)}; {columns}. "
            "Look at the file and name its column of text as text_columns of the source"
        )
    return found[0]
