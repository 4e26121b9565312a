"""Reads a recipe's TOML into the dataclasses of recipe.py; unknown keys are refused with the nearest name."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from data_mixtures import order
from data_mixtures.readers.local import pattern_of
from data_mixtures.recipe import (
    RESERVED_FOLDERS,
    Dedup,
    Filter,
    HubSource,
    Input,
    LocalSource,
    Recipe,
    TokenizerFile,
    TokenizerTraining,
    check_known,
    nearest,
)

T = TypeVar("T")
Table = dict[str, Any]


def load(path: Path) -> Recipe:
    """Read and check a recipe; ValueError begins with the file."""
    try:
        return _recipe(_tables(path), path.parent)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _toml(path: Path) -> Table:
    if not path.is_file():
        raise ValueError(f"no such file: {path}")
    return tomllib.loads(path.read_text(encoding="utf-8"))


def _tables(path: Path) -> Table:
    """Read a recipe's tables, laid over those of its `base`."""
    table = _toml(path)
    if "base" not in table:
        return table
    base = _tables(path.parent / table.pop("base"))
    for key, value in table.items():
        base[key] = base.get(key, {}) | value if isinstance(value, dict) else value
    return base


def _list_sources(table: Table, used: set[str]) -> Table:
    """Return the sources of a shared list that a phase uses, with what [repos."owner/name"] says of them."""
    sources = dict(table.get("sources", {}))
    for repo, shared in table.get("repos", {}).items():
        members = shared.pop("sources")
        sources |= {name: {"repo": repo, **shared, **values} for name, values in members.items()}
    return {name: values for name, values in sources.items() if name in used}


def _recipe(table: Table, folder: Path) -> Recipe:
    weights = {key: table.pop(key) for key in list(table) if re.fullmatch(r"phase\d+", key)}
    if isinstance(table.get("sources"), str):
        used = set().union(*weights.values())
        table["sources"] = _list_sources(_toml(folder / table["sources"]), used)
    sources = table.pop("sources", {})
    for key in ("keep", "files"):
        overrides = table.get(key, {})
        check_known(f"source in [{key}]:", overrides, sources)
        sources |= {name: {**sources[name], key: value} for name, value in overrides.items()}
    if "tokenizer" in table:
        table["tokenizer"] = _tokenizer(table["tokenizer"], folder)
    for key in table.keys() - _keys(Recipe):
        if isinstance(table[key], dict) and {int} == set(map(type, table[key].values())):
            raise ValueError(f"[{key}]: phases are named [phase1], [phase2], ...; rename it")
    table["sources"] = tuple(_source(*sources_weights) for sources_weights in sources.items())
    recipe = _build(Recipe, "recipe", table, phases={}, folder=folder)
    if not weights:
        raise ValueError("no mixture: add a [phase1] table with one integer weight per source")
    roots = {"recipe": str(folder)}
    benchmarks = {name: pattern_of(path, roots) for name, path in recipe.filter.benchmarks.items()}
    names = list(sources)
    phases = {phase: _weights(phase, by_source, names) for phase, by_source in weights.items()}
    filters = dataclasses.replace(recipe.filter, benchmarks=benchmarks)
    return dataclasses.replace(recipe, filter=filters, phases=phases)


def _build(cls: Callable[..., T], what: str, table: Any, **fields: Any) -> T:
    """Make a dataclass from a table, and from fields that are no keys of it."""
    if not isinstance(table, dict):
        raise ValueError(f"{what}: {table!r} must be a table of keys")
    check_known(f"{what} key", table, [key for key in _keys(cls) if key not in fields])
    try:
        return cls(**table, **fields)
    except ValidationError as error:
        raise ValueError(f"{what}: {_explain(error)}") from error


def _keys(cls: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def _explain(error: ValidationError) -> str:
    """Describe the first error by its key and value."""
    first = error.errors()[0]
    path = first["loc"]
    message = first["msg"].removeprefix("Value error, ")
    key = ".".join(map(str, path))
    if first["type"] == "missing":
        return f"lacks {key!r}"
    # the key is one of a table inside of this one
    if first["type"] == "unexpected_keyword_argument":
        part = {"inputs": Input, "filter": Filter, "dedup": Dedup}[str(path[0])]
        return f"unknown key {key!r}; {nearest(str(path[-1]), _keys(part), 'use')}"
    prefix = f"{key} = {first['input']!r}: " if first["type"] != "value_error" else ""
    return prefix + message.replace("Input", "it").replace("tuple", "list")


def _source(name: str, values: Table) -> LocalSource | HubSource:
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name):
        raise ValueError(
            f"source name {name!r} becomes a folder: use lower-case letters, digits, - _ and ."
        )
    if name in RESERVED_FOLDERS:
        raise ValueError(
            f"source name {name!r} is that of a stage's folder beside it; choose another"
        )
    if not isinstance(values, dict) or ("inputs" in values) == ("repo" in values):
        raise ValueError(
            f"source {name!r} needs either inputs = [{{ kind = ..., paths = [...] }}] or repo = 'owner/name'"
        )
    kind: Callable[..., LocalSource | HubSource] = HubSource if "repo" in values else LocalSource
    return _build(kind, f"source {name!r}", values, name=name)


def _tokenizer(value: Any, folder: Path) -> TokenizerFile | TokenizerTraining:
    table = {"path": value} if isinstance(value, str) else value
    if isinstance(table, dict) and "path" in table:
        tokenizer = _build(TokenizerFile, "tokenizer", table)
        # an absolute path stays
        return dataclasses.replace(tokenizer, path=str(folder / Path(tokenizer.path).expanduser()))
    return _build(TokenizerTraining, "tokenizer", value)


def _weights(phase: str, weights: Mapping[str, int], names: list[str]) -> dict[str, int]:
    check_known(f"source in [{phase}]:", weights, names)
    missing = [name for name in names if name not in weights]
    if missing:
        raise ValueError(
            f"[{phase}] gives no weight to {missing}; write 0 for a source that it does not use"
        )
    try:
        order.pattern([weights[name] for name in names])
    except ValueError as error:
        raise ValueError(f"[{phase}] {error}; the sources in order: {names}") from error
    return {name: weights[name] for name in names}
