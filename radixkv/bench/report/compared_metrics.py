"""Metrics by which runs are compared."""

from __future__ import annotations

from dataclasses import dataclass

from radixkv.bench.report.run_metrics import Metrics


@dataclass(frozen=True)
class Metric:
    """A metric that is compared."""

    label: str
    key: str
    more_is_better: bool
    of_cache: bool = False
    """Whether the key is in the line's ``cache_report``."""
    is_main: bool = False
    """Whether ``--compare-cache`` shows the metric."""

    def of(self, run: Metrics) -> float | None:
        """Returns the run's value; None: it is missing or was not measured."""
        table = run.get("cache_report") or {} if self.of_cache else run
        value: float | None = table.get(self.key)
        return value

    def better(self, before: float | None, after: float | None) -> float | None:
        """Returns the improvement as a ratio; above 1 is better, also for times. None: as for ``ratio``."""
        return ratio(after, before) if self.more_is_better else ratio(before, after)


def ratio(more: float | None, less: float | None) -> float | None:
    """Returns ``more / less``; None: a value is missing or ``less`` is 0."""
    return None if more is None or not less else more / less


METRICS = (
    Metric("Request throughput (req/s)", "request_throughput", True, is_main=True),
    Metric("Request goodput (req/s)", "request_goodput", True),
    Metric("Output throughput (tok/s)", "output_throughput", True, is_main=True),
    Metric("Mean TTFT (ms)", "mean_ttft_ms", False, is_main=True),
    Metric("P99 TTFT (ms)", "p99_ttft_ms", False, is_main=True),
    Metric("Mean TPOT (ms)", "mean_tpot_ms", False, is_main=True),
    Metric("Mean ITL (ms)", "mean_itl_ms", False),
    Metric("P99 ITL (ms)", "p99_itl_ms", False),
    Metric("Mean E2E (ms)", "mean_e2e_latency_ms", False, is_main=True),
    Metric("P99 E2E (ms)", "p99_e2e_latency_ms", False),
    Metric("Cache hit rate (%)", "cache_hit_rate_pct", True, of_cache=True),
    Metric("Accuracy (%)", "accuracy_pct", True, is_main=True),
)
