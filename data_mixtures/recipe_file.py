"""Reads a recipe's TOML into the dataclasses of recipe.py; unknown keys are refused with the nearest name."""

from __future__ import annotations

import dataclasses
import re
import tomllib
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from data_mixtures import order
from data_mixtures.recipe import (
    LIMITS,
    RESERVED_FOLDERS,
    Dedup,
    Filter,
    HubSource,
    Input,
    LocalSource,
    Recipe,
    TokenizerFile,
    TokenizerTraining,
    check_integer,
    check_known,
)  # fmt: skip

T = TypeVar("T")
Table = dict[str, Any]


def load(path: Path) -> Recipe:
    """Read and check a recipe. ValueError (prefixed with the file) for anything that is wrong in it."""
    try:
        return _recipe(_tables(path), path.parent)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _toml(path: Path) -> Table:
    if not path.is_file():
        raise ValueError(f"no such file: {path}")
    return tomllib.loads(path.read_text(encoding="utf-8"))


def _tables(path: Path) -> Table:
    """A recipe's tables. One with `base` has those of that recipe, changed where it says something else."""
    table = _toml(path)
    if "base" not in table:
        return table
    base = _tables(path.parent / table.pop("base"))
    for key, value in table.items():
        base[key] = base.get(key, {}) | value if isinstance(value, dict) else value
    return base


def _listed(table: Table, used: set[str]) -> Table:
    """Sources of a shared list that a phase uses, each with what its [repos."owner/name"] says."""
    sources = dict(table.get("sources", {}))
    for repo, shared in table.get("repos", {}).items():
        own = shared.pop("sources")
        sources |= {name: {"repo": repo, **shared, **values} for name, values in own.items()}
    return {name: values for name, values in sources.items() if name in used}


def _recipe(table: Table, folder: Path) -> Recipe:
    weights = {key: table.pop(key) for key in list(table) if re.fullmatch(r"phase\d+", key)}
    if isinstance(table.get("sources"), str):
        used = {name for each in weights.values() for name in each}
        table["sources"] = _listed(_toml(folder / table["sources"]), used)
    for key in ("keep", "files"):
        sources = table.get("sources", {})
        check_known(f"source in [{key}]:", given := table.get(key, {}), sources)
        sources |= {name: {**sources[name], key: value} for name, value in given.items()}
    made = {
        "tokenizer": lambda given: _tokenizer(given, folder),
        "sources": lambda given: tuple(_source(*each) for each in given.items()),
        "filter": lambda given: _filter(given, folder),
        "dedup": lambda given: _build(Dedup, given, "dedup"),
    }
    values = {key: made[key](value) if key in made else value for key, value in table.items()}
    read = _build(Recipe, values, "recipe", phases={}, folder=folder)
    if not weights:
        raise ValueError("no mixture: add a [phase1] table with one integer weight per source")
    names = [source.name for source in read.sources]
    phases = {phase: _weights(phase, given, names) for phase, given in weights.items()}
    return dataclasses.replace(read, phases=phases)


def _build(cls: Callable[..., T], table: Any, what: str, **given: Any) -> T:
    """A dataclass from a table with keys as its fields are named, and fields that are not in the table."""
    if not isinstance(table, dict):
        raise ValueError(f"{what}: {table!r} must be a table of keys")
    fields = [f for f in dataclasses.fields(cast(Any, cls)) if f.name not in given]
    check_known(f"{what} key", table, [f.name for f in fields])
    needed = [f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING]
    if missing := [name for name in needed if name not in table]:
        raise ValueError(f"{what} lacks {missing}")
    hints = typing.get_type_hints(cls)
    values: Table = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    for key, value in values.items():
        if not _fits(value, hints[key]):
            value_in_toml = list(value) if isinstance(value, tuple) else value
            raise ValueError(f"{what}: {key} = {value_in_toml!r} must be of type {in_toml(hints[key])}")
        if int in (hints[key], *typing.get_args(hints[key])) and value is not None:
            check_integer(f"{what}: {key}", value, *LIMITS.get(key, (1, None)))
        elif key.endswith(("_share", "_coverage")) and not 0 <= value <= 1:
            raise ValueError(f"{what}: {key} = {value!r} must be a share from 0 to 1")
    try:
        return cls(**values, **given)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value of a TOML is of a field's type; an integer is a float too, a boolean is neither."""
    kinds = typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        return any(_fits(value, kind) for kind in kinds)
    if typing.get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_fits(each, kinds[0]) for each in value)
    if isinstance(value, bool) or hint is bool:
        return isinstance(value, bool) and hint is bool
    return isinstance(value, int | float if hint is float else typing.get_origin(hint) or hint)


def in_toml(hint: Any) -> str:
    """A field's type in the words of TOML."""
    kinds = typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        return " or ".join(dict.fromkeys(in_toml(kind) for kind in kinds if kind is not type(None)))
    if typing.get_origin(hint) is tuple:
        return f"list of {in_toml(kinds[0])}s"
    names = {str: "string", Path: "string", int: "integer", float: "number", bool: "boolean"}
    return names.get(hint, "table")


def _source(name: str, values: Table) -> LocalSource | HubSource:
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name):
        raise ValueError(f"source name {name!r} becomes a folder: use lower-case letters, digits, - _ and .")
    if name in RESERVED_FOLDERS:
        raise ValueError(f"source name {name!r} is that of a stage's folder beside it; choose another")
    what = f"source {name!r}"
    if not isinstance(values, dict) or ("inputs" in values) == ("repo" in values):
        raise ValueError(
            f"{what} needs either inputs = [{{ kind = ..., paths = [...] }}] or repo = 'owner/name'"
        )
    given = values.get("inputs", [])
    tables = given if isinstance(given, list) else [given]
    if inputs := [_build(Input, table, f"{what}: input") for table in tables]:
        values = {**values, "inputs": inputs}
    kind: Callable[..., LocalSource | HubSource] = HubSource if "repo" in values else LocalSource
    source = _build(kind, values, what, name=name)
    if not 0 < source.keep <= 1:
        raise ValueError(f"{what}: keep = {source.keep!r} must be a share above 0, at most 1")
    return source


def _tokenizer(value: Any, folder: Path) -> TokenizerFile | TokenizerTraining:
    table = {"path": value} if isinstance(value, str) else value
    if isinstance(table, dict) and "path" in table:
        given = _build(TokenizerFile, table, "tokenizer")
        return dataclasses.replace(given, path=str(folder / given.path))  # an absolute path stays
    return _build(TokenizerTraining, value, "tokenizer")


def _filter(table: Table, folder: Path) -> Filter:
    settings = _build(Filter, table, "filter")
    check_integer("filter.max_chars", settings.max_chars, low=settings.min_chars)
    for name, path in settings.benchmarks.items():
        if not isinstance(path, str):
            raise ValueError(f"filter.benchmarks.{name} = {path!r} must be the path of a file, or a glob")
    placed = {name: str(folder / path) for name, path in settings.benchmarks.items()}
    return dataclasses.replace(settings, benchmarks=placed)


def _weights(phase: str, weights: Mapping[str, int], names: list[str]) -> dict[str, int]:
    check_known(f"source in [{phase}]:", weights, names)
    missing = [name for name in names if name not in weights]
    if missing:
        raise ValueError(f"[{phase}] gives no weight to {missing}; write 0 for a source that it does not use")
    try:
        order.pattern([weights[name] for name in names])
    except ValueError as error:
        raise ValueError(f"[{phase}] {error}; the sources in order: {names}") from error
    return {name: weights[name] for name in names}
