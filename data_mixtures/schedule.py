"""Which source each sequence comes from, where weights change: segments, each with the pattern of its weights.

A segment begins at a global sequence and lasts until the next one. Each source goes on where the segment before
left it, so a change repeats nothing and leaves nothing out. Counts are closed forms, chained over the segments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from data_mixtures import order


@dataclass(frozen=True)
class Segment:
    """Sequences from `first` on: the pattern of their weights, and what each source has served before them."""

    first: int
    weights: np.ndarray
    places: np.ndarray
    ranks: np.ndarray
    before: np.ndarray

    def served(self, sequences: int) -> np.ndarray:
        """Windows of each source among the first `sequences` sequences, which end in this segment."""
        return self.before + order.served(self.weights.tolist(), self.places, sequences - self.first)


class Schedule:
    """Segments of a mixture; sources are counted in one order throughout, with weight 0 where they have none."""

    def __init__(self, segments: Iterable[tuple[int, Sequence[int]]]) -> None:
        """segments: (first sequence, weights), from sequence 0 on, ascending. ValueError for wrong weights."""
        self.segments: list[Segment] = []
        for first, weights in segments:
            last = self.segments[-1] if self.segments else None
            assert (first == 0) if last is None else (first > last.first), f"a segment begins at {first}"
            before = np.zeros(len(weights), np.int64) if last is None else last.served(first)
            pattern = order.pattern(weights)
            self.segments.append(Segment(first, np.array(weights, np.int64), *pattern, before))
        self._begins = np.array([each.first for each in self.segments], np.int64)

    def find(self, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of global sequences: the source, and how many windows of it earlier ones have served; int64 (n,) each."""
        index, items = np.empty_like(g), np.empty_like(g)
        owners = np.searchsorted(self._begins, g, side="right") - 1
        for number in np.unique(owners).tolist():
            here, segment = owners == number, self.segments[number]
            block, place = np.divmod(g[here] - segment.first, len(segment.places))
            index[here] = source = segment.places[place]
            items[here] = segment.before[source] + block * segment.weights[source] + segment.ranks[place]
        return index, items

    def served(self, sequences: int) -> np.ndarray:
        """How many of the first `sequences` sequences come from each source: closed form, int64 (sources,)."""
        return self.segments[max(self.begun(sequences) - 1, 0)].served(sequences)

    def begun(self, sequences: int) -> int:
        """How many segments have begun before this sequence."""
        return int(np.searchsorted(self._begins, sequences, side="left"))
