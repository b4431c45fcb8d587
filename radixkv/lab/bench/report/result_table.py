"""Text tables of a run's results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from radixkv.lab.bench.formatting import cell
from radixkv.lab.bench.report.run_metrics import METRICS, Metrics, ratio
from radixkv.terminal import Table

WIDTH = 50
MAX_REASONS = 10
"""Maximum number of errors shown; a server may give each request a different error text."""

_COUNTS = (
    ("Successful requests:", "completed"),
    ("Failed requests:", "failed"),
    ("Sessions:", "num_sessions"),
    ("Maximum request concurrency:", "max_concurrency"),
    ("Request rate configured (req/s):", "request_rate"),
    ("Speed of the data set's clock:", "speed"),
    ("Benchmark duration (s):", "duration"),
    ("Total input tokens:", "total_input_tokens"),
    ("Total generated tokens:", "total_output_tokens"),
    ("Request throughput (req/s):", "request_throughput"),
    ("Request goodput (req/s):", "request_goodput"),
    ("Output token throughput (tok/s):", "output_throughput"),
    ("Total token throughput (tok/s):", "total_throughput"),
    ("Achieved concurrency:", "concurrency"),
)

_TIMES = (
    ("Time to First Token", "TTFT", "ttft"),
    ("Time per Output Token (excl. 1st token)", "TPOT", "tpot"),
    ("Inter-token Latency", "ITL", "itl"),
    ("End-to-end Latency", "E2E", "e2e_latency"),
)

_STATISTICS = (("Mean", "mean"), ("Median", "median"), ("P99", "p99"))

_EQUAL = {True: "yes", False: "NO", None: "not known"}

Rows = list[tuple[str, str]]


def result_table(metrics: Metrics) -> str:
    """Returns the table of one run: rows of other engines' benchmarks, then the prefix cache and drafts, if any."""
    lines: list[str] = []
    for heading, rows in table_sections(metrics):
        lines.append(heading.center(WIDTH, "-") if lines else f" {heading} ".center(WIDTH, "="))
        lines += [f"{label:<40} {value:<10}".rstrip() for label, value in rows]
    return "\n".join([*lines, *remarks(metrics), "=" * WIDTH])


def table_sections(metrics: Metrics) -> list[tuple[str, Rows]]:
    """Returns the headings of the result table, each with its rows of label and value."""
    times = [
        (title, [_row(f"{label} {short} (ms):", metrics[f"{key}_{name}_ms"]) for label, key in _STATISTICS])
        for title, short, name in _TIMES
    ]
    if metrics["mean_returning_ttft_ms"] is not None:
        times[0][1].append(_row("Mean TTFT, returning turns (ms):", metrics["mean_returning_ttft_ms"]))
    report = metrics["cache_report"]
    cache = [
        _row("Cache:", metrics["cache"] or "as the server has it"),
        _row("Cached prompt tokens:", report["total_cached_tokens"]),
        _row("Cache hit rate (%):", report["cache_hit_rate_pct"]),
        _row("Optimum, infinite cache (%):", report["optimum_pct"]),
    ]
    if (repeated := report.get("repeated_pct")) is not None:
        elsewhere = repeated - report["optimum_pct"]
        cache.append(_row("Repeated behind other tokens (%):", elsewhere))
    if metrics["outputs_sha256"] is not None:
        cache.append(_row("Outputs, SHA-256:", metrics["outputs_sha256"][:16]))
    drafts = metrics["draft_report"]
    return [
        ("Serving Benchmark Result", _counts(metrics)),
        *times,
        ("Prefix Cache", cache),
        *([] if drafts is None else [("Speculative Decoding", _drafts(drafts))]),
    ]


def remarks(metrics: Metrics) -> list[str]:
    """Returns sentences on what limits the meaning of the metrics."""
    lines = []
    if metrics["aborted"] is not None:
        lines.append(f"The run ended early: {metrics['aborted']}. The metrics cover the requests until then.")
    if (metrics.get("accounting") or {}).get("agree") is False:
        lines.append(
            "The client, the answers' usage and the server's metrics count tokens differently: see accounting."
        )
    if not metrics["cache_flushed"]:
        lines.append("The server has no endpoint that empties its cache: the cache may not have been cold.")
    report = metrics["cache_report"]
    if report["optimum_pct"] is None and metrics["completed"]:
        lines.append("No optimum: the server returns no token ids, and texts do not tell which tokens are shared.")
    if metrics["outputs_sha256"] is None:
        reason = "a request failed" if metrics["failed"] else "the server returns no token ids"
        lines.append(f"No digest of the outputs: {reason}.")
    return lines


