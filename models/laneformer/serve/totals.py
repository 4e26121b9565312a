"""What a server counts of all its requests."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial

from prometheus_client import Histogram

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
times = partial(Histogram, buckets=SECONDS, registry=None)


def times_to_first_token() -> Histogram:
    return times("laneformer_time_to_first_token_seconds", "From arrival to the first token")


def token_gaps() -> Histogram:
    return times("laneformer_token_gap_seconds", "Between the tokens of a request")


@dataclass
class Totals:
    """Of all requests so far. tokens_per_s, passes_per_s: while the request decoded that ended last."""

    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    first_token: Histogram = field(default_factory=times_to_first_token)
    gap: Histogram = field(default_factory=token_gaps)
    ended: Counter[str] = field(default_factory=Counter)  # by finish reason; of the event loop's thread
    tokens_per_s: float = 0.0
    passes_per_s: float = 0.0
    processor_share: float | None = None  # of the engine's threads' time meanwhile: they had a processor
