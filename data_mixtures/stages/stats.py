"""stats: what prepared data holds, as tables on the terminal and in DIR/stats.json; `show` has the documents.

Tokens by source and category against the mixtures, how often a run of given length reads each source, lengths
of documents, what was dropped and why, and which sources share documents. These are counted exactly: all
tokenized units are sorted by the same key, so one merge over ranges of keys brings equal ids together,
whatever source they come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from data_mixtures import shards
from data_mixtures.mixture import Mixture
from data_mixtures.recipe import check_integer, check_known
from data_mixtures.stages import blocks, sorted_runs, stage
from data_mixtures.stages.run import figures
from data_mixtures.stages.tokenize import INDEX
from records import page
from records.workers import usable_cpus

JSON = "stats.json"
LENGTH_BINS = 33  # bin k: lengths from 2**k to 2**(k+1) - 1 tokens
BARS = "·▁▂▃▄▅▆▇█"
PAIRS = 40  # of sources that share documents are shown
_FACTS = ("category", "read", "kept", "dropped", "contamination", "documents", "tokens", "bytes", "windows")


def write(
    out: Path,
    sources: tuple[str, ...],
    console: Console,
    sequences: Mapping[str, int] | None = None,
    workers: int = 0,
) -> dict[str, Any]:
    """Print, and write stats.json; returns what it holds.

    sequences: phase -> how many sequences of it a run would read, for the epochs of each source. ValueError
    for a phase without a lock, or a source without a manifest.
    """
    manifests = {source: shards.read_manifest(out / source) for source in sources}
    with ThreadPoolExecutor(workers or usable_cpus()) as pool:
        facts = {
            source: {
                **{name: manifest[name] for name in _FACTS},
                "valid_windows": manifest["valid"]["windows"],
                "lengths": _lengths(out / source, manifest, pool),
            }
            for source, manifest in manifests.items()
        }
        result = {
            "seed": next(iter(manifests.values()))["seed"],
            "seq_len": next(iter(manifests.values()))["seq_len"],
            "sources": facts,
            "phases": _phases(out, dict(sequences or {})),
            "shared_documents": shared_documents(out, sources, pool),
        }
    shards.write_json(out / JSON, result)
    for title, head, rows, caption in tables(result):
        console.print(figures(title, head, rows), caption, highlight=False)
    console.print(f"{out / JSON}", highlight=False, soft_wrap=True)
    return result


Table = tuple[str, list[str], list[list[str]], str]  # title, head, rows, caption


def tables(stats: Mapping[str, Any]) -> list[Table]:
    """What stats.json holds, as text."""
    made = (_categories_table, _sources_table, _lengths_table, _dropped_table, _shared_table)
    return [table(stats, stats["sources"], stats["phases"]) for table in made]


def _categories_table(
    stats: Mapping[str, Any], sources: Mapping[str, Any], phases: Mapping[str, Any]
) -> Table:
    tokens = sum(each["tokens"] for each in sources.values())
    rows = []
    for category in dict.fromkeys(each["category"] for each in sources.values()):
        names = [name for name, each in sources.items() if each["category"] == category]
        shares = [sum(phase["shares"].get(name, 0) for name in names) for phase in phases.values()]
        have = sum(sources[name]["tokens"] for name in names)
        percents = (page.percent(each, ".2f") for each in (have / tokens, *shares))
        rows.append([category, page.short(have), *percents])
    head = ["category", "tokens", "share", *phases]
    return "Categories", head, rows, "What there is, and what each phase draws."


def _sources_table(stats: Mapping[str, Any], sources: Mapping[str, Any], phases: Mapping[str, Any]) -> Table:
    epochs = {name: phase["epochs_at_end"] for name, phase in phases.items() if "sequences" in phase}
    after = [f"epochs after {name}" for name in epochs]
    rows = [
        [name, page.short(each["tokens"]),
         *(page.percent(phase["shares"].get(name, 0), ".2f") for phase in phases.values()),
         *(f"{done.get(name, 0):.3f}" for done in epochs.values()),
         *map(page.short, (each["windows"], each["valid_windows"]))]
        for name, each in sources.items()
    ]  # fmt: skip
    head = ["source", "tokens", *phases, *after, "windows", "held out"]
    return "Sources", head, rows, f"Windows of {stats['seq_len']:,} tokens."


def _lengths_table(stats: Mapping[str, Any], sources: Mapping[str, Any], phases: Mapping[str, Any]) -> Table:
    bins = max(each["lengths"]["longest"] for each in sources.values()).bit_length()
    rows = []
    for name, each in sources.items():
        found, per_token = each["lengths"], each["bytes"] / max(each["tokens"], 1)
        lengths = [f"{found['mean']:,.0f}", f"{found['longest']:,}", _bars(found["histogram"][:bins])]
        rows.append([name, page.short(each["documents"]), f"{per_token:.2f}", *lengths])
    head = ["source", "documents", "bytes per token", "mean length", "longest", "by length"]
    caption = "In tokens; by length: documents of 1, 2 to 3, 4 to 7, 8 to 15... tokens."
    return "Lengths of documents", head, rows, caption


def _dropped_table(stats: Mapping[str, Any], sources: Mapping[str, Any], phases: Mapping[str, Any]) -> Table:
    reasons = sorted({name for each in sources.values() for name, count in each["dropped"].items() if count})
    rows = [
        [name, page.short(each["read"]), *(page.short(each["dropped"].get(reason, 0)) for reason in reasons),
         page.percent(each["kept"] / max(each["read"], 1), ".2f")]
        for name, each in sources.items()
    ]  # fmt: skip
    head = ["source", "read", *reasons, "kept"]
    return "Dropped", head, rows, "Every document that was read is kept or counted here."


def _shared_table(stats: Mapping[str, Any], sources: Mapping[str, Any], phases: Mapping[str, Any]) -> Table:
    shared = stats["shared_documents"]
    rows = []
    for pair in shared.get("pairs", ())[:PAIRS]:
        of = [page.percent(pair["documents"] / sources[name]["documents"], ".2f") for name in pair["sources"]]
        rows.append([", ".join(pair["sources"]), f"{pair['documents']:,}", *of])
    counted = "The same text in both, by its hash."
    caption = f"Not counted: {shared['unknown']}" if "unknown" in shared else counted
    return (
        "Documents that sources share",
        ["sources", "documents", "of the first", "of the second"],
        rows,
        caption,
    )


def _bars(histogram: list[int]) -> str:
    return "".join(BARS[-(-count * (len(BARS) - 1) // max(1, *histogram))] for count in histogram)


def _lengths(folder: Path, manifest: dict[str, Any], pool: Executor) -> dict[str, Any]:
    """Lengths in tokens of the documents that begin in a window of the source: histogram, mean, longest."""
    found = list(pool.map(lambda entry: _lengths_of(folder / entry["docs"]["name"]), manifest["shards"]))
    histogram = np.sum([each[0] for each in found], axis=0)
    documents = int(histogram.sum())
    mean = sum(each[1] for each in found) / documents if documents else 0.0
    return {
        "histogram": histogram.tolist(),
        "mean": round(mean, 2),
        "longest": max(each[2] for each in found),
    }


def _lengths_of(path: Path) -> tuple[np.ndarray, int, int]:
    lengths = shards.read_documents(path)[1]
    bins = np.frexp(lengths.astype(np.float64))[1] - 1  # exact: the exponent of a power of two
    return (
        np.bincount(bins, minlength=LENGTH_BINS),
        int(lengths.sum(dtype=np.int64)),
        int(lengths.max(initial=0)),
    )


def _phases(out: Path, sequences: dict[str, int]) -> dict[str, Any]:
    """Shares of every phase that is pinned; with `sequences`, how often each source was read at its end."""
    locks = {path.name.removesuffix(".lock.json"): path for path in sorted(out.glob("*.lock.json"))}
    check_known("phase in sequences:", sequences, locks)
    phases = dict[str, dict[str, Any]]()
    consumed: dict[str, int] = {}  # phases follow each other
    for phase, path in locks.items():
        mixture = Mixture.open(path, consumed)
        total = sum(mixture.weights)
        shares = {s: weight / total for s, weight in zip(mixture.source_names, mixture.weights, strict=True)}
        phases[phase] = {
            "fingerprint": mixture.fingerprint,
            "shares": shares,
            "categories": mixture.categories,
        }
        if phase in sequences:
            check_integer(f"sequences of {phase}", sequences[phase], low=0)
            consumed = mixture.windows_per_source(sequences[phase])
            epochs = {s: round(n / shards.read_manifest(out / s)["windows"], 4) for s, n in consumed.items()}
            phases[phase] |= {"sequences": sequences[phase], "epochs_at_end": epochs}
    return phases


def shared_documents(out: Path, sources: tuple[str, ...], pool: Executor) -> dict[str, Any]:
    """How many documents two sources have in common, by exact comparison of their 128-bit ids.

    {"pairs": [{"sources", "documents"}]}, or {"unknown": why} when tokenized units were deleted.
    """
    for source in sources:
        name, units = sorted_runs.made_by(out, source)
        for unit in units:
            receipt = stage.read_receipt(out, name, unit)
            if receipt is None or receipt.get("freed"):
                return {"unknown": f"{stage.unit_folder(out, name, unit)} is not there any more"}
    documents = sum(
        receipt["counts"]["documents"] for source in sources for receipt in sorted_runs.receipts(out, source)
    )
    ranges = -(-documents // sorted_runs.DOCUMENTS_PER_RANGE)
    bounds = [sorted_runs.range_bounds(number, ranges) for number in range(ranges)]
    shared = np.zeros((len(sources), len(sources)), dtype=np.int64)
    for found in pool.map(lambda keys: _shared_in_range(out, sources, *keys), bounds):
        shared += found
    pairs = sorted(
        (-int(shared[a, b]), a, b) for a, b in combinations(range(len(sources)), 2) if shared[a, b]
    )
    return {"pairs": [{"sources": [sources[a], sources[b]], "documents": -count} for count, a, b in pairs]}


def _shared_in_range(out: Path, sources: tuple[str, ...], low: int, high: int) -> np.ndarray:
    """int64 (sources, sources), upper triangle: common documents with low <= key < high."""
    parts = []
    for index, source in enumerate(sources):
        with blocks.opened(out, *sorted_runs.made_by(out, source), INDEX) as files:
            part = sorted_runs.merge(sorted_runs.read_slices(files, low, high))  # each id once
        part["unit"] = index
        parts.append(part)
    documents, shared = sorted_runs.in_order(parts), np.zeros((len(sources), len(sources)), dtype=np.int64)
    for apart in range(1, len(sources)):  # equal ids lie in a row, in the order of the sources
        left, right = documents[:-apart], documents[apart:]
        equal = sorted_runs.same_id(left, right)
        if not equal.any():
            break
        np.add.at(shared, (left["unit"][equal], right["unit"][equal]), 1)
    return shared
