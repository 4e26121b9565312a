"""stats: what prepared data holds, as tables on the terminal and in DIR/stats.json; `show` has the documents.

Tokens by source and category against the mixtures, how often a run of given length reads each source, lengths
of documents, what was dropped and why, and which sources share documents. These are counted exactly: all
tokenized units are sorted by the same key, so one merge over ranges of keys brings equal ids together,
whatever source they come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from rich.console import Console

from data_mixtures import shards
from data_mixtures.mixture import Mixture
from data_mixtures.recipe import check_integer, check_known
from data_mixtures.shards import Json
from data_mixtures.stages import blocks, sorted_runs, stage
from data_mixtures.stages.run import figures
from data_mixtures.stages.tokenize import INDEX
from records.usage import with_prefix
from records.workers import usable_cpus

JSON = "stats.json"
LENGTH_BINS = 33  # bin k: lengths from 2**k to 2**(k+1) - 1 tokens
BARS = "·▁▂▃▄▅▆▇█"
PAIRS = 40  # of sources that share documents are shown
Table = tuple[str, list[str], list[list[str]], str]  # title, head, rows, caption
_FACTS = ("category", "read", "kept", "dropped", "contamination", "documents", "tokens", "bytes", "windows")


def write(
    out: Path,
    sources: tuple[str, ...],
    console: Console,
    sequences: Mapping[str, int] | None = None,
    workers: int = 0,
) -> Json:
    """Print, and write stats.json; returns what it holds. ValueError for a phase without a lock.

    sequences: phase -> how many sequences of it a run would read, for the epochs of each source.
    """
    manifests = {source: shards.read_manifest(out / source) for source in sources}
    first = next(iter(manifests.values()))
    result: Json = {"seed": first["seed"], "seq_len": first["seq_len"]}
    with ThreadPoolExecutor(workers or usable_cpus()) as pool:
        result["sources"] = {name: _facts(out / name, found, pool) for name, found in manifests.items()}
        result["phases"] = _phases(out, sequences or {})
        result["shared_documents"] = shared_documents(out, sources, pool)
    shards.write_json(out / JSON, result)
    for table in (_categories_table, _sources_table, _lengths_table, _dropped_table, _shared_table):
        title, head, rows, caption = table(result)
        console.print(figures(title, head, rows), caption)
    console.print(f"{out / JSON}", soft_wrap=True)
    return result


def _facts(folder: Path, manifest: Json, pool: Executor) -> Json:
    facts = {name: manifest[name] for name in _FACTS}
    windows = manifest["valid"]["windows"]
    return {**facts, "valid_windows": windows, "lengths": _lengths(folder, manifest, pool)}


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _categories_table(stats: Json) -> Table:
    sources, phases = stats["sources"], stats["phases"]
    tokens = sum(each["tokens"] for each in sources.values())
    rows = []
    for category in dict.fromkeys(each["category"] for each in sources.values()):
        names = [name for name, each in sources.items() if each["category"] == category]
        shares = [sum(phase["shares"].get(name, 0) for name in names) for phase in phases.values()]
        have = sum(sources[name]["tokens"] for name in names)
        rows.append([category, with_prefix(have), *map(_percent, (have / tokens, *shares))])
    head = ["category", "tokens", "share", *phases]
    return "Categories", head, rows, "What there is, and what each phase draws."


def _sources_table(stats: Json) -> Table:
    phases, rows = stats["phases"], []
    epochs = {name: phase["epochs_at_end"] for name, phase in phases.items() if "sequences" in phase}
    for name, each in stats["sources"].items():
        shares = [_percent(phase["shares"].get(name, 0)) for phase in phases.values()]
        after = [f"{done.get(name, 0):.3f}" for done in epochs.values()]
        windows = map(with_prefix, (each["windows"], each["valid_windows"]))
        rows.append([name, with_prefix(each["tokens"]), *shares, *after, *windows])
    head = ["source", "tokens", *phases, *(f"epochs after {name}" for name in epochs), "windows", "held out"]
    return "Sources", head, rows, f"Windows of {stats['seq_len']:,} tokens."


def _lengths_table(stats: Json) -> Table:
    sources = stats["sources"]
    bins = max(each["lengths"]["longest"] for each in sources.values()).bit_length()
    rows = []
    for name, each in sources.items():
        found, per_token = each["lengths"], each["bytes"] / max(each["tokens"], 1)
        lengths = [f"{found['mean']:,.0f}", f"{found['longest']:,}", _bars(found["histogram"][:bins])]
        rows.append([name, with_prefix(each["documents"]), f"{per_token:.2f}", *lengths])
    head = ["source", "documents", "bytes per token", "mean length", "longest", "by length"]
    caption = "In tokens; by length: documents of 1, 2 to 3, 4 to 7, 8 to 15... tokens."
    return "Lengths of documents", head, rows, caption


def _dropped_table(stats: Json) -> Table:
    sources, rows = stats["sources"], []
    reasons = sorted({name for each in sources.values() for name, count in each["dropped"].items() if count})
    for name, each in sources.items():
        dropped = [with_prefix(each["dropped"].get(reason, 0)) for reason in reasons]
        rows.append(
            [name, with_prefix(each["read"]), *dropped, _percent(each["kept"] / max(each["read"], 1))]
        )
    head = ["source", "read", *reasons, "kept"]
    return "Dropped", head, rows, "Every document that was read is kept or counted here."


def _shared_table(stats: Json) -> Table:
    shared, rows = stats["shared_documents"], []
    for pair in shared.get("pairs", ())[:PAIRS]:
        count, names = pair["documents"], pair["sources"]
        of = [_percent(count / stats["sources"][name]["documents"]) for name in names]
        rows.append([", ".join(names), f"{count:,}", *of])
    head = ["sources", "documents", "of the first", "of the second"]
    counted = "The same text in both, by its hash."
    caption = f"Not counted: {shared['unknown']}" if "unknown" in shared else counted
    return "Documents that sources share", head, rows, caption


def _bars(histogram: list[int]) -> str:
    return "".join(BARS[-(-count * (len(BARS) - 1) // max(1, *histogram))] for count in histogram)


def _lengths(folder: Path, manifest: Json, pool: Executor) -> Json:
    """Lengths in tokens of the documents that begin in a window of the source: histogram, mean, longest."""
    paths = [folder / entry["docs"]["name"] for entry in manifest["shards"]]
    histograms, tokens, longest = zip(*pool.map(_lengths_of, paths), strict=True)
    histogram = np.sum(histograms, axis=0)
    mean = sum(tokens) / max(int(histogram.sum()), 1)
    return {"histogram": histogram.tolist(), "mean": round(mean, 2), "longest": max(longest)}


def _lengths_of(path: Path) -> tuple[np.ndarray, int, int]:
    lengths = shards.read_documents(path)[1]
    bins = np.frexp(lengths.astype(np.float64))[1] - 1  # exact: the exponent of a power of two
    histogram = np.bincount(bins, minlength=LENGTH_BINS)
    return histogram, int(lengths.sum(dtype=np.int64)), int(lengths.max(initial=0))


def _phases(out: Path, sequences: Mapping[str, int]) -> Json:
    """Shares of every phase that is pinned; with `sequences`, how often each source was read at its end."""
    locks = {path.name.removesuffix(".lock.json"): path for path in sorted(out.glob("*.lock.json"))}
    check_known("phase in sequences:", sequences, locks)
    phases = dict[str, Json]()
    consumed: dict[str, int] = {}  # phases follow each other
    for phase, path in locks.items():
        mixture = Mixture.open(path, consumed)
        total = sum(mixture.weights)
        shares = {s: weight / total for s, weight in zip(mixture.source_names, mixture.weights, strict=True)}
        found = {"fingerprint": mixture.fingerprint, "shares": shares, "categories": mixture.categories}
        phases[phase] = found
        if phase in sequences:
            check_integer(f"sequences of {phase}", sequences[phase], low=0)
            consumed = mixture.windows_per_source(sequences[phase])
            epochs = {s: round(n / shards.read_manifest(out / s)["windows"], 4) for s, n in consumed.items()}
            phases[phase] |= {"sequences": sequences[phase], "epochs_at_end": epochs}
    return phases


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
