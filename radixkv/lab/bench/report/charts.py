"""Charts of runs, drawn from samples of their requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from radixkv.lab.bench.environment import machine
from radixkv.lab.bench.formatting import three_digits
from radixkv.lab.bench.load.record import Measurement, Record
from radixkv.lab.bench.report.html_page import (
    BLUE,
    GREEN,
    MUTED_COLOUR,
    ORANGE,
    TEXT_COLOUR,
    Section,
    entitle,
    legend,
    new_figure,
    style,
)
from radixkv.lab.bench.report.run_metrics import Metrics, optimum_of, percentile, ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MIN_INTERVALS, MAX_INTERVALS = 10, 60
"""Bounds of the number of intervals in a time series; within them an interval is about a second long."""
MAX_POINTS = 2000
"""Maximum number of points in the curve of a distribution."""
MIN_MS = 0.01
"""Shorter times are drawn at this value: pieces that arrive in one read have no time between them."""

_BARS = (
    ("Requests per second", "request_throughput", True),
    ("Output tokens per second", "output_throughput", True),
    ("Correct answers (%)", "accuracy_pct", True),
    ("Mean time to first token (ms)", "mean_ttft_ms", False),
    ("Mean time per output token (ms)", "mean_tpot_ms", False),
    ("Mean end-to-end latency (ms)", "mean_e2e_latency_ms", False),
)
"""Label, key, and whether more is better."""


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


@dataclass(frozen=True)
class Run:
    """Metrics and samples of a run in which at least one request succeeded."""

    metrics: Metrics
    samples: Samples

    @property
    def name(self) -> str:
        cache = self.metrics["cache"]
        return "the server" if cache is None else f"cache {cache}"

    @property
    def caption(self) -> str:
        """The workload, the model, the machine and the day."""
        environment = self.metrics.get("environment") or {}
        day = str(self.metrics.get("date", ""))[:10]
        parts = (self.metrics["workload"], self.metrics.get("model"), machine(environment), day)
        return "; ".join(filter(None, parts))

    @property
    def colour(self) -> str:
        return {"off": ORANGE, "on": BLUE}.get(self.metrics["cache"], GREEN)


def cache_comparison(off: Run, on: Run) -> Section:
    """Draws the main metrics with the cache off and on as bars."""
    figure = new_figure(10, 4.2)
    bars = [bar for bar in _BARS if off.metrics[bar[1]] is not None and on.metrics[bar[1]] is not None]
    n_columns = 3 if len(bars) > 4 else 2
    for number, (label, key, more_is_better) in enumerate(bars, 1):
        axes = figure.add_subplot(math.ceil(len(bars) / n_columns), n_columns, number)
        values = [off.metrics[key], on.metrics[key]]
        better = ratio(values[1], values[0]) if more_is_better else ratio(values[0], values[1])
        style(axes, title=label)
        axes.barh([1, 0], values, height=0.8, color=[off.colour, on.colour])
        axes.set_yticks([1, 0], [off.name, on.name])
        axes.set_xticks([])
        axes.grid(False)
        axes.spines["bottom"].set_visible(False)
        axes.set_xlim(0, (2.5 if n_columns == 3 else 1.6) * max(*values, 1e-9))  # room for the labels
        for y, value in zip((1, 0), values, strict=True):
            is_compared = y == 0 and better is not None and values[0] != values[1]
            better_text = f"   {better:.2f}× as good" if is_compared else ""
            axes.annotate(
                f"{three_digits(value)}{better_text}",
                (value, y),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
                color=TEXT_COLOUR,
            )
    speed = ratio(on.metrics["request_throughput"], off.metrics["request_throughput"])
    title = f"With the prefix cache on: {speed or 0:.2f} times the requests per second"
    entitle(figure, title, on.caption)
    return Section(
        "Cache off against on",
        "The same requests, one run each.",
        figure=figure,
        file="off_on.png",
        alt_text=title,
    )


def ttft(runs: Sequence[Run]) -> Section:
    """Draws the distribution of times to first token."""
    paragraph = (
        "The share of requests whose first token arrived within the given time. The dots are the median and the "
        "99th percentile."
    )
    section = Section("Time to first token", paragraph, file="ttft.png")
    return _distribution(section, "time to first token", "requests", runs, [run.samples.ttft_s for run in runs])


def itl(runs: Sequence[Run]) -> Section:
    """Draws the distribution of times between pieces. Each run must have some."""
    paragraph = (
        "The share of gaps between two streamed pieces of one answer that were at most the given time. A piece has "
        f"one or more tokens, as the server sends them. Pieces that arrived together are drawn at {MIN_MS} ms."
    )
    section = Section("Inter-token latency", paragraph, file="itl.png")
    return _distribution(section, "time between two pieces", "gaps", runs, [run.samples.itl_s for run in runs])


def _distribution(
    section: Section, name: str, counted: str, runs: Sequence[Run], samples_s: Sequence[Sequence[float]]
) -> Section:
    """Adds the chart of the share that takes at most a time, in ascending samples of each run."""
    values = [[1000 * value for value in samples] for samples in samples_s]
    medians = [percentile(ordered, 50) or 0.0 for ordered in values]
    title = f"Median {name}: {_value_list(runs, medians, ' ms')}"
    figure = new_figure(8, 4)
    axes = figure.subplots()
    style(axes, x_title=f"{name} (milliseconds, logarithmic)", y_title=f"{counted} within that time (%)")
    axes.set_xscale("log")
    for run, ordered in zip(runs, values, strict=True):
        _draw_curve(axes, run, ordered)
    tenths = [max(percentile(ordered, 10) or 0.0, MIN_MS) for ordered in values]
    axes.set_xlim(left=max(axes.get_xlim()[0], min(tenths) / 3))  # a few gaps near 0 would stretch the axis
    axes.set_ylim(0, 103)
    axes.set_yticks([0, 25, 50, 75, 99])
    _label_log_axis(axes)
    legend(axes)
    entitle(figure, title, runs[-1].caption)
    return replace(section, figure=figure, alt_text=title)


def _draw_curve(axes: Axes, run: Run, ordered: Sequence[float]) -> None:
    n_points = min(len(ordered), MAX_POINTS)
    shares = [100 * (index + 1) / n_points for index in range(n_points)]
    xs = [ordered[math.ceil(share / 100 * len(ordered)) - 1] for share in shares]
    xs = [max(x, MIN_MS) for x in xs]
    axes.plot([xs[0], *xs], [0, *shares], drawstyle="steps-post", color=run.colour, linewidth=1.8, label=run.name)
    for share in (50, 99):
        axes.plot([percentile(xs, share) or 0.0], [share], "o", color=run.colour, markersize=5)


def _label_log_axis(axes: Axes) -> None:
    """Labels a logarithmic axis with plain numbers.

    Ticks are at 1, 2 and 5 times powers of ten, at powers of ten on a long axis, and evenly spaced on a short one.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

    low, high = axes.get_xlim()
    steps = (1.0, 2.0, 5.0) if high / low < 3000 else (1.0,)
    axes.xaxis.set_major_locator(LogLocator(subs=steps) if high / low > 5 else MaxNLocator(6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(low, high)


def throughput(runs: Sequence[Run]) -> Section:
    """Draws the output tokens per second over the run."""
    figure = new_figure(8, 3.6)
    axes = figure.subplots()
    title = f"Output tokens per second: {_value_list(runs, [run.metrics['output_throughput'] for run in runs])}"
    style(axes, x_title="time since the first request (seconds)", y_title="output tokens per second")
    for run in runs:
        series, width = run.samples.output_tokens_per_s, run.samples.interval_s
        edges = [width * index for index in range(len(series) + 1)]
        axes.stairs(series, edges, color=run.colour, linewidth=1.8, label=run.name)
        axes.stairs(series, edges, color=run.colour, fill=True, alpha=0.1)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    legend(axes)
    entitle(figure, title, runs[-1].caption)
    return Section(
        "Throughput over time",
        "Output tokens by arrival, in intervals of "
        + " and ".join(f"{three_digits(run.samples.interval_s)} s" for run in runs)
        + ". A request's tokens are spread evenly over its pieces.",
        figure=figure,
        file="throughput.png",
        alt_text=title,
    )


def hit_rate(run: Run) -> Section:
    """Draws the hit rate over the run beside that of an infinite cache. The run must have a hit rate."""
    figure = new_figure(8, 3.6)
    axes = figure.subplots()
    samples, report = run.samples, run.metrics["cache_report"]
    title = f"{report['cache_hit_rate_pct']:.1f}% of prompt tokens came from the cache"
    if report["optimum_pct"] is not None:
        title += f"; {report['optimum_pct']:.1f}% were possible"
    style(axes, x_title="time when the request was sent (seconds)", y_title="prompt tokens from the cache (%)")
    for series, name, colour, dashes in (
        (samples.optimum_pct, "infinite cache", MUTED_COLOUR, "--"),
        (samples.hit_rate_pct, run.name, run.colour, "-"),
    ):
        known = [(samples.interval_s * (index + 0.5), y) for index, y in enumerate(series) if y is not None]
        if known:
            axes.plot(*zip(*known, strict=True), dashes, color=colour, linewidth=1.8, marker="o", label=name)
    axes.set_ylim(0, 103)
    axes.set_xlim(left=0)
    legend(axes)
    entitle(figure, title, run.caption)
    return Section(
        "Hit rate over time",
        "The share of the prompt tokens sent in each interval that came from the cache. Dashed: the share that an "
        "infinite cache would have had of the same requests."
        + ("" if report["optimum_pct"] is not None else " It is not known, since the server returns no token ids."),
        figure=figure,
        file="hit_rate.png",
        alt_text=title,
    )


def _value_list(runs: Sequence[Run], values: Sequence[float], unit: str = "") -> str:
    """Formats one value for each run, with the runs' names if there are several."""
    if len(runs) == 1:
        return f"{three_digits(values[0])}{unit}"
    return ", ".join(f"{three_digits(value)}{unit} ({run.name})" for run, value in zip(runs, values, strict=True))
