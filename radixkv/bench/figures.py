"""The figures of a run: what goes into its JSON line, and from there into its box."""

from __future__ import annotations

import hashlib
import math
import statistics
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from radixkv.bench.optimum import optimum_cached_tokens
from radixkv.bench.record import Measurement, Record

Figures = dict[str, Any]
"""The object of a JSON line; None where the server did not tell, or nothing was measured."""


def figures(measurement: Measurement, goodput: Mapping[str, float] | None = None) -> Figures:
    """Counts, throughput, latencies in milliseconds, cache report and the outputs' digest of a run.

    Failed requests count in ``failed`` alone. ``goodput`` has limits in milliseconds for ``ttft``, ``tpot`` and
    ``e2el``: a request counts as good when it keeps them all.
    """
    records, duration = measurement.records, measurement.duration
    good = [record for record in records if record.error is None]
    prompt_tokens = sum(record.n_prompt_tokens for record in good)
    output_tokens = sum(record.n_output_tokens for record in good)
    result: Figures = {
        "completed": len(good),
        "failed": len(records) - len(good),
        "duration": duration,
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(good) / duration,
        "request_goodput": _goodput(good, goodput, duration) if goodput else None,
        "input_throughput": prompt_tokens / duration,
        "output_throughput": output_tokens / duration,
        "total_throughput": (prompt_tokens + output_tokens) / duration,
        "concurrency": sum(record.latency for record in good) / duration,
    }
    result |= summary("ttft", [record.ttft for record in good])
    result |= summary("tpot", [record.tpot for record in good if record.tpot is not None])
    result |= summary("itl", [gap for record in good for gap in record.itl])
    result |= summary("e2e_latency", [record.latency for record in good])
    result["cache_report"] = cache_report(good)
    result["outputs_sha256"] = outputs_sha256(records)
    return result


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
    """How many prompt tokens were not computed, and how many an infinite cache could have saved (see ``optimum``).

    The optimum is over the token ids that the server returned, in the order of sessions and their turns.
    """
    total = sum(record.n_prompt_tokens for record in records)
    counts = [record.n_cached_tokens for record in records if record.n_cached_tokens is not None]
    cached = sum(counts) if records and len(counts) == len(records) else None
    ids = [
        (record.prompt_token_ids, record.token_ids)
        for record in records
        if record.prompt_token_ids is not None and record.token_ids is not None
    ]
    optimum = optimum_cached_tokens(ids) if records and len(ids) == len(records) else None
    return {
        "total_prompt_tokens": total,
        "total_cached_tokens": cached,
        "cache_hit_rate_pct": _share(cached, total),
        "optimum_pct": _share(optimum, total),
    }


def outputs_sha256(records: Sequence[Record]) -> str | None:
    """SHA-256 over all output token ids as little-endian int32, in the requests' order.

    None if a request failed or the server does not return token ids.
    """
    digest = hashlib.sha256()
    for record in records:
        if record.error is not None or record.token_ids is None:
            return None
        digest.update(array("i", record.token_ids).tobytes())
    return digest.hexdigest()


def _goodput(records: Sequence[Record], limits: Mapping[str, float], duration: float) -> float:
    def keeps(record: Record) -> bool:
        met = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2el": record.latency}
        return all(1000.0 * met[name] <= limit for name, limit in limits.items())

    return sum(map(keeps, records)) / duration


def _share(part: int | None, whole: int) -> float | None:
    return None if part is None or whole == 0 else 100.0 * part / whole
