"""Prometheus metrics: what the scheduler counts, read when asked for, and answers by endpoint and status."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from .scheduler import Scheduler
from .totals import SECONDS, Distribution

COUNTERS = {
    "prompt_tokens": "Tokens of prompts",
    "reused_tokens": "Tokens of prompts that were still in the KV cache",
    "generated_tokens": "New tokens",
    "proposed_tokens": "Draft tokens",
    "accepted_tokens": "Draft tokens that were right",
}
BYTES = {
    "kv_bytes": "Keys and values held now, those that are kept for later prompts among them",
    "cache_bytes": "Limit of the keys and values that are kept: --cache-bytes",
}
SAVED = {
    "files": "Prefixes that are kept in --cache-dir for this model",
    "bytes": "Of their files",
    "limit_bytes": "Of all files in --cache-dir: --cache-dir-bytes",
}
SAVED_COUNTERS = {
    "hits": "Prefixes that were loaded from --cache-dir",
    "hit_tokens": "Tokens of prompts that need not be read for that",
}


class Metrics(Collector):
    """Metrics of one server, in a registry of their own."""

    def __init__(self, scheduler: Scheduler, facts: Mapping[str, Any]):
        """facts: with weight_bytes and, where it is known, probe_bytes_per_s, which may grow."""
        self._scheduler, self._facts = scheduler, facts
        self.registry = CollectorRegistry()
        self.answers = Counter(
            "laneformer_requests", "Answers", ["endpoint", "status"], registry=self.registry
        )
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        scheduler, totals = self._scheduler, self._scheduler.totals
        labels = {name: str(value) for name, value in self._facts.items()}
        yield InfoMetricFamily("laneformer_engine", "The model and how it is decoded", labels)
        yield GaugeMetricFamily("laneformer_waiting", "Requests in the queue", len(scheduler.waiting))
        yield GaugeMetricFamily("laneformer_running", "Requests that decode", len(scheduler.running))
        for name, size in scheduler.engine.kv_cache.items():
            yield GaugeMetricFamily(f"laneformer_{name}", BYTES[name], size)
        if saved := scheduler.engine.saved_prefixes:
            for name, text in SAVED.items():
                yield GaugeMetricFamily(f"laneformer_saved_{name}", text, saved[name])
            for name, text in SAVED_COUNTERS.items():
                yield CounterMetricFamily(f"laneformer_saved_{name}", text, saved[name])
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"laneformer_{name}", text, getattr(totals, name))
        yield histogram(
            "time_to_first_token", "From a request's arrival to its first token", totals.first_token
        )
        yield histogram("token_gap", "Between the tokens of a request", totals.gap)
        ended = CounterMetricFamily(
            "laneformer_ended", "Requests of the engine by their end", labels=["reason"]
        )
        for reason, count in list(totals.ended.items()):
            ended.add_metric([reason], count)
        yield ended
        last = "while the request decoded that ended last"
        yield GaugeMetricFamily(
            "laneformer_tokens_per_second", f"New tokens a second {last}", totals.tokens_per_s
        )
        if totals.processor_share is not None:
            told = f"Of the engine's threads' time, while they had a processor, {last}"
            yield GaugeMetricFamily("laneformer_processor_share", told, totals.processor_share)
        if (probe := self._facts["probe_bytes_per_s"]) is not None:
            yield GaugeMetricFamily(
                "laneformer_probe_bytes_per_second",
                "Read by all threads without requests: the most so far",
                probe,
            )
            used = totals.passes_per_s * self._facts["weight_bytes"] / probe
            yield GaugeMetricFamily(
                "laneformer_bandwidth_ratio", f"Weights read, as a part of the probe, {last}", used
            )


def histogram(name: str, text: str, found: Distribution) -> HistogramMetricFamily:
    bounds = [*map(str, SECONDS), "+Inf"]
    buckets = list(zip(bounds, accumulate(found.counts), strict=True))
    return HistogramMetricFamily(f"laneformer_{name}_seconds", text, buckets, found.sum_s)
