"""How much of the held-out text stands in the text of training: `contained_share` of a recipe leaves such
out.

    python -m tools.check contained DATA

Counted by another rule than that of data_mixtures/stages/containment.py, on what is published: a held-out
document is contained when half of its runs of 24 tokens stand in shards of training, of any source. The
last line is JSON.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from data_mixtures import shards
from tools.markdown import table

_MULTIPLIER = 0x5851F42D4C957F2D


@dataclass
class Options:
    """Held-out documents of every source that stand in training."""

    data: Annotated[Path, tyro.conf.Positional]
    """A prepared folder."""
    run_tokens: int = 24
    """Tokens in a row that are compared."""


def run_hashes(tokens: np.ndarray, length: int) -> np.ndarray:
    """uint64, of the runs of `length` tokens from each token on."""
    count = max(len(tokens) - length + 1, 0)
    hashes = np.zeros(count, np.uint64)
    for at in range(length):
        hashes += (tokens[at : at + count].astype(np.uint64) + np.uint64(1)) * np.uint64(
            pow(_MULTIPLIER, at, 1 << 64)
        )
    return hashes


def check(data: Path, run_tokens: int) -> dict[str, dict[str, Any]]:
    """By source: its held-out documents that have such a run, and how many of them are contained."""
    manifests, documents = shards.read_manifests(data), list[tuple[str, np.ndarray]]()
    for name, manifest in manifests.items():
        tokens = _tokens(data / name, manifest["valid"])
        parts = np.split(tokens, np.flatnonzero(tokens == manifest["bos_id"]))
        documents += [(name, hashes) for part in parts if len(hashes := run_hashes(part, run_tokens))]
    runs = np.unique(np.concatenate([np.empty(0, np.uint64), *(hashes for _, hashes in documents)]))
    found = np.zeros(len(runs), bool)
    for name, manifest in manifests.items():
        for entry in manifest["shards"] if len(runs) else ():
            trained = run_hashes(_tokens(data / name, entry), run_tokens)
            places = np.minimum(np.searchsorted(runs, trained), len(runs) - 1)
            found[places[runs[places] == trained]] = True
    rows = {name: {"documents": 0, "contained": 0} for name in manifests}
    for name, hashes in documents:
        rows[name]["documents"] += 1
        rows[name]["contained"] += bool(found[np.searchsorted(runs, hashes)].mean() >= 0.5)
    return {name: {**row, "share": row["contained"] / max(row["documents"], 1)} for name, row in rows.items()}


def _tokens(folder: Path, entry: dict[str, Any]) -> np.ndarray:
    return np.fromfile(folder / entry["name"], shards.token_dtype(entry))


def main(options: Options) -> None:
    rows = check(options.data, options.run_tokens)
    cells = [[name, row["documents"], row["contained"], f"{row['share']:.1%}"] for name, row in rows.items()]
    print(table(["held out of", "documents", "contained", "share"], cells))
    print(json.dumps(rows))


if __name__ == "__main__":
    tyro.cli(main, prog="python -m tools.check contained")
