"""The training data of a run: a lock file pins sources, weights and seed, and fixes every sequence.

Sequence g is f(lock, manifests, seed, g); `order` says how g becomes a window. What a run keeps of its
place in it is train.data.LoaderState.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_mixtures import order, shards
from data_mixtures.recipe import PACKINGS, check_known
from data_mixtures.shards import Json
from data_mixtures.window_files import TokenFile, WindowFiles
from records.files import write_json

# documents in a row, cut every seq_len tokens; the id `bos_id` marks where one begins
PACKING = PACKINGS[0]
# Other packings: whole documents, or conversations, in the first S tokens of each window. Beside
# each file of tokens lies one of the same form, with the flags of the tokens; its entry is "flags"
# in theirs.
CONVERSATIONS = "conversations"
_LABELS = ("category", "epoch_cap")  # of a source in a lock: they decide no sequence
PLACE = "sequence", "source", "shard", "token_offset", "epoch"  # of a sequence
# flags: it counts as a label; it is the first token of a conversation, or of padding
TRAINED, BEGINS = 1, 2


def pin(
    data_dir: Path,
    phase: str,
    weights: Mapping[str, int],
    seed: int,
    seq_len: int,
    epoch_cap: int,
    packing: str = PACKING,
) -> Path:
    """Write data_dir/<phase>.lock.json for the current content of these sources; return its path."""
    manifest = shards.read_manifest(data_dir / next(iter(weights)))
    lock: Json = {"format": shards.FORMAT, "phase": phase, "seed": seed, "seq_len": seq_len}
    lock |= {
        "packing": packing,
        "order": order.RULE,
        **{key: manifest[key] for key in shards.TOKENIZER_FACTS},
    }
    lock["sources"] = [source_entry(data_dir, *each, epoch_cap, lock) for each in weights.items()]
    path = data_dir / f"{phase}.lock.json"
    write_json(path, {**lock, "fingerprint": fingerprint(lock)})
    return path


def source_entry(data_dir: Path, name: str, weight: int, epoch_cap: int, lock: Json) -> Json:
    """Return a source's entry in a lock; ValueError for another tokenizer, length or packing."""
    manifest = shards.read_manifest(data_dir / name)
    keys = (*shards.TOKENIZER_FACTS, "seq_len")
    if facts := [key for key in keys if manifest[key] != lock[key]]:
        raise ValueError(
            f"{data_dir / name} was tokenized with another tokenizer or length than the sources beside it: "
            f"{', '.join(facts)} differ. Prepare all sources with one recipe"
        )
    if ("flags" in manifest["valid"]) == (lock["packing"] == PACKING):
        raise ValueError(
            f"{data_dir / name} was packed otherwise than {lock['packing']!r}; prepare it again"
        )
    entry = {
        "name": name,
        "category": manifest["category"],
        "weight": weight,
        "windows": manifest["windows"],
    }
    return {**entry, "epoch_cap": epoch_cap, "content_sha256": manifest["content_sha256"]}


