"""What a recipe TOML may say, read into frozen dataclasses and checked once; everything after this trusts it.

A recipe names sources (local text, or hub datasets for the big runs), a tokenizer, what to filter, how to hydrate, and
one table of integer weights per phase. Unknown keys are refused with the nearest known name.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from data_mixtures import order

CATEGORIES = ("web", "code", "math", "multilingual", "qa")
KINDS = ("text", "jsonl", "docstrings")
RESERVED_FOLDERS = ("corpus", "fetch", "hydrate", "filter", "tokenize", "order", "shuffle")
T = TypeVar("T")
MAX_VOCAB_SIZE = 65_536  # tokens are stored as uint16


@dataclass(frozen=True)
class Input:
    """One stream of local text: a reader (`kind`), the files it reads, and a cap in bytes of extracted text.

    paths, exclude: globs, where {stdlib} and {site_packages} are the running Python's folders and {corpus} is what the
    recipe's `corpus` writes. field: of a JSON line, the one that holds the text. A capped input is read in sequence, by
    one process; without max_bytes all files are read, many at a time.
    """

    kind: str
    paths: tuple[str, ...]
    max_bytes: int | None = None
    exclude: tuple[str, ...] = ()
    field: str = "text"

    def __post_init__(self) -> None:
        check_known("input kind", [self.kind], KINDS)
        if self.max_bytes is not None:
            check_integer("max_bytes", self.max_bytes)
        if not self.paths:
            raise ValueError(f"input kind {self.kind!r} needs paths = [glob, ...], got paths = {list(self.paths)}")


@dataclass(frozen=True)
class LocalSource:
    """A source made of text on this machine."""

    name: str
    category: str
    inputs: tuple[Input, ...]
    min_bytes: int = 100_000  # with less, the machine lacks the files, and a run would soon repeat those it has


@dataclass(frozen=True)
class HubSource:
    """A source on the dataset hub, for the 2B runs. `expected_tokens_b`: billions, before our own count.

    text_columns: names that the column of text may have; exactly one of them must be in the files.
    """

    name: str
    category: str
    repo: str
    revision: str
    configs: tuple[str, ...]
    licence: str
    gate: str
    expected_tokens_b: float
    text_columns: tuple[str, ...] = ("text",)
    needs_hydration: bool = False  # metadata only: the text must be fetched by repository, commit and path


@dataclass(frozen=True)
class TokenizerTraining:
    """A small sentencepiece BPE, trained on a sample of the sources' own text."""

    vocab_size: int
    train_bytes: int
    character_coverage: float


@dataclass(frozen=True)
class Filter:
    """Which documents are kept. `benchmarks`: name -> file or glob (JSON lines, Parquet) of items not to train on."""

    min_chars: int = 64
    max_chars: int = 10_000_000
    benchmarks: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Hydrate:
    """Where the text of metadata comes from, "local:FOLDER" or "module:attribute", and what share may be missing."""

    resolver: str
    max_missing_share: float = 0.01


@dataclass(frozen=True)
class Recipe:
    """A whole TOML.

    tokenizer: path of a sentencepiece model, or how to train one. corpus: a module that writes text for local sources;
    the plan stage runs it as `python -m MODULE --out DIR/corpus`.
    """

    seed: int
    seq_len: int
    windows_per_shard: int
    valid_per_10000: int
    max_document_chars: int
    epoch_cap: int
    tokenizer: Path | TokenizerTraining
    sources: tuple[LocalSource | HubSource, ...]
    phases: Mapping[str, Mapping[str, int]]  # phase -> source -> weight, for every source, in the order of `sources`
    filter: Filter = field(default_factory=Filter)
    hydrate: Hydrate | None = None
    corpus: str | None = None


