"""The keys of a recipe TOML as frozen dataclasses, whose types and limits pydantic checks.

A recipe names sources (local files, files behind a URL, datasets of the hub), a tokenizer, what to
filter, and one table of integer weights per phase. A key is a field of a dataclass here, with its
help text below it: docs/recipe-keys.md is made from them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, field
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, Strict
from pydantic.dataclasses import dataclass

KINDS = ("text", "jsonl", "parquet", "resolved")
RESERVED_FOLDERS = (
    "corpus",
    "fetch",
    "filter",
    "signatures",
    "bands",
    "dedup",
    "held_out",
    "scan",
    "contained",
    "tokenize",
    "runs",
    "order",
    "shuffle",
)
PACKINGS = ("concat", "best_fit")
Positive = Annotated[int, Strict(), Field(ge=1)]
Share = Annotated[float, Strict(), Field(ge=0, le=1)]
PartAboveZero = Annotated[float, Strict(), Field(gt=0, le=1)]
HeldOut = Annotated[int, Strict(), Field(ge=0, le=5000)]  # documents of 10,000
Switch = Annotated[bool, Strict()]
_CONFIG = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_CONFIG)
class Input:
    """Files of one kind, in `inputs` of a source."""

    kind: str
    """text (a document per file), jsonl (a JSON object per line) or parquet (a document per row).
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
    files: Positive | None = None
    """Read only this many files, in the order of a hash of their names; a larger number only adds files"""
    max_bytes: Positive | None = None
    """Limit of the extracted text, in bytes (not for Parquet); one process then reads the input"""

    content_url: str = ""
    """Of kind resolved: URL of a content, with {sha1} in it: https, or s3, which takes two requests for each
    """
    max_missing_share: Share = 0.01
    """Of kind resolved: share of the contents of a unit (row groups of 500,000 rows) that may be missing"""

    def __post_init__(self) -> None:
        check_known("input kind", [self.kind], KINDS)
        if not self.paths:
            raise ValueError(f"input kind {self.kind!r} needs paths = [glob, ...], got paths = []")
        if self.kind == "parquet" and self.max_bytes is not None:
            raise ValueError(
                "max_bytes caps text that is extracted, Parquet is read as it is; use files = N"
            )
        if (self.kind == "resolved") != ("{sha1}" in self.content_url):
            url = f"content_url = {self.content_url!r}"
            raise ValueError(
                f"{url} of kind {self.kind!r}: resolved, and it alone, needs a URL with {{sha1}}"
            )


@dataclass(frozen=True, config=_CONFIG)
class Source:
    """Keys of every [sources.NAME]; NAME becomes a folder."""

    name: str
    category: str = "other"
    """Label of the source in statistics and evaluations, such as web, code or math; any name"""
    _: KW_ONLY
    licence: str = ""
    """Terms of the text, as a note"""
    expected_tokens_b: Annotated[float, Strict()] | None = None
    """Published number of tokens, in billions; for estimates before preparation"""
    valid_per_10000: HeldOut | None = None
    """Documents held out of training, out of 10,000; default: the recipe's. 0: none. Sources with the same
    figure hold out the same texts; one with a smaller figure trains on some that others hold out
    """
    steps: tuple[str | dict, ...] | None = None
    """Filters of this source in place of those of [filter]"""
    keep: PartAboveZero = 1.0
    """Share of the documents to prepare; a larger one only adds documents"""


@dataclass(frozen=True, config=_CONFIG)
class LocalSource(Source):
    """A source made of files, here or behind a URL."""

    inputs: tuple[Input, ...] = ()
    """The files: tables { kind, paths, ... }"""
    min_bytes: Positive = 1
    """Refuse a source with less text, which a run would soon repeat"""


@dataclass(frozen=True, config=_CONFIG)
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
    files: Positive | None = None
    """As `files` of an input, for each folder"""
    gate: str = ""
    """How access is granted, as a note"""


@dataclass(frozen=True, config=_CONFIG)
class TokenizerFile:
    """[tokenizer] with a path, or tokenizer = "PATH" for the path alone: an existing tokenizer."""

    path: str
    """A Hugging Face tokenizer.json or a sentencepiece model"""
    bos: str | None = None
    """Special token of a tokenizer.json that begins each document; default: that of the
    tokenizer_config.json beside it, or a well-known name such as <s>; if only `eos` is known, it
    precedes each document
    """
    eos: str | None = None
    """Special token of a tokenizer.json that ends each document; default: as for `bos`"""


@dataclass(frozen=True, config=_CONFIG)
class TokenizerTraining:
    """[tokenizer]: a small sentencepiece BPE, trained on a sample of the sources' own text."""

    vocab_size: Annotated[int, Strict(), Field(ge=300)]
    """Pieces, 300 or more"""
    train_bytes: Positive
    """Size of the sample"""
    character_coverage: Share = 0.9995
    """Share of the sample's characters that become pieces; the others fall back to bytes"""


