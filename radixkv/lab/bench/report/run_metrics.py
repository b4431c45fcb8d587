"""Metrics of a run, as its JSON line and the reports have them."""

from __future__ import annotations

import hashlib
import math
import statistics
from array import array
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from radixkv.lab.bench.load.record import Measurement, Record
from radixkv.lab.bench.load.server_counters import DraftTokenCounts

WINDOW = 16
"""Shortest run of tokens that counts as repeated: a page of the engine's default size."""
_TOKEN_BYTES = 4

Metrics = dict[str, Any]
"""A JSON line's object. A value is None if the server does not report it or nothing was measured."""


def run_metrics(
    measurement: Measurement,
    goodput: Mapping[str, float] | None = None,
    *,
    counts_repeats: bool = False,
    drafts: DraftTokenCounts | None = None,
) -> Metrics:
    """Returns counts, throughput, latencies in milliseconds, accuracy, cache and draft report, and output digest.

    Failed requests, including those that were never sent, count only in ``failed`` and, by kind, in ``errors``. If
    the run ended early, ``aborted`` has the reason and the other metrics cover the requests until then.

    In an open loop, latencies count from when a request should have been sent, and ``lateness`` is how much later
    it was sent. ``returning_ttft`` is the ``ttft`` of the turns after the first of their chat.

    Args:
        measurement: the records of the run.
        goodput: limits in milliseconds for ``ttft``, ``tpot`` and ``e2el``. ``request_goodput`` counts the requests
            within all limits.
        counts_repeats: as in ``cache_report``.
        drafts: the server's counters of the run; None without drafts.
    """
    records, duration = measurement.records, measurement.duration
    good = [record for record in records if record.error is None]
    checked = [record.is_correct for record in good if record.is_correct is not None]
    prompt_tokens = sum(record.n_prompt_tokens for record in good)
    output_tokens = sum(record.n_output_tokens for record in good)
    result: Metrics = {
        "completed": len(good),
        "failed": len(records) - len(good),
        "errors": error_counts(records),
        "aborted": measurement.aborted,
        "duration": duration,
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "total_choices": sum(len(record.choices) for record in good),
        "request_throughput": len(good) / duration,
        "request_goodput": _goodput(good, goodput, duration) if goodput else None,
        "input_throughput": prompt_tokens / duration,
        "output_throughput": output_tokens / duration,
        "total_throughput": (prompt_tokens + output_tokens) / duration,
        "concurrency": sum(record.latency - record.lateness for record in good) / duration,
        "accuracy_pct": _share(sum(checked), len(checked)),
        "n_checked": len(checked),
    }
    result |= summary("ttft", [record.ttft for record in good])
    result |= summary("returning_ttft", [record.ttft for record in good if record.turn > 0])
    result |= summary("tpot", [record.tpot for record in good if record.tpot is not None])
    result |= summary("itl", [gap for record in good for gap in record.itl])
    result |= summary("e2e_latency", [record.latency for record in good])
    result |= summary("lateness", [record.lateness for record in good if record.scheduled is not None])
    result["cache_report"] = cache_report(records, counts_repeats=counts_repeats)
    result["draft_report"] = None if drafts is None else draft_report(records, drafts)
    result["outputs_sha256"] = outputs_sha256(records)
    return result


def error_counts(records: Sequence[Record]) -> dict[str, int]:
    """Returns the number of failed requests by ``error_kind``, most frequent first."""
    return dict(Counter(record.error_kind or "unknown" for record in records if record.error).most_common())


