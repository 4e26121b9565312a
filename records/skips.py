"""Sequences excluded from training: the order stays a pure function of (lock, seed, skip list, position).

The trainer counts positions 0, 1, 2, ...; position p reads the p-th sequence number that is in no skipped range
[first, last). RUN/skip_sequences.json holds the ranges of refused steps, the job file those of the user.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from records.events import record_event
from records.files import JsonObject, read_json, survive_full_disk, write_json

FILE = "skip_sequences.json"


class SkipList:
    """Ranges [first, last) of sequence numbers, sorted and merged."""

    def __init__(self, ranges: Iterable[Sequence[int]] = ()):
        merged: list[tuple[int, int]] = []
        for interval in sorted(tuple(map(int, interval)) for interval in ranges):
            if len(interval) != 2 or not 0 <= interval[0] < interval[1]:
                raise ValueError(
                    f"skipped range {list(interval)} must be [first, last) with 0 <= first < last, in sequence numbers"
                )
            # overlapping and adjacent ranges become one, so no number is subtracted twice
            if merged and interval[0] <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(merged[-1][1], interval[1])
            else:
                merged.append((interval[0], interval[1]))
        self.ranges = merged
        lengths = np.array([last - first for first, last in merged], dtype=np.int64)
        self._shift = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        # the position at which each range would have begun: everything from there on is moved
        self._begins = np.array([first for first, _ in merged], dtype=np.int64) - self._shift[:-1]

    def numbers(self, first: int, count: int) -> np.ndarray:
        """Return the sequence numbers of positions first .. first + count: int64 (count,)."""
        positions = np.arange(first, first + count, dtype=np.int64)
        return positions + self._shift[np.searchsorted(self._begins, positions, side="right")]

    def reach(self, positions: int) -> int:
        """Count how far into the mixture so many positions reach."""
        return int(self.numbers(positions - 1, 1)[0]) + 1 if positions else 0

    def until(self, number: int) -> list[tuple[int, int]]:
        """Cut the ranges at a sequence number."""
        return [(first, min(last, number)) for first, last in self.ranges if first < number]


def ranges_of(numbers: np.ndarray) -> list[list[int]]:
    """Cover increasing numbers with the fewest ranges [first, last)."""
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    return [[int(run[0]), int(run[-1]) + 1] for run in np.split(numbers, breaks) if len(run)]


def read_skip_list(run: Path, from_job_file: Iterable[Sequence[int]]) -> SkipList:
    """Join the ranges of the job file and of RUN/skip_sequences.json."""
    return SkipList([*from_job_file, *(entry["window"] for entry in read_entries(run))])


def append_skips(run: Path, ranges: Iterable[Sequence[int]], reason: str) -> bool:
    """Add ranges to RUN/skip_sequences.json; return whether there was room for that."""
    with survive_full_disk(run / FILE):
        entries = [
            *read_entries(run),
            *({"window": list(interval), "reason": reason} for interval in ranges),
        ]
        write_json(run / FILE, entries)
        record_event(run, "skip", windows=list(ranges), reason=reason)
        return True
    return False


def read_entries(run: Path) -> list[JsonObject]:
    return read_json(run / FILE, [])