@dataclass(frozen=True, config=_CONFIG)
class Filter:
    """[filter]: which documents are kept."""

    min_chars: Positive = 64
    """Minimum length of a document, in characters"""
    max_chars: Positive = 10_000_000
    """Maximum length of a document, in characters"""
    steps: tuple[str | dict, ...] = ()
    """Filters of datatrove, in order: names, or { name = ..., argument = ... }. docs/data.md lists them"""
    repeated_ngrams: Switch = False
    """Drop documents in which up to 13 tokens are repeated 32 times in a row; `tokenize` looks for them"""
    benchmarks: Mapping[str, str] = field(default_factory=dict)
    """[filter.benchmarks]: name = file or glob (JSON lines, Parquet); documents with an item are dropped"""

    def __post_init__(self) -> None:
        if self.max_chars < self.min_chars:
            raise ValueError(
                f"max_chars = {self.max_chars} is less than min_chars = {self.min_chars}"
            )


@dataclass(frozen=True, config=_CONFIG)
class Dedup:
    """[dedup]: near duplicates, over all sources. A source's exact duplicates are always dropped."""

    minhash: Switch = False
    """Drop near duplicates of earlier documents, in the recipe's order, and of held-out ones"""
    contained_share: Share = 0.0
    """Drop held-out documents of which this share, by runs of 13 words, occurs in training text, such as 0.3; 0: none
    """
    n_grams: Positive = 5
    """Words per shingle"""
    buckets: Positive = 14
    """MinHash buckets (bands); documents are near duplicates if all hashes of one are equal"""
    hashes_per_bucket: Positive = 8
    """14 buckets of 8 find 65% of the documents that share 72% of their n-grams, 92% of 80%"""
    numbers: Switch = True
    """Whether texts that differ only in numbers are different; false drops most generated arithmetic"""
    language: str = ""
    """Language of datatrove's word tokenizer, for text without spaces, such as zh; default: split at spaces"""


@dataclass(frozen=True, kw_only=True, config=_CONFIG)
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
    seq_len: Positive = 4096
    """Tokens of a training sequence"""
    packing: str = "concat"
    """concat: documents in a row, cut every seq_len tokens. best_fit: each document in one window if it fits,
    with padding, which is reported and never trained on
    """
    seed: Annotated[int, Strict(), Field(ge=0, le=2**63 - 1)] = 1
    """Seed of the order of documents"""
    windows_per_shard: Positive = 32_768
    """Sequences of seq_len tokens in one shard file"""
    valid_per_10000: HeldOut = 100
    """Documents held out of training for validation, out of 10,000, by a fixed range of their hashes;
    0: none. A source whose held-out documents do not fill one sequence has nothing to validate on,
    which the summary shows
    """
    max_document_chars: Positive | None = None
    """Cut longer documents, after a newline where there is one; default: documents stay whole"""
    max_dropped_share: Share = 0.05
    """Share of a source's documents that may be unreadable or damaged before the preparation stops"""
    epoch_cap: Positive = 4
    """How often a run may read a source, over all phases; a job that would read it more often is refused"""
    filter: Filter = field(default_factory=Filter)
    """The table [filter]"""
    dedup: Dedup = field(default_factory=Dedup)
    """The table [dedup]"""
    keep: Mapping[str, float] = field(default_factory=dict)
    """[keep]: NAME = `keep` of a source, in place of its own; `python -m tools.plan JOB.toml` writes it"""
    files: Mapping[str, int] = field(default_factory=dict)
    """[files]: NAME = `files` of a source, in place of its own"""
    corpus: str | None = None
    """Module that writes text for {corpus} before files are listed: `python -m MODULE --out DIR/corpus`"""
    folder: Path = Path()  # no key: where the recipe lies

    def __post_init__(self) -> None:
        check_known("packing", [self.packing], PACKINGS)

    def source(self, name: str) -> Source:
        """Find a source by name; one with all defaults if the recipe lacks it."""
        return next((entry for entry in self.sources if entry.name == name), Source(name))

    def valid_per_10000_of(self, source: str) -> int:
        override = self.source(source).valid_per_10000
        return self.valid_per_10000 if override is None else override


def check_known(what: str, names: Iterable[str], choices: Iterable[str]) -> None:
    """Raise ValueError for a name that is no choice, with the nearest one."""
    choices = list(choices)
    for name in names:
        if name not in choices:
            raise ValueError(f"unknown {what} {name!r}; {nearest(str(name), choices, 'use')}")


def nearest(name: str, choices: list[str], hint: str) -> str:
    matches = difflib.get_close_matches(name, choices, n=1)
    return f"did you mean {matches[0]!r}?" if matches else f"{hint} {choices}"