def summary(name: str, seconds: Sequence[float]) -> Metrics:
    """Returns mean, median, population standard deviation and percentiles in milliseconds; None without values."""
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
    """Returns a percentile, linearly interpolated between the two nearest ranks.

    Args:
        ordered: values in ascending order. If empty, the result is None.
        percent: from 0 to 100.
    """
    if not ordered:
        return None
    rank = (len(ordered) - 1) * percent / 100
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def cache_report(records: Sequence[Record], *, counts_repeats: bool = False) -> Metrics:
    """Returns the prompt tokens that came from the cache, and the optimum of an infinite cache.

    Both cover the requests that succeeded. A value is None if the server does not report it for all of them. The
    optimum needs token ids: the common prefix of two texts does not determine that of their tokens.

    Args:
        records: of all requests.
        counts_repeats: whether to add ``repeated_pct``, the prompt tokens that were in an earlier prompt at any
            position, the optimum included: see ``repeated_tokens``.
    """
    good = [record for record in records if record.error is None]
    total = sum(record.n_prompt_tokens for record in good)
    counts = [record.n_cached_tokens for record in good if record.n_cached_tokens is not None]
    cached = sum(counts) if good and len(counts) == len(good) else None
    optimum = optimum_of(records)
    best = None if optimum is None else sum(count for _, count in optimum)
    report: Metrics = {
        "total_prompt_tokens": total,
        "total_cached_tokens": cached,
        "cache_hit_rate_pct": _share(cached, total),
        "optimum_pct": _share(best, total),
    }
    if counts_repeats:
        report["repeated_pct"] = None if optimum is None else _share(sum(_repeated(optimum)), total)
    return report


def draft_report(records: Sequence[Record], drafts: DraftTokenCounts) -> Metrics:
    """Returns what became of a run's drafts.

    ``tokens_a_step`` are the tokens of an answer after its first by the steps that had a row for them. It is None
    if there are none, or a request failed, whose drafts count too.

    Args:
        records: of all requests.
        drafts: the server's counters of the run.
    """
    n_tokens = sum(record.n_output_tokens - len(record.choices) for record in records)
    n_steps = n_tokens - drafts.accepted_tokens
    is_known = n_steps > 0 and all(record.error is None for record in records)
    return {
        "draft_tokens": drafts.draft_tokens,
        "accepted_tokens": drafts.accepted_tokens,
        "acceptance_pct": _share(drafts.accepted_tokens, drafts.draft_tokens),
        "tokens_a_step": n_tokens / n_steps if is_known else None,
        "steps_without_overlap": drafts.steps_without_overlap,
        "by_source": {
            source: {"draft_tokens": n_drafted, "accepted_tokens": n_accepted}
            for source, (n_drafted, n_accepted) in drafts.by_source.items()
        },
    }


def _repeated(optimum: Sequence[tuple[Record, int]]) -> list[int]:
    prompts = [record.prompt_token_ids or () for record, _ in optimum]
    return repeated_tokens(prompts, [count for _, count in optimum])


def optimum_of(records: Sequence[Record]) -> list[tuple[Record, int]] | None:
    """Returns each request that succeeded with the prompt tokens that an infinite cache would have had of it.

    Requests are taken in the order in which they were sent, across sessions. Known prompts of failed requests count
    as cached. None: no request succeeded, or the server does not return token ids. See ``optimum_cached_tokens``.
    """
    sent = sorted(records, key=lambda record: record.started)
    known = [record for record in sent if record.prompt_token_ids is not None]
    good = [record for record in sent if record.error is None]
    if not good or any(record.prompt_token_ids is None or record.token_ids is None for record in good):
        return None
    counts = optimum_cached_tokens([(record.prompt_token_ids or (), record.token_ids or ()) for record in known])
    return [pair for pair in zip(known, counts, strict=True) if pair[0].error is None]


def outputs_sha256(records: Sequence[Record]) -> str | None:
    """Returns the SHA-256 of all output token ids as little-endian int32, in the order of requests and choices.

    None: a request failed, or the server does not return token ids.
    """
    digest = hashlib.sha256()
    for record in records:
        if record.error is not None or record.token_ids is None:
            return None
        for ids in record.token_ids:
            digest.update(array("i", ids).tobytes())
    return digest.hexdigest()


def _goodput(records: Sequence[Record], limits: Mapping[str, float], duration: float) -> float:
    def is_within_limits(record: Record) -> bool:
        latencies = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2el": record.latency}
        return all(1000.0 * latencies[name] <= limit for name, limit in limits.items())

    return sum(map(is_within_limits, records)) / duration


def _share(part: int | None, whole: int) -> float | None:
    return None if part is None or whole == 0 else 100.0 * part / whole


