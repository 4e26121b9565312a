"""What the data of a run costs to prepare, and which part of each source it needs,
before anything is downloaded.

A run seldom reads whole sources, and what it does not read need not be stored, so a recipe can take a part of a source:

    keep = 0.12  the documents that the shuffle would put first: exact, uniform, and extended by a larger one. All files
                 are fetched; the other documents are neither tokenized nor stored.
    files = 300  that many files alone, in the order of a hash of their names. The others are not even fetched, but how
                 many tokens are in a file is known only roughly.

So `files` comes first where a source has much more than is needed, and `keep` takes the rest. How many
files a source has is known when `python -m data_mixtures plan` has listed them (--data DIR); offline
there is `keep` alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_mixtures import recipe, tokenizer
from data_mixtures.stages import stage

Result = dict[str, Any]
MARGIN = 0.1  # of what is needed, for what filters drop and for counts that are off
MANY = 0.5  # `files` where less than this share of a source is needed
WHOLE = 0.9  # a part larger than this is not worth a limit
MIN_TOKENS = 1e9  # of a source, however little is read of it
TOKENS_AS_COUNTED = (
    1.15  # Llama-2 tokens for each that others counted, mostly with 128k pieces; the low end of 1.15-1.4
)
RAW_BYTES = 1.79  # of Parquet for a token as counted: Nemotron-CC-v2, 10.3 TB of 5.75e12
TEXT_BYTES = 3.5  # of text for a Llama-2 token
FILE_BYTES = 1.6e9  # of a hub file, 1.0 to 2.4 GB
SHARD_BYTES = 2  # of a token
# a second of one core, measured: docs/benchmarks/2026-11-26-text.md, 2026-11-25-tokenize.md, 2026-11-21-data.md
FILTER_BYTES, UNKEPT_BYTES, SHUFFLE_TOKENS = 55e6, 120e6, 90e6
# bytes of text: tokenizer.json and sentencepiece with the fast encoder, and each by its own library
TOKENIZE_BYTES = {
    (".json", True): 90e6,
    (".model", True): 14e6,
    (".json", False): 1e6,
    (".model", False): 2.5e6,
}


def listed_files(out: Path | None) -> dict[str, list[int]]:
    """Bytes of each file of the hub sources that are planned in a data folder."""
    planned = stage.read_plan(out)["sources"] if out is not None else {}
    hub = {name: each["units"] for name, each in planned.items() if each["kind"] == "hub"}
    return {name: [unit["bytes"] for unit in units] for name, units in hub.items()}


def tokenize_bytes(given: recipe.TokenizerFile | recipe.TokenizerTraining) -> float:
    """Bytes of text that one core tokenizes in a second, by the kind of tokenizer; one that is not here yet is
    taken to have a fast encoder.
    """
    if not isinstance(given, recipe.TokenizerFile):
        return TOKENIZE_BYTES[".model", True]
    path = Path(given.path)
    fast = not path.is_file() or tokenizer.load_given(given).fast is not None
    return TOKENIZE_BYTES[".json" if path.suffix == ".json" else ".model", fast]


def parts(sources: Sequence[Result], listed: Mapping[str, Sequence[int]]) -> list[Result]:
    """Each source with what is needed of it, the `keep` and `files` that give it, and what that costs.

    sources: name, tokens_so_far (of all phases), expected_tokens, tokenize_bytes a second, and the recipe's
    `files`, which stay. Those that are prepared are left out, and those without expected tokens.
    """
    return [
        _part(each, listed.get(each["name"], ()))
        for each in sources
        if each["expected_tokens"] and not each["prepared"]
    ]


def _part(source: Result, sizes: Sequence[int]) -> Result:
    need, pool = source["tokens_so_far"], TOKENS_AS_COUNTED * source["expected_tokens"]
    share = min(1.0, max(need * (1 + MARGIN), MIN_TOKENS) / pool)
    files, of_files, raw = source["files"], 1.0, RAW_BYTES * source["expected_tokens"]
    if files is not None:  # whatever is listed are those files
        of_files = min(1.0, (sum(sizes) or files * FILE_BYTES) / raw)
    elif sizes:
        raw = sum(sizes)
        if share < MANY:
            files = math.ceil(len(sizes) * share * (1 + MARGIN))  # files differ in size
            of_files = files / len(sizes)
    keep = min(1.0, share / of_files)
    keep = 1.0 if keep > WHOLE else math.ceil(100 * keep) / 100
    stored = pool * of_files * keep
    text = TEXT_BYTES * pool * of_files
    filter_s = text * keep / FILTER_BYTES + text * (1 - keep) / UNKEPT_BYTES
    tokenize_s = TEXT_BYTES * stored / source["tokenize_bytes"]
    return {
        "name": source["name"], "need_tokens": need, "pool_tokens": pool, "keep": keep, "files": files,
        "kept_epochs": need / stored, "fetched_bytes": raw * of_files, "stored_tokens": stored,
        "units": files or len(sizes) or math.ceil(raw / FILE_BYTES),
        "core_hours": (filter_s + tokenize_s + stored / SHUFFLE_TOKENS) / 3600,
    }  # fmt: skip


def totals(rows: Sequence[Result]) -> Result:
    """Sums, and the largest disk space of docs/data.md's loop, which frees what the next stage has read."""
    names = ("need_tokens", "pool_tokens", "fetched_bytes", "stored_tokens", "units", "core_hours")
    stored = peak = 0.0
    for row in sorted(rows, key=working_bytes, reverse=True):
        peak = max(peak, stored + working_bytes(row))
        stored += SHARD_BYTES * row["stored_tokens"]
    return {
        **{name: sum(row[name] for row in rows) for name in names},
        "shard_bytes": stored,
        "peak_bytes": peak,
    }


