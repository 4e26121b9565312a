"""Prometheus metrics: the scheduler's counts, and answers by endpoint and status."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from .scheduler import Scheduler

COUNTERS = {
    "prompt_tokens": "Tokens of prompts",
    "reused_tokens": "Tokens of prompts that were still in the KV cache",
    "generated_tokens": "New tokens",
    "proposed_tokens": "Draft tokens",
    "accepted_tokens": "Draft tokens that were right",
    "saved_hits": "Prefixes that were loaded from --cache-dir",
    "saved_hit_tokens": "Tokens of prompts that need not be read for that",
}
GAUGES = {
    "kv_bytes": "Keys and values held now, those that are kept for later prompts among them",
    "cache_bytes": "Limit of the keys and values that are kept: --cache-bytes",
    "saved_files": "Prefixes that are kept in --cache-dir for this model",
    "saved_bytes": "Of their files",
    "saved_limit_bytes": "Of all files in --cache-dir: --cache-dir-bytes",
}


class Metrics(Collector):
    def __init__(self, scheduler: Scheduler, facts: Mapping[str, Any]):
        # facts["probe_bytes_per_s"] may be None, and may grow
        self._scheduler = scheduler
        self._facts = facts
        self.registry = CollectorRegistry()
        self.answers = Counter(
            "laneformer_requests", "Answers", ["endpoint", "status"], registry=self.registry
        )
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        scheduler = self._scheduler
        totals = self._scheduler.totals
        labels = {name: str(value) for name, value in self._facts.items()}
        yield InfoMetricFamily("laneformer_engine", "The model and how it is decoded", labels)
        yield make_gauge("waiting", "Requests in the queue", len(scheduler.waiting))
        yield make_gauge("running", "Requests that decode", len(scheduler.running))
        saved = {f"saved_{name}": value for name, value in scheduler.engine.saved_prefixes.items()}
        values = {**vars(totals), **scheduler.engine.kv_cache, **saved}
        yield from (
            make_gauge(name, text, values[name]) for name, text in GAUGES.items() if name in values
        )
        for name, text in COUNTERS.items():
            if name in values:
                yield CounterMetricFamily(f"laneformer_{name}", text, values[name])
        yield from (*totals.first_token.collect(), *totals.gap.collect())
        ends = CounterMetricFamily("laneformer_ended", "Requests by their end", labels=["reason"])
        for reason, count in list(totals.ended.items()):
            ends.add_metric([reason], count)
        yield ends
        last = "while the request decoded that ended last"
        yield make_gauge("tokens_per_second", f"New tokens a second {last}", totals.tokens_per_s)
        if (share := totals.processor_share) is not None:
            text = f"Of the engine's threads' time, while they had a processor, {last}"
            yield make_gauge("processor_share", text, share)
        if (probe := self._facts["probe_bytes_per_s"]) is not None:
            yield make_gauge(
                "probe_bytes_per_second", "Most read by all threads, without requests", probe
            )
            share_read = totals.passes_per_s * self._facts["weight_bytes"] / probe
            yield make_gauge(
                "bandwidth_ratio", f"Weights read, as a part of the probe, {last}", share_read
            )


def make_gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"laneformer_{name}", text, value)
