"""What a recipe TOML may say, read into frozen dataclasses and checked once; everything after this trusts it.

A recipe names sources (files of one's own, here or behind a URL, and datasets of the hub), a tokenizer, what to filter,
and one table of integer weights per phase. A key is a field of a dataclass here, with its help text below it:
docs/recipe-keys.md is made from them. Unknown keys are refused with the nearest known name.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from data_mixtures import order

KINDS = ("text", "jsonl", "parquet", "resolved")
RESERVED_FOLDERS = (
    "corpus",
    "fetch",
    "filter",
    "signatures",
    "links",
    "dedup",
    "tokenize",
    "runs",
    "order",
    "shuffle",
)
T = TypeVar("T")
LIMITS = {
    "seed": (0, 2**63 - 1),
    "valid_per_10000": (0, 5000),
    "vocab_size": (300, None),
}  # others begin at 1


@dataclass(frozen=True)
class Input:
    """Files of one kind, in `inputs` of a source."""

    kind: str
    """text (a document each), jsonl (one JSON object with the text a line) or parquet (a row each).
    Text and JSON lines may be compressed (.gz, .zst, .bz2). resolved: Parquet with a column sha1,
    with contents from content_url
    """
    paths: tuple[str, ...]
    """Globs (`**` for any folders), each of which must match: relative to the recipe's folder, absolute,
    or URLs that fsspec knows, such as s3://bucket/a/*.parquet, gs://...,
    hf://datasets/owner/name/*.jsonl. {stdlib}, {site_packages} and {corpus} are folders of the running
    Python, and what the recipe's `corpus` writes
    """
    field: str = "text"
    """Field (JSON lines) or column (Parquet) that holds the text"""
    exclude: tuple[str, ...] = ()
    """Patterns of paths to leave out, such as */drafts/*"""
    files: int | None = None
    """Read the first so many files alone, in the order of a hash of their names: a fair sample
    that can be extended
    """
    max_bytes: int | None = None
    """Cap on the extracted text, in bytes (not of Parquet); the input is then read in
    sequence, by one process
    """

    content_url: str = ""
    """Of kind resolved: URL of a content, with {sha1} in it: https, or s3, which takes two requests for each
    """
    max_missing_share: float = 0.01
    """Of kind resolved: share of the contents of a unit (row groups of 500,000 rows) that may be missing"""

    def __post_init__(self) -> None:
        check_known("input kind", [self.kind], KINDS)
        if not self.paths:
            raise ValueError(
                f"input kind {self.kind!r} needs paths = [glob, ...], got paths = {list(self.paths)}"
            )
        if self.kind == "parquet" and self.max_bytes is not None:
            raise ValueError(
                "max_bytes caps text that is extracted, and Parquet is read as it is; use files = N"
            )
        if (self.kind == "resolved") != ("{sha1}" in self.content_url):
            raise ValueError(
                f"content_url = {self.content_url!r} of kind {self.kind!r}: resolved, and it alone, needs a "
                "URL with {sha1}"
            )


@dataclass(frozen=True)
class Source:
    """Keys of every [sources.NAME]; NAME becomes a folder."""

    name: str
    category: str = "other"
    """Label of the source in statistics and evaluations, such as web, code or math; any name"""
    _: KW_ONLY
    licence: str = ""
    """Terms of the text, as a note"""
    expected_tokens_b: float | None = None
    """Billions of tokens, as others counted them; for estimates before there is a count of our own"""
    valid_per_10000: int | None = None
    """Documents held out of training, out of 10,000; default: the recipe's. 0: none. Sources with the same
    figure hold out the same texts; one with a smaller figure trains on some that others hold out
    """
    steps: tuple[str | dict, ...] | None = None
    """Filters of this source in place of those of [filter]"""
    keep: float = 1.0
    """Share of the documents to prepare: what the shuffle puts first, so a larger one keeps the same
    and adds to it
    """


@dataclass(frozen=True)
class LocalSource(Source):
    """A source made of files, here or behind a URL."""

    inputs: tuple[Input, ...] = ()
    """The files: tables { kind, paths, ... }"""
    min_bytes: int = 1
    """Refuse a source with less text, which a run would soon repeat"""


@dataclass(frozen=True)
class HubSource(Source):
    """A source that is a dataset of Parquet files on the Hugging Face hub, or in a --mirror of it."""

    repo: str = ""
    """Its id, owner/name"""
    revision: str = "main"
    """A commit (or its first digits), branch or tag; the plan keeps the commit"""
    configs: tuple[str, ...] = ("",)
    """Exact names of the folders to read; default: all"""
    text_columns: tuple[str, ...] = ("text",)
    """Names that the column of text may have; exactly one of them must be in the files"""
    files: int | None = None
    """As `files` of an input, of each folder"""
    gate: str = ""
    """How access is granted, as a note"""


@dataclass(frozen=True)
class TokenizerFile:
    """[tokenizer] with a path, or tokenizer = "PATH" for the path alone: a tokenizer that is there already."""

    path: str
    """A Hugging Face tokenizer.json or a sentencepiece model"""
    bos: str | None = None
    """Special token of a tokenizer.json that begins each document; default: what
    tokenizer_config.json beside it says, or a well-known name such as <s>; if it names none but
    `eos`, that one alone stands before each document
    """
    eos: str | None = None
    """Special token of a tokenizer.json that ends each document; default: as for `bos`"""


@dataclass(frozen=True)
class TokenizerTraining:
    """[tokenizer]: a small sentencepiece BPE, trained on a sample of the sources' own text."""

    vocab_size: int
    """Pieces, 300 or more"""
    train_bytes: int
    """Size of the sample"""
    character_coverage: float = 0.9995
    """Share of the sample's characters that become pieces; the others go through bytes"""


@dataclass(frozen=True)
class Filter:
    """[filter]: which documents are kept."""

    min_chars: int = 64
    """Shortest document"""
    max_chars: int = 10_000_000
    """Longest document"""
    steps: tuple[str | dict, ...] = ()
    """Filters of datatrove, in this order: names, or tables { name = ..., argument = ...
    }. docs/data.md lists them
    """
    repeated_ngrams: bool = False
    """Drop documents in which up to 13 tokens are repeated 32 times in a row"""
    benchmarks: Mapping[str, str] = field(default_factory=dict)
    """[filter.benchmarks]: name = file or glob (JSON lines, Parquet) of items; documents that
    hold one are dropped
    """


@dataclass(frozen=True)
class Dedup:
    """[dedup]: near copies of documents, over all sources."""

    minhash: bool = False
    """Drop documents of which a near copy stands in a source before, earlier in the same source,
    or is held out
    """
    n_grams: int = 5
    """Words in a row that are compared"""
    buckets: int = 14
    """Two documents are near copies when all hashes of one bucket are equal"""
    hashes_per_bucket: int = 8
    """14 buckets of 8 find 65% of the documents that share 72% of their n-grams, and 92% of
    those that share 80%
    """
    numbers: bool = True
    """Whether texts that differ in numbers alone differ; false, as in datatrove, takes
    most of generated arithmetic
    """
    language: str = ""
    """Of datatrove's word tokenizers, for text without spaces between words, such as zh
    or ja; default: spaces
    """


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The keys at the top of a recipe."""

    tokenizer: TokenizerFile | TokenizerTraining
    """Path of a Hugging Face tokenizer.json or of a sentencepiece model, or the table [tokenizer]"""
    sources: tuple[LocalSource | HubSource, ...]
    """[sources.NAME], or the path of a TOML with such tables"""
    phases: Mapping[str, Mapping[str, int]]
    """[phase1], [phase2], ...: NAME = weight for every source, 0 where the phase does not use it. Integers
    whose sum is at most 32,768: the share of a source is its weight over the sum, and the order repeats
    after that many sequences
    """
    seq_len: int = 4096
    """Tokens of a training sequence"""
    seed: int = 1
    """Decides the order of documents"""
    windows_per_shard: int = 32_768
    """Sequences of seq_len tokens in one shard file"""
    valid_per_10000: int = 100
    """Documents held out of training for validation, out of 10,000, by a fixed range of their hashes;
    0: none. A source whose held-out documents do not fill one sequence has nothing to validate on,
    which the summary shows
    """
    max_document_chars: int = 100_000
    """Longer documents are cut, after a newline where there is one"""
    max_dropped_share: float = 0.05
    """Share of a source's documents that may be unreadable or damaged before the preparation stops"""
    epoch_cap: int = 4
    """How often a run may read a source, over all phases; a job that would read it more often is refused"""
    filter: Filter = field(default_factory=Filter)
    """The table [filter]"""
    dedup: Dedup = field(default_factory=Dedup)
    """The table [dedup]"""
    keep: Mapping[str, float] = field(default_factory=dict)
    """[keep]: NAME = `keep` of a source, in place of its own; `python -m tools.plan
    JOB.toml` writes this table
    """
    files: Mapping[str, int] = field(default_factory=dict)
    """[files]: NAME = `files` of a source, in place of its own"""
    corpus: str | None = None
    """Module that writes text for {corpus} before files are listed, run as `python
    -m MODULE --out DIR/corpus`
    """
    folder: Path = Path()  # no key: where the recipe lies

    def source(self, name: str) -> Source:
        """A source by name; with the defaults for a name that the recipe lacks."""
        return next((each for each in self.sources if each.name == name), Source(name))

    def held_out_of(self, source: str) -> int:
        """valid_per_10000 of a source by name."""
        own = self.source(source).valid_per_10000
        return self.valid_per_10000 if own is None else own


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
    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or value < low
        or (high is not None and value > high)
    ):
        raise ValueError(
            f"{name} = {value!r} must be an integer from {low}" + (f" to {high}" if high else "")
        )


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
    """A recipe's tables. One with `base` has those of that recipe, changed where it says something else."""
    table = _toml(path)
    if "base" not in table:
        return table
    base = _tables(path.parent / table.pop("base"))
    return base | {
        key: base.get(key, {}) | value if isinstance(value, dict) else value for key, value in table.items()
    }


def _listed(table: dict[str, Any], used: set[str]) -> dict[str, Any]:
    """Those sources of a shared list that a phase uses; what [repos."owner/name"] says, all
    of its sources have.
    """
    sources = dict(table.get("sources", {}))
    for repo, shared in table.get("repos", {}).items():
        own = shared.pop("sources")
        sources |= {name: {"repo": repo, **shared, **values} for name, values in own.items()}
    return {name: values for name, values in sources.items() if name in used}


def _recipe(table: dict[str, Any], folder: Path) -> Recipe:
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
        "dedup": lambda given: _made(Dedup, given, "dedup"),
    }
    values = {key: made[key](value) if key in made else value for key, value in table.items()}
    read = _made(Recipe, values, "recipe", phases={}, folder=folder)
    if not weights:
        raise ValueError("no mixture: add a [phase1] table with one integer weight per source")
    names = [source.name for source in read.sources]
    phases = {phase: _weights(phase, given, names) for phase, given in weights.items()}
    return dataclasses.replace(read, phases=phases)


def _made(cls: Callable[..., T], table: Any, what: str, **given: Any) -> T:
    """A dataclass from a table with keys as its fields are named, and fields that are not in the table."""
    if not isinstance(table, dict):
        raise ValueError(f"{what}: {table!r} must be a table of keys")
    fields = [f for f in dataclasses.fields(cast(Any, cls)) if f.name not in given]
    check_known(f"{what} key", table, [f.name for f in fields])
    missing = [
        f.name
        for f in fields
        if f.name not in table and f.default is f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"{what} lacks {missing}")
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in table.items()
    }
    for key, value in values.items():
        if not _fits(value, hints[key]):
            said = list(value) if isinstance(value, tuple) else value
            raise ValueError(f"{what}: {key} = {said!r} must be of type {in_toml(hints[key])}")
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
    if isinstance(hint, types.UnionType):
        return " or ".join(
            dict.fromkeys(in_toml(kind) for kind in typing.get_args(hint) if kind is not type(None))
        )
    if typing.get_origin(hint) is tuple:
        return f"list of {in_toml(typing.get_args(hint)[0])}s"
    return {str: "string", Path: "string", int: "integer", float: "number", bool: "boolean"}.get(
        hint, "table"
    )


def _source(name: str, values: dict[str, Any]) -> LocalSource | HubSource:
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name):
        raise ValueError(
            f"source name {name!r} becomes a folder: use lower-case letters, digits, '-', '_' and '.'"
        )
    if name in RESERVED_FOLDERS:
        raise ValueError(f"source name {name!r} is that of a stage's folder beside it; choose another")
    what = f"source {name!r}"
    if not isinstance(values, dict) or ("inputs" in values) == ("repo" in values):
        raise ValueError(
            f"{what} needs either inputs = [{{ kind = ..., paths = [...] }}] or repo = 'owner/name'"
        )
    kind: Callable[..., LocalSource | HubSource] = HubSource
    if "inputs" in values:
        kind, inputs = (
            LocalSource,
            values["inputs"] if isinstance(values["inputs"], list) else [values["inputs"]],
        )
        values = {**values, "inputs": [_input(table, what) for table in inputs]}
    found = _made(kind, values, what, name=name)
    if not 0 < found.keep <= 1:
        raise ValueError(f"{what}: keep = {found.keep!r} must be a share above 0, at most 1")
    return found


def _input(table: Any, what: str) -> Input:
    """An input whose relative paths begin with {recipe}, so that they and the plan stay the
    same in another folder.
    """
    found = _made(Input, table, f"{what}: input")
    elsewhere = re.compile(r"/|\{|\w+://")
    paths = (each if elsewhere.match(each) else f"{{recipe}}/{each}" for each in found.paths)
    return dataclasses.replace(found, paths=tuple(paths))


def _tokenizer(value: Any, folder: Path) -> TokenizerFile | TokenizerTraining:
    table = {"path": value} if isinstance(value, str) else value
    if isinstance(table, dict) and "path" in table:
        given = _made(TokenizerFile, table, "tokenizer")
        return dataclasses.replace(
            given, path=str(folder / given.path)
        )  # an absolute path replaces the folder
    return _made(TokenizerTraining, value, "tokenizer")


def _filter(table: dict[str, Any], folder: Path) -> Filter:
    found = _made(Filter, table, "filter")
    for name, path in found.benchmarks.items():
        if not isinstance(path, str):
            raise ValueError(f"filter.benchmarks.{name} = {path!r} must be the path of a file, or a glob")
    check_integer("filter.max_chars", found.max_chars, low=found.min_chars)
    benchmarks = {name: str(folder / path) for name, path in found.benchmarks.items()}
    return dataclasses.replace(found, benchmarks=benchmarks)


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
