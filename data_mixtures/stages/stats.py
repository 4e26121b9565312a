"""stats: what prepared data hold, as tables on the terminal and in DIR/stats.json.

Tokens by source against the mixtures, lengths of documents, what was dropped and why, and which
sources share documents.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from data_mixtures import mixture, shards
from data_mixtures.shards import Json
from data_mixtures.stages import sorted_runs
from data_mixtures.stages.fetch import describe_lost_files
from data_mixtures.stages.run import figures
from data_mixtures.stages.tokenize import INDEX
from records.files import write_json

JSON = "stats.json"
PAIRS = 40  # of sources that share documents are shown
FACTS = (
    "category",
    "read",
    "kept",
    "dropped",
    "contamination",
    "documents",
    "tokens",
    "bytes",
    "longest",
    "windows",
)


def write(out: Path, sources: tuple[str, ...], console: Console, workers: int) -> Json:
    manifests = {source: shards.read_manifest(out / source) for source in sources}
    facts = {}
    for name, manifest in manifests.items():
        mean = round(manifest["tokens"] / max(manifest["documents"], 1), 2)
        lost_files = manifest.get(
            "lost", {"files": {}, "share": 0}
        )  # older folders say nothing of it
        derived = {"mean": mean, "valid_windows": manifest["valid"]["windows"], "lost": lost_files}
        facts[name] = {key: manifest[key] for key in FACTS} | derived
    shared = count_shared_documents(out, sources, workers)
    result = {"sources": facts, "phases": _phases(out), "shared_documents": shared}
    write_json(out / JSON, result)
    tables = _shares_table(result), _make_dropped_table(facts), _make_shared_table(result)
    for table in (*sizes_and_lengths(manifests), *tables):
        console.print(table)
    print_lost_files(facts, console)
    if "unknown" in shared:
        console.print(f"Shared documents are not counted: {shared['unknown']}", soft_wrap=True)
    console.print(f"{out / JSON}", soft_wrap=True)
    return result


def print_lost_files(sources: Mapping[str, Json], console: Console) -> None:
    for name, facts in sources.items():
        if sentence := describe_lost_files(facts["lost"]):
            line = f"{name}: {sentence}"
            console.print(line, style="yellow", soft_wrap=True, markup=False)


def _phases(out: Path) -> Json:
    phases = {}
    for path in sorted(out.glob("*.lock.json")):
        lock = mixture.read_lock(path)
        total = sum(entry["weight"] for entry in lock["sources"])
        shares = {entry["name"]: entry["weight"] / total for entry in lock["sources"]}
        phases[lock["phase"]] = {"fingerprint": lock["fingerprint"], "shares": shares}
    return phases


def sizes_and_lengths(manifests: Mapping[str, Json]) -> tuple[Table, Table]:
    sizes = []
    lengths = []
    for name, manifest in manifests.items():
        documents = manifest["documents"]
        tokens = manifest["tokens"]
        size = manifest["bytes"]
        dropped = sum(manifest["dropped"].values())
        windows = manifest["windows"], manifest["valid"]["windows"]
        per_token = f"{size / max(tokens, 1):.2f}"
        sizes.append([name, documents, dropped, tokens, size, per_token, *windows])
        mean = tokens // max(documents, 1)
        unused = manifest["unused"]
        waste = unused["train_tokens"], unused.get("padding", 0)
        lengths.append([name, mean, manifest["longest"], manifest["cut"], *waste])
    head = ("source", "docs", "dropped", "tokens", "bytes", "B/tok", "windows", "valid")
    columns = ("source", "mean", "longest", "cuts", "unused tokens", "padding")
    return figures("Sources", head, sizes), figures("tokens of a document", columns, lengths)


def _shares_table(stats: Json) -> Table:
    sources = stats["sources"]
    phases = stats["phases"]
    total = sum(facts["tokens"] for facts in sources.values())
    rows = []
    for name, facts in sources.items():
        shares = [
            facts["tokens"] / total,
            *(phase["shares"].get(name, 0) for phase in phases.values()),
        ]
        rows.append([name, facts["category"], *(f"{share:.2%}" for share in shares)])
    return figures("Shares", ("source", "category", "of all tokens", *phases), rows)


def _make_dropped_table(sources: Json) -> Table:
    # a sum of Counters leaves out what is 0
    reasons = sorted(sum((Counter(facts["dropped"]) for facts in sources.values()), Counter()))
    rows = []
    for name, facts in sources.items():
        counts = [facts["dropped"].get(reason, 0) for reason in reasons]
        shares = facts["kept"] / max(facts["read"], 1), facts["lost"]["share"]
        rows.append([name, facts["read"], *counts, *(f"{share:.2%}" for share in shares)])
    return figures("Dropped", ("source", "read", *reasons, "kept", "bytes lost"), rows)


def _make_shared_table(stats: Json) -> Table:
    rows = []
    for pair in stats["shared_documents"].get("pairs", ())[:PAIRS]:
        count = pair["documents"]
        names = pair["sources"]
        of = [f"{count / stats['sources'][name]['documents']:.2%}" for name in names]
        rows.append([", ".join(names), count, *of])
    head = ("sources", "documents", "of the first", "of the second")
    return figures("Documents that sources share", head, rows)


def count_shared_documents(out: Path, sources: tuple[str, ...], workers: int) -> Json:
    """Return {"pairs": [{"sources", "documents"}]} by equal ids, or {"unknown": why} if units were deleted."""
    try:
        receipts = [receipt for source in sources for receipt in sorted_runs.receipts(out, source)]
        # all units are sorted by the same key, so ranges of keys bring equal ids of all sources
        # together
        ranges = sorted_runs.key_ranges(sum(receipt["counts"]["documents"] for receipt in receipts))
        with ThreadPoolExecutor(workers) as pool:
            shared = sum(
                pool.map(lambda keys: _count_shared(out, sources, *keys), ranges), Counter()
            )
    except ValueError as error:
        return {"unknown": str(error)}
    return {
        "pairs": [{"sources": [*pair], "documents": count} for pair, count in shared.most_common()]
    }


def _count_shared(
    out: Path, sources: tuple[str, ...], low: int, high: int
) -> Counter[tuple[str, str]]:
    # documents with low <= key < high
    ids = {}
    for source in sources:
        with sorted_runs.open_runs(out, source, INDEX) as files:
            ids[source] = np.unique(
                np.concatenate(sorted_runs.read_slices(files, low, high))["low"]
            )
    shared = Counter[tuple[str, str]]()
    for a, b in combinations(sources, 2):
        shared[a, b] = len(np.intersect1d(ids[a], ids[b], assume_unique=True))
    return shared
