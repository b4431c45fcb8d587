"""Latency samples and time series of a run, from which its charts are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from radixkv.bench.load.record import Measurement, Record
from radixkv.bench.report.run_metrics import optimum_of

MIN_INTERVALS, MAX_INTERVALS = 10, 60
"""Bounds of the number of intervals in a time series; within them an interval is about a second long."""


@dataclass(frozen=True)
class Samples:
    """Samples of the requests that succeeded. Time series have one value for each interval of the run."""

    ttft_s: Sequence[float]
    """Time to first token of each request, ascending."""
    itl_s: Sequence[float]
    """Time between consecutive pieces of an answer, ascending."""
    interval_s: float
    """Length of the intervals."""
    output_tokens_per_s: Sequence[float]
    """Output tokens by arrival; a request's tokens are spread evenly over its pieces."""
    hit_rate_pct: Sequence[float | None]
    """Hit rate of the prompts sent in the interval. None: no prompt was sent, or the server does not report it."""
    optimum_pct: Sequence[float | None]
    """Hit rate that an infinite cache would have."""


def samples_of(measurement: Measurement) -> Samples:
    """Returns the samples of a run. Cost: O(pieces), and one ``optimum_cached_tokens``."""
    good = [record for record in measurement.records if record.error is None]
    start = min((record.started for record in good), default=0.0)
    end = max((record.started + record.arrivals[-1] for record in good), default=0.0)
    n_intervals = min(max(round(end - start), MIN_INTERVALS), MAX_INTERVALS)
    series = _Series(start, (end - start) / n_intervals or 1.0, n_intervals)
    has_cached_counts = all(record.n_cached_tokens is not None for record in good)
    optimum = optimum_of(measurement.records)
    return Samples(
        ttft_s=sorted(record.ttft for record in good),
        itl_s=sorted(gap for record in good for gap in record.itl),
        interval_s=series.interval_s,
        output_tokens_per_s=series.throughput(good),
        hit_rate_pct=series.share(
            [(record, record.n_cached_tokens or 0) for record in good] if has_cached_counts else []
        ),
        optimum_pct=series.share(optimum or []),
    )


@dataclass(frozen=True)
class _Series:
    """Computes sums over the intervals of a run."""

    start: float
    interval_s: float
    n_intervals: int

    def throughput(self, records: Sequence[Record]) -> list[float]:
        """Returns the output tokens per second of each interval."""
        sums = [0.0] * self.n_intervals
        for record in records:
            arrivals = record.arrivals
            for arrival in arrivals:
                sums[self._interval(record.started + arrival)] += record.n_output_tokens / len(arrivals)
        return [total / self.interval_s for total in sums]

    def share(self, counts: Sequence[tuple[Record, int]]) -> list[float | None]:
        """Returns for each interval the given numbers of tokens as a percentage of its prompt tokens."""
        parts, totals = [0] * self.n_intervals, [0] * self.n_intervals
        for record, count in counts:
            interval = self._interval(record.started)
            parts[interval] += count
            totals[interval] += record.n_prompt_tokens
        return [100.0 * part / total if total else None for part, total in zip(parts, totals, strict=True)]

    def _interval(self, time: float) -> int:
        """Returns the index of the interval that a time is in."""
        return min(int((time - self.start) / self.interval_s), self.n_intervals - 1)
