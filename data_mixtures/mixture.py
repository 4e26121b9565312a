"""A mixture: a lock file that pins data, weights and seed, and the batches that follow from it.

Rule: sequence g = f(lock, manifests, seed, g). A run's whole loader state is one integer (sequences consumed) and the
fingerprint of the lock; ranks, workers and batch sizes only cut the same list into other slices. See `order` for how g
becomes a window.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_mixtures import order, shards
from data_mixtures.recipe import Recipe, check_known

PACKING = "concat"  # documents in a row, cut every seq_len tokens; BOS (1) marks where one begins


def write_lock(data_dir: Path, phase: str, recipe: Recipe) -> Path:
    """Pin one phase of a recipe to the manifests in data_dir: data_dir/<phase>.lock.json."""
    weights = recipe.phases[phase]
    manifests = {name: shards.read_manifest(data_dir / name) for name in weights}
    lock = {
        "format": shards.FORMAT,
        "phase": phase,
        "seed": recipe.seed,
        "seq_len": recipe.seq_len,
        "packing": PACKING,
        "tokenizer_sha256": next(iter(manifests.values()))["tokenizer_sha256"],
        "vocab_size": next(iter(manifests.values()))["vocab_size"],
        "sources": [
            {
                "name": name,
                "category": manifests[name]["category"],
                "weight": weight,
                "windows": manifests[name]["windows"],
                "epoch_cap": recipe.epoch_cap,
                "manifest_sha256": shards.manifest_sha256(data_dir / name),
            }
            for name, weight in weights.items()
        ],
    }
    path = data_dir / f"{phase}.lock.json"
    shards.write_json(path, {**lock, "fingerprint": fingerprint(lock)})
    return path


def fingerprint(lock: Mapping[str, Any]) -> str:
    """sha256 over the lock's own content (keys sorted, no spaces), without the fingerprint field."""
    content = {key: value for key, value in lock.items() if key != "fingerprint"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_lock(path: Path) -> dict[str, Any]:
    """A lock file, checked against its own fingerprint. ValueError names the file."""
    if not path.is_file():
        raise ValueError(f"lock file {path} does not exist; make it with python -m data_mixtures.prepare")
    try:
        lock = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); prepare the data again") from error
    if lock.get("format") != shards.FORMAT or lock.get("fingerprint") != fingerprint(lock):
        raise ValueError(
            f"{path} does not match its own fingerprint {lock.get('fingerprint')!r}: it was edited or is of another "
            "format. Change the recipe and prepare again instead"
        )
    return lock


@dataclass(frozen=True)
class _Source:
    name: str
    category: str
    weight: int
    windows: int
    epoch_cap: int
    folder: Path
    shards: tuple[tuple[str, int], ...]  # (file name, windows)
    first_window: np.ndarray  # int64 (shards,): windows before each shard


