"""What a server counts of all its requests."""

from __future__ import annotations

from collections import Counter
from functools import partial

from prometheus_client import Histogram

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class Totals:
    def __init__(self) -> None:
        times = partial(Histogram, buckets=SECONDS, registry=None)
        self.prompt_tokens = self.reused_tokens = self.generated_tokens = 0
        self.proposed_tokens = self.accepted_tokens = 0  # of drafts
        self.first_token = times(
            "laneformer_time_to_first_token_seconds", "From arrival to the first token"
        )
        self.gap = times("laneformer_token_gap_seconds", "Between the tokens of a request")
        self.ended = Counter[str]()  # by finish reason; of the event loop's thread
        # Of the request that ended last, while it decoded
        self.tokens_per_s = self.passes_per_s = 0.0
        # The part of that time in which the engine's threads had a processor
        self.processor_share: float | None = None