def check_known(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse names that are not known, with the nearest one."""
    known = list(known)
    for name in given:
        if name not in known:
            raise ValueError(f"unknown {what} {name!r}; {nearest(str(name), known, 'use')}")


def nearest(name: str, known: list[str], choice: str) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"{choice} {known}"


def check_integer(name: str, value: Any, low: int = 1, high: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        raise ValueError(f"{name} = {value!r} must be an integer from {low}" + (f" to {high}" if high else ""))


def load(path: Path) -> Recipe:
    """Read and check a recipe. ValueError (prefixed with the file) for anything that is wrong in it."""
    try:
        return _recipe(_tables(path), path.parent)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _toml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"no such file: {path}")
    return tomllib.loads(path.read_text(encoding="utf-8"))


def _tables(path: Path) -> dict[str, Any]:
    """A recipe's tables. One with `base` has those of that recipe, its own weights, and leaves out more sources."""
    table = _toml(path)
    if "base" not in table:
        return table
    base = _tables(path.parent / table.pop("base"))
    without = table.pop("without", [])
    check_known("key of a recipe with a base:", table, [key for key in base if _is_phase(key)])
    phases = {key: {**base[key], **table.get(key, {})} for key in base if _is_phase(key)}
    left = {key: {name: w for name, w in weights.items() if name not in without} for key, weights in phases.items()}
    return {**base, **left, "without": [*base.get("without", []), *without]}


def _is_phase(key: str) -> bool:
    return re.fullmatch(r"phase\d+", key) is not None


def _recipe(table: dict[str, Any], folder: Path) -> Recipe:
    weights = {key: table.pop(key) for key in list(table) if _is_phase(key)}
    without = table.pop("without", [])  # sources of a shared list that this recipe leaves out
    if isinstance(table.get("sources"), str):
        table["sources"] = _toml(folder / table["sources"])["sources"]
    read = _made(Recipe, table, "recipe", phases={})
    for name in ("seq_len", "windows_per_shard", "max_document_chars", "epoch_cap"):
        check_integer(name, getattr(read, name))
    check_integer("seed", read.seed, low=0, high=2**63 - 1)
    check_integer("valid_per_10000", read.valid_per_10000, high=5000)
    check_known("source in without:", without, table["sources"])
    sources = tuple(_source(name, each) for name, each in table["sources"].items() if name not in without)
    hydrate = _hydrate(table["hydrate"], folder) if "hydrate" in table else None
    needed = any(isinstance(source, HubSource) and source.needs_hydration for source in sources)
    if not weights:
        raise ValueError("no mixture: add a [phase1] table with one integer weight per source")
    return dataclasses.replace(
        read,
        sources=sources,
        tokenizer=_tokenizer(table["tokenizer"], folder),
        filter=_filter(table.get("filter", {}), folder),
        hydrate=hydrate if needed else None,
        phases={phase: _weights(phase, given, [source.name for source in sources]) for phase, given in weights.items()},
    )


def _made(cls: Callable[..., T], table: Mapping[str, Any], what: str, **given: Any) -> T:
    """A dataclass from a table with keys as its fields are named, and fields that are not in the table."""
    fields = [f for f in dataclasses.fields(cast(Any, cls)) if f.name not in given]
    check_known(f"{what} key", table, [f.name for f in fields])
    missing = [f.name for f in fields if f.name not in table and f.default is f.default_factory is dataclasses.MISSING]
    if missing:
        raise ValueError(f"{what} lacks {missing}")
    return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}, **given)


def _source(name: str, values: dict[str, Any]) -> LocalSource | HubSource:
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name):
        raise ValueError(f"source name {name!r} becomes a folder: use lower-case letters, digits, '-', '_' and '.'")
    if name in RESERVED_FOLDERS:
        raise ValueError(f"source name {name!r} is that of a stage's folder beside it; choose another")
    what = f"source {name!r}"
    if "inputs" in values:
        values = {**values, "inputs": [_made(Input, table, f"{what}: input") for table in values["inputs"]]}
    kind: Callable[..., LocalSource | HubSource] = HubSource if "repo" in values else LocalSource
    found = _made(kind, values, what, name=name)
    check_known(f"category of {what}:", [found.category], CATEGORIES)
    return found


def _tokenizer(value: str | dict[str, Any], folder: Path) -> Path | TokenizerTraining:
    if isinstance(value, str):
        return folder / value  # an absolute path replaces the folder
    found = _made(TokenizerTraining, value, "tokenizer")
    check_integer("tokenizer.vocab_size", found.vocab_size, 300, MAX_VOCAB_SIZE)
    check_integer("tokenizer.train_bytes", found.train_bytes)
    return found


def _filter(table: dict[str, Any], folder: Path) -> Filter:
    found = _made(Filter, table, "filter")
    for name, path in found.benchmarks.items():
        if not isinstance(path, str):
            raise ValueError(f"filter.benchmarks.{name} = {path!r} must be the path of a file, or a glob")
    check_integer("filter.min_chars", found.min_chars)
    check_integer("filter.max_chars", found.max_chars, low=found.min_chars)
    benchmarks = {name: str(folder / path) for name, path in found.benchmarks.items()}
    return dataclasses.replace(found, benchmarks=benchmarks)


def _hydrate(table: dict[str, Any], folder: Path) -> Hydrate:
    found = _made(Hydrate, table, "hydrate")
    kind, _, where = str(found.resolver).partition(":")
    if not where:
        raise ValueError(f"hydrate.resolver = {found.resolver!r} must be 'local:FOLDER' or 'module:attribute'")
    if not 0 <= found.max_missing_share <= 1:
        raise ValueError(f"hydrate.max_missing_share = {found.max_missing_share!r} must be a share from 0 to 1")
    return dataclasses.replace(found, resolver=f"local:{folder / where}") if kind == "local" else found


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
