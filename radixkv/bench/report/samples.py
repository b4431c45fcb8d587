"""What pictures of a run are drawn from: every latency, and how throughput and hit rate went over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from radixkv.bench.load.record import Measurement, Record
from radixkv.bench.report.run_metrics import optimum_of

MIN_INTERVALS, MAX_INTERVALS = 10, 60
"""Of the series: an interval is a second long where that gives so many, and all are equally long."""


@dataclass(frozen=True)
class Samples:
    """The requests of a run that succeeded. Series have a value an interval of the run."""

    ttft_s: Sequence[float]
    """Ascending, a request each."""
    itl_s: Sequence[float]
    """Ascending, a gap between pieces each."""
    interval_s: float
    output_tokens_per_s: Sequence[float]
    """By when they came; a request's tokens are spread evenly over its pieces."""
    hit_rate_pct: Sequence[float | None]
    """Of the prompts that were sent in the interval; None: none was, or the server does not say."""
    optimum_pct: Sequence[float | None]
    """The same of an infinite cache."""


def samples_of(measurement: Measurement) -> Samples:
    """The samples of a run. O(pieces), and one optimum."""
    good = [record for record in measurement.records if record.error is None]
    began = min((record.started for record in good), default=0.0)
    ended = max((record.started + record.arrivals[-1] for record in good), default=0.0)
    n_intervals = min(max(round(ended - began), MIN_INTERVALS), MAX_INTERVALS)
    series = _Series(began, (ended - began) / n_intervals or 1.0, n_intervals)
    is_told = all(record.n_cached_tokens is not None for record in good)
    optimum = optimum_of(measurement.records)
    return Samples(
        ttft_s=sorted(record.ttft for record in good),
        itl_s=sorted(gap for record in good for gap in record.itl),
        interval_s=series.interval_s,
        output_tokens_per_s=series.throughput(good),
        hit_rate_pct=series.share([(record, record.n_cached_tokens or 0) for record in good] if is_told else []),
        optimum_pct=series.share(optimum or []),
    )


@dataclass(frozen=True)
class _Series:
    """Sums over the intervals of a run."""

    began: float
    interval_s: float
    n_intervals: int

    def throughput(self, records: Sequence[Record]) -> list[float]:
        sums = [0.0] * self.n_intervals
        for record in records:
            arrivals = record.arrivals
            for arrival in arrivals:
                sums[self._place(record.started + arrival)] += record.n_output_tokens / len(arrivals)
        return [each / self.interval_s for each in sums]

    def share(self, counts: Sequence[tuple[Record, int]]) -> list[float | None]:
        """Of each interval's prompt tokens, those counted, in percent."""
        parts, wholes = [0] * self.n_intervals, [0] * self.n_intervals
        for record, count in counts:
            place = self._place(record.started)
            parts[place] += count
            wholes[place] += record.n_prompt_tokens
        return [100.0 * part / whole if whole else None for part, whole in zip(parts, wholes, strict=True)]

    def _place(self, moment: float) -> int:
        return min(int((moment - self.began) / self.interval_s), self.n_intervals - 1)