RequestTokens = tuple[Sequence[int], Sequence[Sequence[int]]]
"""A request's token ids: its prompt, and the answer of each of its choices."""


def optimum_cached_tokens(requests: Sequence[RequestTokens]) -> list[int]:
    """Returns for each request the prompt tokens that an infinite cache would have.

    A cache would have the longest common prefix of the prompt with an earlier request's prompt followed by one of
    its answers. It is at most the prompt's length less one, since one token of each prompt must be computed. An
    answer's last token is never computed and so never cached. The choices of a request share its prompt, which
    counts once.
    Cost: O(n log n) comparisons of whole requests.

    Args:
        requests: the requests in the order in which they were sent. Each counts as computed when the next is sent,
            so requests that were in flight together may share.
    """
    seen: list[bytes] = []
    counts: list[int] = []
    for prompt, answers in requests:
        ids = array("i", prompt).tobytes()
        index = bisect_left(seen, ids)
        neighbours = seen[max(index - 1, 0) : index + 1]  # one of these has the longest common prefix
        common = max((_common_bytes(ids, other) for other in neighbours), default=0) // 4
        counts.append(max(min(common, len(prompt) - 1), 0))
        for computed in {array("i", answer[:-1]).tobytes() for answer in answers} or {b""}:
            insort(seen, ids + computed)
    return counts


def repeated_tokens(prompts: Sequence[Sequence[int]], n_cached: Sequence[int]) -> list[int]:
    """Returns for each prompt the tokens that a cache would find if it could reuse KV behind any other tokens.

    A token counts if it is in a run of ``WINDOW`` tokens that an earlier prompt has too, at any position, or in the
    prefix that an infinite prefix cache finds. As there, at least one token of each prompt is computed. Such a
    cache is hypothetical: KV depends on all tokens before it, so that reusing it behind others changes answers,
    unless a part of it is computed again.

    Cost: O(tokens), and memory for each distinct run of all prompts.

    Args:
        prompts: token ids, in the order in which they were sent.
        n_cached: leading tokens of each prompt that an infinite prefix cache has.
    """
    seen: set[bytes] = set()
    counts: list[int] = []
    for prompt, n_prefix in zip(prompts, n_cached, strict=True):
        ids = array("i", prompt).tobytes()
        windows = [
            ids[start * _TOKEN_BYTES : (start + WINDOW) * _TOKEN_BYTES] for start in range(len(prompt) - WINDOW + 1)
        ]
        n_found = end = n_prefix
        for start, window in enumerate(windows):
            if window in seen and start + WINDOW > end:
                n_found += start + WINDOW - max(start, end)
                end = start + WINDOW
        seen.update(windows)
        counts.append(max(min(n_found, len(prompt) - 1), 0))
    return counts


def _common_bytes(one: bytes, other: bytes) -> int:
    """Returns the length of the common prefix, by binary search."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(frozen=True)
class Metric:
    """A metric that is compared."""

    label: str
    key: str
    more_is_better: bool
    report: str | None = None
    """The key of the line's table that has the metric; None: it is in the line itself."""
    is_main: bool = False
    """Whether ``--compare-cache`` shows the metric."""

    def of(self, run: Metrics) -> float | None:
        """Returns the run's value; None: it is missing or was not measured."""
        table = run if self.report is None else run.get(self.report) or {}
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
    Metric("Mean returning TTFT (ms)", "mean_returning_ttft_ms", False, is_main=True),
    Metric("Mean TPOT (ms)", "mean_tpot_ms", False, is_main=True),
    Metric("Mean ITL (ms)", "mean_itl_ms", False),
    Metric("P99 ITL (ms)", "p99_itl_ms", False),
    Metric("Mean E2E (ms)", "mean_e2e_latency_ms", False, is_main=True),
    Metric("P99 E2E (ms)", "p99_e2e_latency_ms", False),
    Metric("Cache hit rate (%)", "cache_hit_rate_pct", True, report="cache_report"),
    Metric("Accepted drafts (%)", "acceptance_pct", True, report="draft_report"),
    Metric("Tokens a step of an answer", "tokens_a_step", True, report="draft_report"),
    Metric("Accuracy (%)", "accuracy_pct", True, is_main=True),
)