def working_bytes(row: Result) -> float:
    """Disk space while a source is prepared: raw and documents, documents and tokens, or
    tokens, runs and shards.
    """
    documents, tokens = row["fetched_bytes"] * row["keep"], SHARD_BYTES * row["stored_tokens"]
    return max(row["fetched_bytes"] + documents, documents + tokens, 3 * tokens)


def toml(rows: Sequence[Result]) -> str:
    """The tables of a recipe that take these parts."""
    lines = []
    for key, absent in (("keep", 1.0), ("files", None)):
        given = [f"{row['name']} = {row[key]}" for row in rows if row[key] != absent]
        lines += [f"[{key}]", *given, ""] if given else []
    return "\n".join(lines)


def table(rows: Sequence[Result]) -> tuple[str, list[str], list[list[str]]]:
    """(title, columns, rows) of the report: 1e9 tokens and TB."""
    total = totals(rows)
    cells = [
        [row["name"], f"{row['need_tokens'] / 1e9:,.1f}", f"{row['pool_tokens'] / 1e9:,.1f}", f"{row['keep']:g}",
         "all" if row["files"] is None else f"{row['files']:,}", f"{row['kept_epochs']:.2f}",
         f"{row['fetched_bytes'] / 1e12:.2f}", f"{SHARD_BYTES * row['stored_tokens'] / 1e12:.2f}",
         f"{row['units']:,}", f"{row['core_hours']:,.0f}"]
        for row in rows
    ]  # fmt: skip
    whole = ["all", f"{total['need_tokens'] / 1e9:,.1f}", f"{total['pool_tokens'] / 1e9:,.1f}", "", "", "",
             f"{total['fetched_bytes'] / 1e12:.2f}", f"{total['shard_bytes'] / 1e12:.2f}", f"{total['units']:,}",
             f"{total['core_hours']:,.0f}"]  # fmt: skip
    columns = ["source", "read", "has", "keep", "files", "epochs", "fetched", "shards", "units", "core-h"]
    title = f"preparation, in 1e9 tokens and TB, estimated; source by source {total['peak_bytes'] / 1e12:.1f} TB of disk"  # noqa: E501
    return title, columns, [*cells, whole]