def outputs_equal(off: Metrics, on: Metrics) -> bool | None:
    """Returns whether both runs gave the same output tokens; None: a run has no digest."""
    digests = off["outputs_sha256"], on["outputs_sha256"]
    return None if None in digests else digests[0] == digests[1]


def main_rows(off: Metrics, on: Metrics) -> list[tuple[str, str, str, str]]:
    """Returns the label, both values and the improvement of each main metric that a run has."""
    rows = []
    for metric in METRICS:
        before, after = metric.of(off), metric.of(on)
        if metric.is_main and not (before is None and after is None):
            better = metric.better(before, after)
            rows.append((metric.label, cell(before), cell(after), "n/a" if better is None else f"{better:.2f}x"))
    return rows


def comparison(off: Metrics, on: Metrics) -> str:
    """Returns the table of two runs of the same requests with the cache off and on."""
    columns = Table(("", "off", "on", "better"), (30, 8, 8, 8))
    lines = [" Prefix cache off and on ".center(WIDTH + 10, "="), columns.text(main_rows(off, on))]
    report = on["cache_report"]
    of_optimum = ratio(report["cache_hit_rate_pct"], report["optimum_pct"])
    lines.append(
        f"Cache hit rate {cell(report['cache_hit_rate_pct'])}%, optimum {cell(report['optimum_pct'])}%: "
        f"{cell(None if of_optimum is None else 100 * of_optimum)}% of it"
    )
    if (repeated := report.get("repeated_pct")) is not None:
        lines.append(
            f"{cell(repeated - report['optimum_pct'])}% more of the prompt tokens were repeated behind other "
            "tokens: no prefix cache finds them"
        )
    lines.append(f"Outputs equal: {_EQUAL[outputs_equal(off, on)]}")
    lines.append("=" * (WIDTH + 10))
    return "\n".join(lines)


def failures(errors: Sequence[str]) -> str:
    """Returns the most frequent errors of failed requests, one in a line with its count."""
    counts = Counter(" ".join(error.split()) for error in errors).most_common()
    lines = [f"{count} x {error}" for error, count in counts[:MAX_REASONS]]
    n_others = sum(count for _, count in counts[MAX_REASONS:])
    return "\n".join([*lines, f"{n_others} x other reasons"] if n_others else lines)


def _counts(metrics: Metrics) -> Rows:
    rows = []
    for label, key in _COUNTS:
        if metrics.get(key) is not None:
            rows.append(_row(label, metrics[key]))
        if key == "failed":
            rows += [_row(f"  {kind}:", count) for kind, count in metrics["errors"].items()]
    for reason, count in (metrics.get("left_out") or {}).items():
        rows.append(_row(f"Of the data set, {reason}:", count))
    if metrics["total_choices"] != metrics["completed"]:
        rows.append(_row("Choices of successful requests:", metrics["total_choices"]))
    if metrics["mean_lateness_ms"] is not None:
        rows.append(_row("Mean lateness of sending (ms):", metrics["mean_lateness_ms"]))
        rows.append(_row("P99 lateness of sending (ms):", metrics["p99_lateness_ms"]))
    if metrics["n_checked"]:
        rows.append(_row("Answers checked:", metrics["n_checked"]))
        rows.append(_row("Accuracy (%):", metrics["accuracy_pct"]))
    return rows


def _drafts(report: Metrics) -> Rows:
    rows = [
        _row("Drafted tokens:", report["draft_tokens"]),
        _row("Accepted tokens:", report["accepted_tokens"]),
        _row("Accepted drafts (%):", report["acceptance_pct"]),
    ]
    for source, counts in report["by_source"].items():
        share = 100 * counts["accepted_tokens"] / counts["draft_tokens"]
        rows.append(_row(f"  {source}, {counts['draft_tokens']} drafted (%):", share))
    rows.append(_row("Tokens a step of an answer:", report["tokens_a_step"]))
    if report["steps_without_overlap"] is not None:
        rows.append(_row("Steps without overlap:", report["steps_without_overlap"]))
    return rows


def _row(label: str, value: object) -> tuple[str, str]:
    return label, cell(value)
