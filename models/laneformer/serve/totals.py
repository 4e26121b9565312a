"""What a server counts of all its requests."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class Distribution:
    """How many values were at most each of SECONDS and above the one before; the last count:
    above all of them.
    """

    def __init__(self) -> None:
        self.counts, self.sum_s = [0] * (len(SECONDS) + 1), 0.0

    def add(self, value_s: float) -> None:
        self.counts[bisect_left(SECONDS, value_s)] += 1
        self.sum_s += value_s


@dataclass
class Totals:
    """Of all requests so far. tokens_per_s, passes_per_s: while the request decoded that ended last."""

    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    first_token: Distribution = field(default_factory=Distribution)  # from the submission
    gap: Distribution = field(default_factory=Distribution)  # between tokens of one request
    ended: Counter[str] = field(default_factory=Counter)  # by finish reason; of the event loop's thread
    tokens_per_s: float = 0.0
    passes_per_s: float = 0.0
    processor_share: float | None = None  # of the engine's threads' time meanwhile: they had a processor
