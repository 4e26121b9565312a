"""Estimate how much of each source a run needs, and the network and disk to prepare it.

A recipe can take a part of a source:

    keep = 0.12  the documents that the shuffle would put first; all files are fetched
    files = 300  that many files alone, in the order of a hash of their names
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_mixtures.stages import stage

Result = dict[str, Any]
# of what is needed, for what filters drop and for counts that are off
MARGIN = 0.1
# `files` where less than this share of a source is needed
MANY = 0.5
# a part larger than this is not worth a limit
WHOLE = 0.9
# of a source, however little is read of it
MIN_TOKENS = 1e9
# Llama-2 tokens for each that others counted, mostly with 128k pieces; the low end of 1.15 to 1.4
TOKENS_AS_COUNTED = 1.15
# of Parquet for a token as counted: Nemotron-CC-v2, 10.3 TB of 5.75e12
RAW_BYTES = 1.79
# of a hub file, 1.0 to 2.4 GB
FILE_BYTES = 1.6e9
# of a token
SHARD_BYTES = 2


def list_files(out: Path | None) -> dict[str, list[int]]:
    """Return the bytes of each file of the hub sources planned in a data folder."""
    planned = stage.read_plan(out)["sources"] if out is not None else {}
    hub = {name: source["units"] for name, source in planned.items() if source["kind"] == "hub"}
    return {name: [unit["bytes"] for unit in units] for name, units in hub.items()}


def parts(sources: Sequence[Result], listed: Mapping[str, Sequence[int]]) -> list[Result]:
    """Return what is needed of each source, the `keep` and `files` for it, and the cost.

    Leaves out prepared sources and those without expected tokens.

    Args:
        sources: name, tokens_so_far (of all phases), expected_tokens and the recipe's `files`.
    """
    return [
        source_part(source, listed.get(source["name"], ()))
        for source in sources
        if source["expected_tokens"] and not source["prepared"]
    ]


def source_part(source: Result, sizes: Sequence[int]) -> Result:
    need, pool = source["tokens_so_far"], TOKENS_AS_COUNTED * source["expected_tokens"]
    share = min(1.0, max(need * (1 + MARGIN), MIN_TOKENS) / pool)
    # `files` first where a source has much more than is needed, `keep` takes the rest; how many
    # files there are is known when `python -m data_mixtures plan` has listed them
    files, file_share, raw = source["files"], 1.0, RAW_BYTES * source["expected_tokens"]
    if files is not None:
        # whatever is listed are those files
        file_share = min(1.0, (sum(sizes) or files * FILE_BYTES) / raw)
    elif sizes:
        raw = sum(sizes)
        if share < MANY:
            # files differ in size
            files = math.ceil(len(sizes) * share * (1 + MARGIN))
            file_share = files / len(sizes)
    keep = min(1.0, share / file_share)
    keep = 1.0 if keep > WHOLE else math.ceil(100 * keep) / 100
    stored = pool * file_share * keep
    return {
        "name": source["name"],
        "need_tokens": need,
        "pool_tokens": pool,
        "keep": keep,
        "files": files,
        "stored_tokens": stored,
        "units": files or len(sizes) or math.ceil(raw / FILE_BYTES),
        "fetched_bytes": raw * file_share,
        "shard_bytes": SHARD_BYTES * stored,
    }


def totals(rows: Sequence[Result]) -> Result:
    """Return sums, and the peak disk space of docs/data.md's loop."""
    # the loop frees what the next stage has read
    stored = peak = 0.0
    for row in sorted(rows, key=working_bytes, reverse=True):
        peak = max(peak, stored + working_bytes(row))
        stored += row["shard_bytes"]
    names = ("need_tokens", "pool_tokens", "stored_tokens", "units", "fetched_bytes", "shard_bytes")
    return {name: sum(row[name] for row in rows) for name in names} | {"peak_bytes": peak}


def working_bytes(row: Result) -> float:
    documents, tokens = row["fetched_bytes"] * row["keep"], row["shard_bytes"]
    # raw and documents; documents and tokens; tokens, runs and shards
    return max(row["fetched_bytes"] + documents, documents + tokens, 3 * tokens)


def toml(rows: Sequence[Result]) -> str:
    """Return the tables of a recipe that take these parts."""
    lines = []
    for key, absent in (("keep", 1.0), ("files", None)):
        entries = [f"{row['name']} = {row[key]}" for row in rows if row[key] != absent]
        lines += [f"[{key}]", *entries, ""] if entries else []
    return "\n".join(lines)
