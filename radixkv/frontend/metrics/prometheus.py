"""Prometheus metrics: latencies measured here, counters and gauges from the runtime's ``Stats``."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from radixkv.frontend.metrics.aliases import Repeat
from radixkv.frontend.metrics.stats_delta import Interval
from radixkv.wire import Stats

PREFIX = "radixkv:"
FINISH_REASONS = ("stop", "length", "abort", "error")
"""How answers end: as they should, because their client left, or without being complete."""

_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Metrics:
    """All metrics of one server, in a registry of their own."""

    def __init__(self) -> None:
        self.interval: Interval | None = None
        """The last one that the server looked at, if it looks."""
        self._n_ended = dict.fromkeys(FINISH_REASONS, 0)
        self._first_token = _Durations("time_to_first_token_seconds", "Arrival to first token.", _LONG)
        self._next_token = _Durations("inter_token_latency_seconds", "Between tokens of an answer.", _SHORT)
        self._whole = _Durations("e2e_request_latency_seconds", "Arrival to last token.", _LONG)
        self._queue = _Durations("request_queue_time_seconds", "Arrival to first scheduled row.", _LONG)

    def first_token(self, seconds: float) -> None:
        """From the request's arrival to its first token."""
        self._first_token.observe(seconds)

    def next_tokens(self, seconds: float, count: int) -> None:
        """From an answer's last token to the ``count`` tokens after it."""
        self._next_token.observe(seconds / count, count)

    def done(self, seconds: float, queue_seconds: float) -> None:
        """A whole answer, and how long its request had waited."""
        self._whole.observe(seconds)
        self._queue.observe(queue_seconds)

    def ended(self, reason: str, count: int = 1) -> None:
        """``count`` answers have ended."""
        self._n_ended[reason] += count

    def look(self, interval: Interval) -> None:
        """What happened lately."""
        self.interval = interval

    def render(self, stats: Stats, repeat: Repeat | None = None) -> bytes:
        """Prometheus' text format, repeated under another engine's names if asked for. O(series)."""
        durations = (self._first_token, self._next_token, self._whole, self._queue)
        families = [*(each.family() for each in durations), self._ended_family(), *_families(stats)]
        if repeat is not None:
            families += [*repeat.families(families), *repeat.figures(stats, self.interval)]
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collected(families))
        return generate_latest(registry)

    def _ended_family(self) -> Metric:
        family = CounterMetricFamily(PREFIX + "requests", "Answers that have ended.", labels=["finish_reason"])
        for reason, count in self._n_ended.items():
            family.add_metric([reason], count)
        return family


class _Durations:
    """A histogram of one thread: the library's takes locks, which for every token is too slow."""

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        self._name = name
        self._text = text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._created = time.time()

    def observe(self, seconds: float, count: int = 1) -> None:
        """``count`` of the same length. O(log buckets)."""
        self._counts[bisect_left(self._bounds, seconds)] += count
        self._sum += seconds * count

    def family(self) -> Metric:
        """What was observed so far."""
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        family = HistogramMetricFamily(PREFIX + self._name, self._text, buckets, self._sum)
        family.add_sample(f"{PREFIX}{self._name}_created", {}, self._created)
        return family


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
            "The device's, for attention; cache_seconds divided by it is what managing memory costs.",
        ),
        "frames_dropped": (stats.frames_dropped_total, "Frames that were no message."),
    }
    for name, (value, text) in counters.items():
        yield CounterMetricFamily(PREFIX + name, text, value=value)
