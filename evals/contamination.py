"""Overlap of the evaluation sets with the training text, as found and removed by `data_mixtures`.

python -m evals.contamination --data data/phase1 --out runs/phase1/evals.jsonl
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from data_mixtures.shards import read_manifests
from data_mixtures.stages.decontaminate import read_benchmarks
from evals.tables import console, show_table
from records.evals import NO_MODEL, NOWHERE, AboutFlags, EvalCommand
from records.files import JsonObject


def contamination(data: Path) -> JsonObject:
    """Count by benchmark the items, those found (an upper bound), and the documents dropped."""
    manifests = read_manifests(data)
    by_source = {name: manifest.get("contamination", {}) for name, manifest in manifests.items()}
    indexed = {benchmark.name: benchmark for benchmark in read_benchmarks(data)}
    benchmarks = {}
    for name in sorted(
        {
            *indexed,
            *(name for counts_by_benchmark in by_source.values() for name in counts_by_benchmark),
        }
    ):
        counts_by_source = {
            source: counts_by_benchmark[name]
            for source, counts_by_benchmark in by_source.items()
            if counts_by_benchmark.get(name, {}).get("documents")
        }
        items = indexed[name].items if name in indexed else None
        # an item in several sources is counted by each, as they record only how many they held
        touched = sum(counts["items"] for counts in counts_by_source.values())
        benchmarks[name] = {
            "items": items,
            "searchable": indexed[name].searchable if name in indexed else None,
            "touched": touched if items is None else min(touched, items),
            "documents_dropped": sum(counts["documents"] for counts in counts_by_source.values()),
            "sources": counts_by_source,
        }
    content = {name: manifest["content_sha256"] for name, manifest in manifests.items()}
    return {"benchmarks": benchmarks, "manifests": content}


def show(figures: JsonObject) -> None:
    title = (
        "Evaluation items found in the training text; documents that contained them were dropped"
    )
    columns = (
        "benchmark",
        "in sources",
        "items",
        "searchable",
        "found (at most)",
        "documents dropped",
    )
    rows = []
    for name, overlap in figures["benchmarks"].items():
        counts = (overlap[key] for key in ("items", "searchable", "touched", "documents_dropped"))
        sources = ", ".join(overlap["sources"]) or "none"
        rows.append([name, sources, *("?" if c is None else f"{c:,}" for c in counts)])
    show_table(title, columns, rows, texts=2)
    if not figures["benchmarks"]:
        note = "The recipe has no [filter.benchmarks]: nothing was searched for, so the overlap is unknown, not 0."
        console.print(note, markup=False)


def main(data: Path, about: AboutFlags = NOWHERE) -> JsonObject:
    """Overlap of the evaluation sets with the training text. The last line on stdout is the record, JSON.

    Args:
        data: directory written by `python -m data_mixtures.prepare`
    """
    figures = contamination(data)
    show(figures)
    sources = list(read_manifests(data).values())
    return about.append(
        "contamination",
        figures,
        data_sha256=hashlib.sha256(
            json.dumps(figures["manifests"], sort_keys=True).encode()
        ).hexdigest(),
        **NO_MODEL | {"tokenizer_sha256": sources[0].get("tokenizer_sha256")},
    )


COMMAND = EvalCommand("contamination", main)


if __name__ == "__main__":
    COMMAND.run()