class Mixture:
    """The sequences of one phase, by index. Open it with `Mixture.open`."""

    def __init__(self, lock: Mapping[str, Any], sources: list[_Source], offsets: Mapping[str, int]) -> None:
        self.fingerprint: str = lock["fingerprint"]
        self.phase: str = lock["phase"]
        self.seed: int = lock["seed"]
        self.seq_len: int = lock["seq_len"]
        self.tokenizer_sha256: str = lock["tokenizer_sha256"]
        self.vocab_size: int = lock["vocab_size"]
        self.source_names: tuple[str, ...] = tuple(source.name for source in sources)
        self.categories: dict[str, str] = {source.name: source.category for source in sources}
        self.weights: tuple[int, ...] = tuple(source.weight for source in sources)
        self._sources = sources
        self._offsets = np.array([offsets.get(name, 0) for name in self.source_names], dtype=np.int64)
        self._places, self._ranks = order.pattern(self.weights)
        self._maps: dict[tuple[int, int], np.ndarray] = {}

    @classmethod
    def open(cls, lock_path: str | Path, offsets: Mapping[str, int] | None = None) -> Mixture:
        """Open a lock file and the sources beside it.

        offsets: windows of each source that earlier phases consumed (their `windows_per_source`). ValueError for a lock
        that was edited, a manifest that is not the pinned one, a shard of the wrong size, or a negative offset.
        """
        path = Path(lock_path)
        lock = read_lock(path)
        sources = [_open_source(path, entry) for entry in lock["sources"]]
        offsets = offsets or {}
        check_known("source in offsets:", offsets, [source.name for source in sources])
        for name, offset in offsets.items():
            if offset < 0:
                raise ValueError(
                    f"offset of {name!r} is {offset}; it counts consumed windows, so it cannot be negative"
                )
        return cls(lock, sources, offsets)

    def sequences(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Global sequences first .. first + count: (tokens int64 (count, S + 1), source_index int64 (count,)).

        ValueError when a source would pass its epoch cap.
        """
        if first < 0 or count < 0:
            raise ValueError(f"sequences({first}, {count}): first and count must not be negative")
        self.check_epochs(first + count)
        source_index, items = self._items(np.arange(first, first + count, dtype=np.int64))
        tokens = np.empty((count, self.seq_len + 1), dtype=np.int64)
        for index in np.unique(source_index):
            rows = np.flatnonzero(source_index == index)
            self._read(index, self._window_of(index, items[rows]), rows, tokens)
        return tokens, source_index

    def locate(self, numbers: np.ndarray) -> list[dict[str, Any]]:
        """Where these global sequences (int64 (n,)) lie: source, shard file, offset of the first token in it."""
        source_index, items = self._items(numbers)
        places = []
        for number, index, item in zip(numbers.tolist(), source_index.tolist(), items, strict=True):
            source = self._sources[index]
            window = int(self._window_of(index, np.array([item]))[0])
            shard = int(np.searchsorted(source.first_window, window, side="right")) - 1
            offset = (window - int(source.first_window[shard])) * self.seq_len
            places.append(
                {"sequence": number, "source": source.name, "shard": source.shards[shard][0], "token_offset": offset}
            )
        return places

    def windows_per_source(self, sequences: int) -> dict[str, int]:
        """Windows of each source consumed after `sequences` sequences of this phase, offsets included: closed form."""
        counts = self._offsets + order.served(self.weights, self._places, sequences)
        return dict(zip(self.source_names, counts.tolist(), strict=True))

    def check_epochs(self, sequences: int) -> None:
        """ValueError when `sequences` sequences would repeat a source more often than its epoch cap allows."""
        for source, consumed in zip(self._sources, self.windows_per_source(sequences).values(), strict=True):
            if source.weight and consumed > source.epoch_cap * source.windows:
                raise ValueError(
                    f"source {source.name!r} would be read {consumed / source.windows:.2f} times after {sequences} "
                    f"sequences of {self.phase}, its epoch_cap is {source.epoch_cap} ({source.windows} windows); train "
                    "for fewer sequences, lower its weight, add text, or raise epoch_cap in the recipe"
                )

    def _items(self, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        block, place = np.divmod(g, len(self._places))
        index = self._places[place]
        weights = np.asarray(self.weights, dtype=np.int64)
        return index, self._offsets[index] + block * weights[index] + self._ranks[place]

    def _window_of(self, index: int, items: np.ndarray) -> np.ndarray:
        source = self._sources[index]
        epochs, window = np.divmod(items, source.windows)
        for epoch in np.unique(epochs[epochs > 0]):  # epoch 0 reads the shards as they lie
            now = epochs == epoch
            keys = order.round_keys(self.seed, source.name, int(epoch))
            window[now] = order.permute(window[now], source.windows, keys)
        return window

    def _read(self, index: int, window: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
        first_window = self._sources[index].first_window
        shard = np.searchsorted(first_window, window, side="right") - 1
        for number in np.unique(shard):
            here = shard == number
            out[rows[here]] = self._map(index, int(number))[window[here] - first_window[number]]

    def _map(self, index: int, number: int) -> np.ndarray:
        if (index, number) not in self._maps:
            source = self._sources[index]
            name, windows = source.shards[number]
            self._maps[index, number] = shards.windows(source.folder / name, windows, self.seq_len)
        return self._maps[index, number]


def _open_source(lock_path: Path, entry: Mapping[str, Any]) -> _Source:
    folder = lock_path.parent / entry["name"]
    manifest = shards.read_manifest(folder)
    if shards.manifest_sha256(folder) != entry["manifest_sha256"]:
        raise ValueError(
            f"{folder / shards.MANIFEST} is not the manifest that {lock_path} pins: the data was prepared again or "
            "changed. Use the lock file that belongs to it, or prepare both again"
        )
    shards.check_sizes(folder, manifest)
    files = tuple((shard["name"], shard["windows"]) for shard in manifest["shards"])
    before = np.cumsum([0, *(windows for _, windows in files)])[:-1].astype(np.int64)
    return _Source(
        entry["name"], entry["category"], entry["weight"], entry["windows"], entry["epoch_cap"], folder, files, before
    )


def valid_windows(data_dir: str | Path, source: str, max_windows: int | None = None) -> np.ndarray:
    """Held-out windows of a source, never in training: uint16 (n, S + 1), the first max_windows of them."""
    folder = Path(data_dir) / source
    manifest = shards.read_manifest(folder)
    shards.check_sizes(folder, manifest)
    entry = manifest["valid"]
    return shards.windows(folder / entry["name"], entry["windows"], manifest["seq_len"])[:max_windows].copy()
