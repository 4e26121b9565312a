"""stats: what prepared data holds, as tables on the terminal and in DIR/stats.json; `show` has the documents.

Tokens by source against the mixtures, lengths of documents, what was dropped and why, and which sources share
documents. These are counted exactly: all tokenized units are sorted by the same key, so one merge over ranges
of keys brings equal ids together, whatever source they come from.
"""

from __future__ import annotations

from concurrent.futures import Executor, ThreadPoolExecutor
from itertools import combinations
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from data_mixtures import mixture, shards
from data_mixtures.shards import Json
from data_mixtures.stages import blocks, sorted_runs, stage
from data_mixtures.stages.run import figures
from data_mixtures.stages.tokenize import INDEX

JSON = "stats.json"
LENGTH_BINS = 33  # bin k: lengths from 2**k to 2**(k+1) - 1 tokens
PAIRS = 40  # of sources that share documents are shown
_FACTS = ("category", "read", "kept", "dropped", "contamination", "documents", "tokens", "bytes", "windows")


def write(out: Path, sources: tuple[str, ...], console: Console, workers: int) -> Json:
    """Print, and write stats.json; returns what it holds."""
    manifests = {source: shards.read_manifest(out / source) for source in sources}
    with ThreadPoolExecutor(workers) as pool:
        facts = {name: _facts(out / name, manifest, pool) for name, manifest in manifests.items()}
        shared = shared_documents(out, sources, pool)
    result = {"sources": facts, "phases": _phases(out), "shared_documents": shared}
    shards.write_json(out / JSON, result)
    for table in (_sources_table, _dropped_table, _shared_table):
        console.print(table(result))
    if "unknown" in shared:
        console.print(f"Shared documents are not counted: {shared['unknown']}", soft_wrap=True)
    console.print(f"{out / JSON}", soft_wrap=True)
    return result


def _facts(folder: Path, manifest: Json, pool: Executor) -> Json:
    facts = {name: manifest[name] for name in _FACTS}
    windows = manifest["valid"]["windows"]
    return {**facts, "valid_windows": windows, "lengths": _lengths(folder, manifest, pool)}


def _lengths(folder: Path, manifest: Json, pool: Executor) -> Json:
    """Lengths in tokens of the documents that begin in a window of the source."""
    paths = [folder / entry["docs"]["name"] for entry in manifest["shards"]]
    lengths = np.concatenate([index[1] for index in pool.map(shards.read_documents, paths)])
    bins = np.frexp(lengths.astype(np.float64))[1] - 1  # exact: the exponent of a power of two
    histogram = np.bincount(bins, minlength=LENGTH_BINS).tolist()
    return {"histogram": histogram, "mean": round(float(lengths.mean()), 2), "longest": int(lengths.max())}


def _phases(out: Path) -> Json:
    """The share of each source in every phase that is pinned."""
    phases = {}
    for path in sorted(out.glob("*.lock.json")):
        lock = mixture.read_lock(path)
        weights = {entry["name"]: entry["weight"] for entry in lock["sources"]}
        shares = {name: weight / sum(weights.values()) for name, weight in weights.items()}
        phases[lock["phase"]] = {"fingerprint": lock["fingerprint"], "shares": shares}
    return phases


def _sources_table(stats: Json) -> Table:
    sources, phases = stats["sources"], stats["phases"]
    total = sum(each["tokens"] for each in sources.values())
    rows = []
    for name, each in sources.items():
        shares = [each["tokens"] / total, *(phase["shares"].get(name, 0) for phase in phases.values())]
        lengths = each["lengths"]
        counts = each["documents"], each["windows"], each["valid_windows"], lengths["longest"]
        row = [name, each["category"], f"{each['tokens']:,}", *(f"{share:.2%}" for share in shares)]
        rows.append([*row, *(f"{count:,}" for count in counts), f"{lengths['mean']:,.0f}"])
    head = ("source", "category", "tokens", "share", *phases)
    return figures("Sources", (*head, "documents", "windows", "held out", "longest", "mean"), rows)


def _dropped_table(stats: Json) -> Table:
    sources = stats["sources"]
    reasons = sorted({name for each in sources.values() for name, count in each["dropped"].items() if count})
    rows = []
    for name, each in sources.items():
        counts = each["read"], *(each["dropped"].get(reason, 0) for reason in reasons)
        rows.append([name, *(f"{count:,}" for count in counts), f"{each['kept'] / max(each['read'], 1):.2%}"])
    return figures("Dropped", ("source", "read", *reasons, "kept"), rows)


def _shared_table(stats: Json) -> Table:
    rows = []
    for pair in stats["shared_documents"].get("pairs", ())[:PAIRS]:
        count, names = pair["documents"], pair["sources"]
        of = [f"{count / stats['sources'][name]['documents']:.2%}" for name in names]
        rows.append([", ".join(names), f"{count:,}", *of])
    head = ("sources", "documents", "of the first", "of the second")
    return figures("Documents that sources share", head, rows)


def shared_documents(out: Path, sources: tuple[str, ...], pool: Executor) -> Json:
    """{"pairs": [{"sources", "documents"}]}: of equal ids; {"unknown": why} when units were deleted."""
    documents = 0
    for source in sources:
        name, units = sorted_runs.made_by(out, source)
        for unit in units:
            receipt = stage.read_receipt(out, name, unit)
            if receipt is None or receipt.get("freed"):
                return {"unknown": f"{stage.unit_folder(out, name, unit)} is not there any more"}
            documents += receipt["counts"]["documents"]
    ranges = sorted_runs.key_ranges(documents)
    shared = np.sum(list(pool.map(lambda keys: _shared_in_range(out, sources, *keys), ranges)), axis=0)
    pairs = [
        {"sources": [sources[a], sources[b]], "documents": int(shared[a, b])} for a, b in np.argwhere(shared)
    ]
    return {"pairs": sorted(pairs, key=lambda pair: -pair["documents"])}


def _shared_in_range(out: Path, sources: tuple[str, ...], low: int, high: int) -> np.ndarray:
    """int64 (sources, sources), upper triangle: common documents with low <= key < high."""
    ids = []
    for source in sources:
        with blocks.opened(out, *sorted_runs.made_by(out, source), INDEX) as files:
            ids.append(np.unique(np.concatenate(sorted_runs.read_slices(files, low, high))["low"]))
    shared = np.zeros((len(sources), len(sources)), dtype=np.int64)
    for a, b in combinations(range(len(sources)), 2):
        shared[a, b] = len(np.intersect1d(ids[a], ids[b], assume_unique=True))
    return shared
