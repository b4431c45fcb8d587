"""Reports for people: the familiar box, and two runs side by side."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.bench.figures import Figures

WIDTH = 50

_COUNTS = (
    ("Successful requests:", "completed"),
    ("Failed requests:", "failed"),
    ("Sessions:", "num_sessions"),
    ("Maximum request concurrency:", "max_concurrency"),
    ("Request rate configured (req/s):", "request_rate"),
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


def box(figures: Figures) -> str:
    """One run, as other engines' benchmarks print it, and the prefix cache."""
    lines = [" Serving Benchmark Result ".center(WIDTH, "=")]
    lines += [_line(label, figures[key]) for label, key in _COUNTS if figures.get(key) is not None]
    for title, short, name in _TIMES:
        lines.append(title.center(WIDTH, "-"))
        lines += [
            _line(f"{word} {short} (ms):", figures[f"{key}_{name}_ms"])
            for word, key in (("Mean", "mean"), ("Median", "median"), ("P99", "p99"))
        ]
    report = figures["cache_report"]
    lines.append("Prefix Cache".center(WIDTH, "-"))
    lines.append(_line("Cache:", figures["cache"] or "as the server has it"))
    lines.append(_line("Cached prompt tokens:", report["total_cached_tokens"]))
    lines.append(_line("Cache hit rate (%):", report["cache_hit_rate_pct"]))
    lines.append(_line("Optimum, infinite cache (%):", report["optimum_pct"]))
    if not figures["cache_flushed"]:
        lines.append("The server has no /flush_cache: the cache may not have been cold.")
    if figures["outputs_sha256"] is None:
        reason = "a request failed" if figures["failed"] else "the server returns no token ids"
        lines.append(f"No digest of the outputs: {reason}.")
    else:
        lines.append(_line("Outputs, SHA-256:", figures["outputs_sha256"][:16]))
    lines.append("=" * WIDTH)
    return "\n".join(lines)


def outputs_equal(off: Figures, on: Figures) -> bool:
    """Whether both runs gave the same tokens; False also when a run did not tell them."""
    return off["outputs_sha256"] is not None and off["outputs_sha256"] == on["outputs_sha256"]


def comparison(off: Figures, on: Figures) -> str:
    """The same requests with the cache off and on."""
    rows: list[tuple[str, float | None, float | None, float | None]] = [
        (label, off[key], on[key], _ratio(on[key], off[key]) if more_is_better else _ratio(off[key], on[key]))
        for label, key, more_is_better in (
            ("Request throughput (req/s)", "request_throughput", True),
            ("Output throughput (tok/s)", "output_throughput", True),
            ("Mean TTFT (ms)", "mean_ttft_ms", False),
            ("P99 TTFT (ms)", "p99_ttft_ms", False),
            ("Mean TPOT (ms)", "mean_tpot_ms", False),
            ("Mean E2E (ms)", "mean_e2e_latency_ms", False),
        )
    ]
    report = on["cache_report"]
    of_optimum = _ratio(report["cache_hit_rate_pct"], report["optimum_pct"])
    lines = [" Prefix cache off and on ".center(WIDTH + 10, "="), f"{'':<30}{'off':>10}{'on':>10}{'better':>10}"]
    lines += [f"{label:<30}{_text(a):>10}{_text(b):>10}{_text(ratio) + 'x':>10}" for label, a, b, ratio in rows]
    lines.append(
        f"Cache hit rate {_text(report['cache_hit_rate_pct'])}%, optimum {_text(report['optimum_pct'])}%: "
        f"{_text(None if of_optimum is None else 100 * of_optimum)}% of it"
    )
    lines.append(f"Outputs equal: {'yes' if outputs_equal(off, on) else 'NO'}")
    lines.append("=" * (WIDTH + 10))
    return "\n".join(lines)


def failures(errors: Sequence[str]) -> str:
    """The failed requests' reasons, each once with its count."""
    counts: dict[str, int] = {}
    for error in errors:
        counts[error] = counts.get(error, 0) + 1
    return "\n".join(f"{count} x {error}" for error, count in counts.items())


def _ratio(more: float | None, less: float | None) -> float | None:
    return None if more is None or not less else more / less


def _line(label: str, value: object) -> str:
    return f"{label:<40} {_text(value):<10}".rstrip()


def _text(value: object) -> str:
    if value is None:
        return "n/a"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
