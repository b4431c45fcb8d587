"""The figures of a run: what goes into its JSON line, and from there into its box."""

from __future__ import annotations

import hashlib
import math
import statistics
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from radixkv.bench.load.record import Measurement, Record
from radixkv.bench.report.optimum import optimum_cached_tokens

Figures = dict[str, Any]
"""The object of a JSON line; None where the server did not tell, or nothing was measured."""


def figures(measurement: Measurement, goodput: Mapping[str, float] | None = None) -> Figures:
    """Counts, throughput, latencies in milliseconds, accuracy, cache report and the outputs' digest of a run.

    Failed requests, those that were never sent among them, count in ``failed`` and by their kind in ``errors``
    alone. A run that ended early says why in ``aborted``; its other figures are of what it did until then.

    In an open loop latencies count from when a request should have been sent, and ``lateness`` is how much later
    it was. ``goodput`` has limits in milliseconds for ``ttft``, ``tpot`` and ``e2el``: a request counts as good
    when it keeps them all.
    """
    records, duration = measurement.records, measurement.duration
    good = [record for record in records if record.error is None]
    checked = [record.is_right for record in good if record.is_right is not None]
    prompt_tokens = sum(record.n_prompt_tokens for record in good)
    output_tokens = sum(record.n_output_tokens for record in good)
    result: Figures = {
        "completed": len(good),
        "failed": len(records) - len(good),
        "errors": error_counts(records),
        "aborted": measurement.aborted,
        "duration": duration,
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "total_choices": sum(len(record.answers) for record in good),
        "request_throughput": len(good) / duration,
        "request_goodput": _goodput(good, goodput, duration) if goodput else None,
        "input_throughput": prompt_tokens / duration,
        "output_throughput": output_tokens / duration,
        "total_throughput": (prompt_tokens + output_tokens) / duration,
        "concurrency": sum(record.latency - record.waited for record in good) / duration,
        "accuracy_pct": _share(sum(checked), len(checked)),
        "n_checked": len(checked),
    }
    result |= summary("ttft", [record.ttft for record in good])
    result |= summary("tpot", [record.tpot for record in good if record.tpot is not None])
    result |= summary("itl", [gap for record in good for gap in record.itl])
    result |= summary("e2e_latency", [record.latency for record in good])
    result |= summary("lateness", [record.waited for record in good if record.scheduled is not None])
    result["cache_report"] = cache_report(records)
    result["outputs_sha256"] = outputs_sha256(records)
    return result


def error_counts(records: Sequence[Record]) -> dict[str, int]:
    """How many requests failed, by kind, the most frequent first."""
    return dict(Counter(record.error_kind or "unknown" for record in records if record.error).most_common())


def summary(name: str, seconds: Sequence[float]) -> Figures:
    """Mean, median, standard deviation (of the population), percentiles: milliseconds, None without values."""
    values = sorted(1000.0 * value for value in seconds)
    return {
        f"mean_{name}_ms": statistics.fmean(values) if values else None,
        f"median_{name}_ms": percentile(values, 50),
        f"std_{name}_ms": statistics.pstdev(values) if values else None,
        f"p90_{name}_ms": percentile(values, 90),
        f"p95_{name}_ms": percentile(values, 95),
        f"p99_{name}_ms": percentile(values, 99),
    }


def percentile(ordered: Sequence[float], percent: float) -> float | None:
    """Linear between the two nearest ranks; ``ordered`` ascends. None if it is empty."""
    if not ordered:
        return None
    rank = (len(ordered) - 1) * percent / 100
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def cache_report(records: Sequence[Record]) -> Figures:
    """How many prompt tokens were not computed, and how many an infinite cache could have saved.

    Both are over the requests that succeeded. None where the server does not say for all of them: without token
    ids there is no optimum, since what two texts share says little about what their tokens do.
    """
    good = [record for record in records if record.error is None]
    total = sum(record.n_prompt_tokens for record in good)
    counts = [record.n_cached_tokens for record in good if record.n_cached_tokens is not None]
    cached = sum(counts) if good and len(counts) == len(good) else None
    optimum = optimum_of(records)
    best = None if optimum is None else sum(count for _, count in optimum)
    return {
        "total_prompt_tokens": total,
        "total_cached_tokens": cached,
        "cache_hit_rate_pct": _share(cached, total),
        "optimum_pct": _share(best, total),
    }


def optimum_of(records: Sequence[Record]) -> list[tuple[Record, int]] | None:
    """Each request that succeeded, and what an infinite cache could have saved of it (see ``optimum``).

    They are taken in the order in which they were sent, whatever session they belong to. What is known of failed
    requests counts as seen. None without requests, or if the server does not return token ids.
    """
    sent = sorted(records, key=lambda record: record.started)
    known = [record for record in sent if record.prompt_token_ids is not None]
    good = [record for record in sent if record.error is None]
    if not good or any(record.prompt_token_ids is None or record.token_ids is None for record in good):
        return None
    counts = optimum_cached_tokens([(record.prompt_token_ids or (), record.token_ids or ()) for record in known])
    return [pair for pair in zip(known, counts, strict=True) if pair[0].error is None]


def outputs_sha256(records: Sequence[Record]) -> str | None:
    """SHA-256 over all output token ids as little-endian int32, in the order of requests and their choices.

    None if a request failed or the server does not return token ids.
    """
    digest = hashlib.sha256()
    for record in records:
        if record.error is not None or record.token_ids is None:
            return None
        for ids in record.token_ids:
            digest.update(array("i", ids).tobytes())
    return digest.hexdigest()


def _goodput(records: Sequence[Record], limits: Mapping[str, float], duration: float) -> float:
    def keeps(record: Record) -> bool:
        met = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2el": record.latency}
        return all(1000.0 * met[name] <= limit for name, limit in limits.items())

    return sum(map(keeps, records)) / duration


def _share(part: int | None, whole: int) -> float | None:
    return None if part is None or whole == 0 else 100.0 * part / whole
