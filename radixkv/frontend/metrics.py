"""Prometheus metrics: latencies measured here, counters and gauges from the runtime's ``Stats``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from radixkv.frontend.compat import Repeat
from radixkv.frontend.interval import Interval
from radixkv.wire import Stats

PREFIX = "radixkv:"

_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Metrics:
    """All metrics of one server, in a registry of their own."""

    def __init__(self) -> None:
        self.interval: Interval | None = None
        """The last one that the server looked at, if it looks."""
        self._registry = CollectorRegistry(auto_describe=False)
        self._first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token.", _LONG)
        self._next_token = self._histogram("inter_token_latency_seconds", "Between tokens of an answer.", _SHORT)
        self._whole = self._histogram("e2e_request_latency_seconds", "Arrival to last token.", _LONG)
        self._queue = self._histogram("request_queue_time_seconds", "Arrival to first scheduled row.", _LONG)

    def first_token(self, seconds: float) -> None:
        """From the request's arrival to its first token."""
        self._first_token.observe(seconds)

    def next_tokens(self, seconds: float, count: int) -> None:
        """From an answer's last token to the ``count`` tokens after it."""
        for _ in range(count):
            self._next_token.observe(seconds / count)

    def done(self, seconds: float, queue_seconds: float) -> None:
        """A whole answer, and how long its request had waited."""
        self._whole.observe(seconds)
        self._queue.observe(queue_seconds)

    def look(self, interval: Interval) -> None:
        """What happened lately."""
        self.interval = interval

    def render(self, stats: Stats, repeat: Repeat | None = None) -> bytes:
        """Prometheus' text format, repeated under another engine's names if asked for. O(series)."""
        families = [*self._registry.collect(), *_families(stats)]
        if repeat is not None:
            families += [*repeat.families(families), *repeat.figures(stats, self.interval)]
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collected(families))
        return generate_latest(registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, text, buckets=buckets, registry=self._registry)


@dataclass(frozen=True, eq=False)
class _Collected(Collector):
    families: Sequence[Metric]

    def collect(self) -> Sequence[Metric]:
        """What was given."""
        return self.families


def _families(stats: Stats) -> Iterator[Metric]:
    """One family a number."""
    used = stats.n_pages - stats.n_pages_free - stats.n_pages_evictable
    gauges = {
        "num_requests_running": (stats.n_running, "Requests with rows in steps."),
        "num_requests_waiting": (stats.n_waiting, "Requests that wait for their first row."),
        "kv_cache_usage_perc": (used / stats.n_pages, "Pages neither free nor evictable; 1 is all."),
        "kv_pages": (stats.n_pages, "Pages in the pool."),
        "kv_pages_free": (stats.n_pages_free, "Pages that hold nothing."),
        "kv_pages_evictable": (stats.n_pages_evictable, "Cached pages that no request holds."),
    }
    for name, (value, text) in gauges.items():
        yield GaugeMetricFamily(PREFIX + name, text, value=value)
    counters = {
        "prefix_cache_queries": (stats.prefix_queries_total, "Prompt tokens looked up."),
        "prefix_cache_hits": (stats.prefix_hits_total, "Prompt tokens that were not computed."),
        "prompt_tokens": (stats.prompt_tokens_total, "Prompt tokens of requests that were prefilled."),
        "generation_tokens": (stats.generation_tokens_total, "Tokens generated."),
        "num_preemptions": (stats.preemptions_total, "Requests retracted for lack of pages."),
        "pages_evicted": (stats.pages_evicted_total, "Cached pages given up for others."),
        "steps": (stats.steps_total, "Forward passes."),
        "step_seconds": (stats.step_seconds, "Wall time of turns with a step."),
        "schedule_seconds": (stats.schedule_seconds, "Of step_seconds: the scheduler's, cache included."),
        "cache_seconds": (stats.cache_seconds, "Of step_seconds: tree and pool work."),
        "attention_seconds": (
            stats.attention_seconds,
            "The device's, for attention; schedule_seconds divided by it is what management costs.",
        ),
        "frames_dropped": (stats.frames_dropped_total, "Frames that were no message."),
    }
    for name, (value, text) in counters.items():
        yield CounterMetricFamily(PREFIX + name, text, value=value)