def fingerprint(lock: Json) -> str:
    """Return the identity of a mixture: sha256 of the lock (keys sorted, no spaces)."""
    # without the fingerprint itself, and without labels
    content = {key: value for key, value in lock.items() if key != "fingerprint"}
    sources = lock["sources"]
    content["sources"] = [{k: v for k, v in entry.items() if k not in _LABELS} for entry in sources]
    return hashlib.sha256(
        json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def read_lock(path: Path) -> Json:
    """Read a lock file and check its fingerprint; ValueError names the file."""
    lock = shards.read_json(path, shards.PREPARE)
    shards.check_format(path, lock)
    if lock.get("fingerprint") != fingerprint(lock):
        raise ValueError(
            f"{path} does not match its own fingerprint {lock.get('fingerprint')!r}: it was edited. Change the recipe "
            "and prepare again instead"
        )
    if lock["order"] != order.RULE:
        raise ValueError(
            f"{path} has the order {lock['order']!r}, this code reads the order {order.RULE!r}"
        )
    return lock


class Mixture:
    """The sequences of one phase, by index; any number of threads may read."""

    def __init__(self, lock: Json, files: Sequence[TokenFile]) -> None:
        sources = lock["sources"]
        self.fingerprint: str = lock["fingerprint"]
        self.phase: str = lock["phase"]
        self.seed: int = lock["seed"]
        self.seq_len: int = lock["seq_len"]
        self.vocab_size: int = lock["vocab_size"]
        self.bos_id: int = lock["bos_id"]
        self.source_names: tuple[str, ...] = tuple(source["name"] for source in sources)
        self.contents: dict[str, str] = {
            source["name"]: source["content_sha256"] for source in sources
        }
        self.weights: tuple[int, ...] = tuple(source["weight"] for source in sources)
        self._places, self._earlier_in_block = order.pattern(self.weights)
        self._offsets = np.zeros(len(sources), dtype=np.int64)
        numbers = [[source[key] for key in ("windows", "epoch_cap")] for source in sources]
        self._windows, self._caps = np.array(numbers, dtype=np.int64).T
        # all windows of all sources in a row: where each source and each file begins
        self._files = WindowFiles(files, self.seq_len)
        self.packed: bool = lock["packing"] != PACKING
        self._flags = WindowFiles(_list_flags(files), self.seq_len) if self.packed else None
        self._source_begins = np.cumsum(self._windows) - self._windows
        lengths = np.array([shard["windows"] for _, shard in files], dtype=np.int64)
        self._file_begins = np.cumsum(lengths) - lengths
        self._file_names = [shard["name"] for _, shard in files]
        self._file_sha256 = [shard["sha256"] for _, shard in files]
        self._decides = [lock[key] for key in ("seed", "seq_len", "packing", "tokenizer_sha256")]
        # how epoch 0 walks through each file: (its windows, the stride between two that are read one
        # after the other, the first of them)
        owners = np.searchsorted(self._source_begins, self._file_begins, side="right") - 1
        walks = []
        for owner, name, count in zip(
            owners.tolist(), self._file_names, lengths.tolist(), strict=True
        ):
            first = order.begin(self.seed, self.source_names[owner], name, count)
            walks.append((count, order.stride(count), first))
        self._walks = np.array(walks, dtype=np.int64)

    @classmethod
    def open(cls, lock_path: str | Path, offsets: Mapping[str, int] | None = None) -> Mixture:
        """Open a lock file and the sources beside it.

        Args:
            offsets: `windows_per_source` of earlier phases.

        Raises:
            ValueError: an edited lock, a manifest that is not the pinned one, a shard of another size.
        """
        path = Path(lock_path)
        lock = read_lock(path)
        mixture = cls(
            lock, [file for entry in lock["sources"] for file in _open_source(path, entry)]
        )
        return mixture.starting_at(offsets) if offsets else mixture

    def starting_at(self, offsets: Mapping[str, int]) -> Mixture:
        """Return this mixture after the windows of earlier phases. ValueError as `open`."""
        check_known("source in offsets:", offsets, self.source_names)
        for name, offset in offsets.items():
            if offset < 0:
                raise ValueError(
                    f"offset of {name!r} is {offset}; it counts windows: never negative"
                )
        mixture = copy.copy(self)
        mixture._offsets = np.array(
            [offsets.get(name, 0) for name in self.source_names], dtype=np.int64
        )
        return mixture

    def sequences(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return global sequences from `first` on: (tokens int64 (count, S + 1), source_index int64 (count,)).

        Raises:
            ValueError: a source would pass its epoch cap, or a block of a shard is damaged.
        """
        if first < 0 or count < 0:
            raise ValueError(f"sequences({first}, {count}): first and count must not be negative")
        # ranks, workers and batch sizes only slice the same list differently
        self.check_epochs(first + count)
        source_index, files, windows, _ = self._find(
            np.arange(first, first + count, dtype=np.int64)
        )
        return self._files.read_windows(files, windows), source_index

    def flags(self, first: int, count: int) -> np.ndarray:
        """Return the flags (TRAINED, BEGINS) of these sequences' tokens, int64 (count, S + 1); if `packed` only."""
        assert self._flags is not None, f"{self.phase} is not packed: its tokens have no flags"
        _, files, windows, _ = self._find(np.arange(first, first + count, dtype=np.int64))
        return self._flags.read_windows(files, windows)

    def locate(self, numbers: np.ndarray) -> list[Json]:
        """Return source, shard file, first token in it, and epoch of sequences (int64 (n,))."""
        places = []
        for number, source, file, window, epoch in np.stack(
            [numbers, *self._find(numbers)], axis=1
        ).tolist():
            names = self.source_names[source], self._file_names[file]
            place = number, *names, window * self.seq_len, epoch
            places.append(dict(zip(PLACE, place, strict=True)))
        return places

    def windows_per_source(self, sequences: int) -> dict[str, int]:
        """Return the windows of each source consumed after `sequences` sequences, offsets included."""
        return dict(zip(self.source_names, self._count_consumed(sequences).tolist(), strict=True))

    def _count_consumed(self, sequences: int) -> np.ndarray:
        return self._offsets + order.count_served(self.weights, self._places, sequences)

    def check_epochs(self, sequences: int) -> None:
        """Raise ValueError if `sequences` sequences repeat a source beyond its epoch cap."""
        consumed = self._count_consumed(sequences)
        passed = (consumed > self._offsets) & (consumed > self._caps * self._windows)
        for index in np.flatnonzero(passed).tolist():
            name = self.source_names[index]
            windows = self._windows[index]
            raise ValueError(
                f"source {name!r} would be read {consumed[index] / windows:.2f} times after {sequences} sequences of "
                f"{self.phase}, its epoch_cap is {self._caps[index]} ({windows} windows); train for fewer sequences, "
                "lower its weight, add text, or raise epoch_cap in the recipe"
            )

    @property
    def rule(self) -> str:
        """The identity (hex) of how sequences are drawn: weights, seed and cuts, not the text.

        Checkpoints hold it, so what it hashes must keep its form.
        """
        weights = [pair for pair in zip(self.source_names, self.weights, strict=True) if pair[1]]
        # 0: folders of before had segments
        return _digest([order.RULE, self._decides, [[0, weights]]])

    def identify_files_read(self, source: str, windows: int) -> list[str]:
        """Return identities (hex) of the files that decide a source's first `windows` windows.

        After the first epoch, they include the whole source. Equal beginnings give the same windows.
        """
        index = self.source_names.index(source)
        begin = int(self._source_begins[index])
        total = int(self._windows[index])
        first = int(np.searchsorted(self._file_begins, begin))
        last = int(np.searchsorted(self._file_begins, begin + min(windows, total)))
        whole_source = [f"all {total}"] if windows > total else []
        files = zip(self._file_names, self._walks[:, 0].tolist(), self._file_sha256, strict=True)
        identities = [_digest([self._decides, source, *facts]) for facts in list(files)[first:last]]
        return identities + whole_source

    def check_continues(self, source: str, windows: int, recorded: Sequence[str] | None) -> None:
        """Raise ValueError unless `recorded` (`identify_files_read` of then, or None) is the current data."""
        # reading on in changed files would repeat some windows and never read others, unseen
        current = self.identify_files_read(source, windows)
        if current == recorded:
            return
        pairs = enumerate(zip(current, recorded or [], strict=False))
        shared_files = next((n for n, (now, before) in pairs if now != before), len(current))
        begin = int(self._source_begins[self.source_names.index(source)])
        first = int(np.searchsorted(self._file_begins, begin))
        file_windows = self._walks[first : first + shared_files, 0]
        shared_windows = min(windows, int(file_windows.sum())) if recorded else 0
        raise ValueError(
            f"source {source!r} is not the one of which {windows} windows were read: {shared_windows} of these lie "
            f"in files that are unchanged, {windows - shared_windows} in others. Going on behind window {windows} "
            f"could read up to {windows - shared_windows} windows twice and leave out as many; from its beginning, "
            f"{windows}. Continue with the "
            "data of the checkpoint (more `keep` changes the last shard, and adds others behind it), give new text "
            f"as a source of another name, or read it from its beginning: mixture.begin_again = [{source!r}]"
        )

    def _find(self, g: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return source, file, window in the file, and epoch of global sequences: int64 (n,) each."""
        # The symbols of the docstring of `order`: g = b M + r, s = P[r], j = offset_s + b w_s + R[r],
        # and j = e n_s + i: the i-th window that epoch e reads of the n_s of the source.
        block, place = np.divmod(g, len(self._places))
        index = self._places[place]
        items = (
            self._offsets[index]
            + block * np.array(self.weights)[index]
            + self._earlier_in_block[place]
        )
        epochs, window = np.divmod(items, self._windows[index])
        # from epoch 1 on it is window pi(i) of the source: a keyed permutation of all its files
        for at in np.flatnonzero(epochs).tolist():
            source = index[at]
            keys = order.round_keys(self.seed, self.source_names[source], int(epochs[at]))
            window[at] = order.permute(int(window[at]), int(self._windows[source]), keys)
        window = np.asarray(window + self._source_begins[index])
        file = np.searchsorted(self._file_begins, window, side="right") - 1
        window -= self._file_begins[file]
        # in epoch 0 pi stays within a file: i tells the file and the step k of its walk, which is at
        # window (f + k d) mod n of its n, from the first window f on. The stride d and n have no
        # common factor, so the walk meets each window once
        count, stride, first = self._walks[file].T
        walked = (window * stride + first) % count
        return index, file, np.where(epochs == 0, walked, window), epochs


def _open_source(lock_path: Path, entry: Json) -> list[TokenFile]:
    folder = lock_path.parent / entry["name"]
    manifest = shards.read_manifest(folder)
    if manifest["content_sha256"] != entry["content_sha256"]:
        raise ValueError(
            f"{folder / shards.MANIFEST} is not of the data that {lock_path} pins (content_sha256 "
            f"{manifest['content_sha256']}, pinned is {entry['content_sha256']}): another text, tokenizer, seed or "
            "length. Use the lock file that belongs to it, or prepare both again"
        )
    shards.check_sizes(folder, manifest)
    return [(os.path.join(folder, shard["name"]), shard) for shard in manifest["shards"]]


def _list_flags(files: Sequence[TokenFile]) -> list[TokenFile]:
    flags = [(os.path.dirname(path), entry["flags"]) for path, entry in files]
    return [(os.path.join(folder, entry["name"]), entry) for folder, entry in flags]


def valid_windows(
    data_dir: str | Path, source: str, max_windows: int | None = None, flags: bool = False
) -> np.ndarray:
    """Return held-out windows of a source, never in training: (n, S + 1), dtype as on disk.

    Args:
        max_windows: return only the first ones.
        flags: return the tokens' flags instead, of packed windows.

    Raises:
        ValueError: files are missing or damaged.
    """
    folder = Path(data_dir) / source
    manifest = shards.read_manifest(folder)
    shards.check_sizes(folder, manifest)
    entry = manifest["valid"]["flags"] if flags else manifest["valid"]
    count = entry["windows"] if max_windows is None else min(max_windows, entry["windows"])
    files = WindowFiles([(str(folder / entry["name"]), entry)], manifest["seq_len"])
    return files.read_windows(np.zeros(count, int), np.arange(count), shards.token_dtype(entry))
