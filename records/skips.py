"""Sequences excluded from training: the order stays a pure function of (lock, seed, skip list, position).

The trainer counts positions 0, 1, 2, ...; position p reads the p-th sequence number that is in no skipped window
[first, last). RUN/skip_sequences.json holds the windows of the supervisor, the job file those of the user.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from records.events import record_event
from records.files import JsonObject, read_json, survive_full_disk, write_atomically

FILE = "skip_sequences.json"


class SkipList:
    """Windows [first, last) of sequence numbers, sorted and merged."""

    def __init__(self, windows: Iterable[Sequence[int]] = ()):
        merged: list[tuple[int, int]] = []
        for window in sorted(tuple(map(int, window)) for window in windows):
            if len(window) != 2 or not 0 <= window[0] < window[1]:
                raise ValueError(
                    f"skip window {list(window)} must be [first, last) with 0 <= first < last, in sequence numbers"
                )
            # overlapping and adjacent windows become one, so no number is subtracted twice
            if merged and window[0] <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(merged[-1][1], window[1])
            else:
                merged.append((window[0], window[1]))
        self.windows = merged
        lengths = np.array([last - first for first, last in merged], dtype=np.int64)
        self._shift = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        # the position at which each window would have begun: everything from there on is moved
        self._begins = np.array([first for first, _ in merged], dtype=np.int64) - self._shift[:-1]

    def numbers(self, first: int, count: int) -> np.ndarray:
        """Return the sequence numbers of positions first .. first + count: int64 (count,)."""
        positions = np.arange(first, first + count, dtype=np.int64)
        return positions + self._shift[np.searchsorted(self._begins, positions, side="right")]

    def reach(self, positions: int) -> int:
        """Count how far into the mixture so many positions reach."""
        return int(self.numbers(positions - 1, 1)[0]) + 1 if positions else 0

    def until(self, number: int) -> list[tuple[int, int]]:
        """Cut the windows at a sequence number."""
        return [(first, min(last, number)) for first, last in self.windows if first < number]


def windows_of(numbers: np.ndarray) -> list[list[int]]:
    """Cover increasing numbers with the fewest windows [first, last)."""
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    return [[int(run[0]), int(run[-1]) + 1] for run in np.split(numbers, breaks) if len(run)]


def read_skip_list(run: Path, from_job_file: Iterable[Sequence[int]]) -> SkipList:
    """Join the windows of the job file and of RUN/skip_sequences.json."""
    return SkipList([*from_job_file, *(entry["window"] for entry in read_entries(run))])


def leave_out(run: Path, windows: Iterable[Sequence[int]], reason: str) -> bool:
    """Add windows to RUN/skip_sequences.json; return whether there was room for that."""
    with survive_full_disk(run / FILE):
        entries = [
            *read_entries(run),
            *({"window": list(window), "reason": reason} for window in windows),
        ]
        write_atomically(run / FILE, json.dumps(entries, indent=2) + "\n")
        record_event(run, "skip", windows=list(windows), reason=reason)
        return True
    return False


def read_entries(run: Path) -> list[JsonObject]:
    return read_json(run / FILE, [])
