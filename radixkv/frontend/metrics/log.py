"""The server's log on standard error."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from radixkv.errors import RequestError
from radixkv.frontend.http.errors import RuntimeSilent
from radixkv.frontend.metrics.stats_delta import StatsDelta
from radixkv.frontend.miss_counts import MissCounts
from radixkv.frontend.miss_report import worst_miss
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.stats import DiskStats, Stats

MISS_INTERVAL_S = 60.0
"""Time between two lines about cache misses."""
_MIN_MISS_SHARE, _MIN_MISS_TOKENS = 0.25, 10_000
"""Misses of one kind that are worth a line: their share of the lost tokens of an interval, and their tokens."""


class StatsSource(Protocol):
    """Provider of the runtime's counters."""

    @property
    def n_restarts(self) -> int:
        """How often another runtime, whose counters began anew, has taken the place of one that had died."""
        ...

    async def stats(self) -> Stats:
        """Returns the counters as of now. Raises ``RequestError``."""
        ...


def log_line(text: str) -> None:
    """Prints one line to standard error. It is lost if that cannot be written, as on a full disk."""
    with suppress(OSError):
        print(f"radixkv: {text}", file=sys.stderr, flush=True)


async def log_misses(
    take_recent: Callable[[], MissCounts],
    tokenizer: Tokenizer | None,
    interval_s: float = MISS_INTERVAL_S,
    *,
    write: Callable[[str], None] = log_line,
) -> None:
    """Logs where most of the avoidable misses end and why, at most one line an interval, until it is cancelled.

    Args:
        take_recent: returns what requests that ended since the last call did not find in the cache.
        tokenizer: gives the texts of tokens; None for positions only.
        interval_s: seconds between calls.
        write: takes the lines.
    """
    while True:
        await asyncio.sleep(interval_s)
        line = worst_miss(take_recent(), tokenizer, min_share=_MIN_MISS_SHARE, min_tokens=_MIN_MISS_TOKENS)
        if line is not None:
            write(f"cache misses of the last {interval_s:g} s: {line}")


async def log_statistics(
    source: StatsSource,
    interval_s: float,
    on_delta: Callable[[StatsDelta | None], None],
    *,
    write: Callable[[str], None] = log_line,
) -> None:
    """Logs one line of statistics for each interval in which the engine has work, until it is cancelled.

    Args:
        source: queried once an interval.
        interval_s: seconds between queries.
        on_delta: called with each ``StatsDelta``, even without work, and with None if a new runtime has none yet.
        write: takes the lines.
    """
    before, begun, n_restarts = None, 0.0, 0
    while True:
        try:
            after, now = await source.stats(), time.monotonic()
        except RuntimeSilent:
            continue  # a long step; the next reply covers its time
        except RequestError:  # the runtime is dead
            await asyncio.sleep(interval_s)
            continue
        if source.n_restarts != n_restarts:
            before, n_restarts = None, source.n_restarts
            on_delta(None)
        if before is not None:
            stats_delta = StatsDelta(before, after, now - begun)
            on_delta(stats_delta)
            if stats_delta.has_work:
                write(_line(stats_delta))
        before, begun = after, now
        await asyncio.sleep(interval_s)


def _line(stats_delta: StatsDelta) -> str:
    stats = stats_delta.after
    used = 1 - (stats.n_pages_free + stats.n_pages_evictable) / stats.n_pages
    cached = stats.n_pages_evictable / stats.n_pages
    hits = (
        "no prompts" if stats_delta.hit_rate is None else f"{stats_delta.hit_rate:.1%} of prompt tokens were cached"
    )
    return (
        f"{stats.n_running} running, {stats.n_waiting} waiting, "
        f"pool {used:.1%} in use and {cached:.1%} cached, {_running_slots(stats)}"
        f"{_host_tier(stats_delta)}{_disk_tier(stats_delta)}{hits}, "
        f"{stats_delta.prompt_tokens_per_s:.1f} prompt tokens/s, "
        f"{stats_delta.generation_tokens_per_s:.1f} generated tokens/s"
    )


def _running_slots(stats: Stats) -> str:
    if not stats.n_running_tokens:
        return ""
    filled = stats.n_running_tokens / stats.n_running_slots
    copies = stats.n_duplicate_tokens / stats.n_running_tokens
    return f"{filled:.1%} of slots filled, {copies:.1%} copies, {stats.n_saved_tokens} tokens saved by sharing, "


def _host_tier(stats_delta: StatsDelta) -> str:
    before, after = stats_delta.before.host, stats_delta.after.host
    if before is None or after is None:
        return ""
    used = 1 - after.n_slots_free / after.n_slots if after.n_slots else 0.0
    return f"host tier {used:.1%} used, {after.pages_loaded_total - before.pages_loaded_total} pages loaded, "


def _disk_tier(stats_delta: StatsDelta) -> str:
    before, after = stats_delta.before, stats_delta.after
    return _store(before.disk, after.disk) + _store(before.shared_store, after.shared_store)


def _store(before: DiskStats | None, after: DiskStats | None) -> str:
    if before is None or after is None:
        return ""
    n_fetched = after.pages_fetched_total - before.pages_fetched_total
    n_written = after.pages_written_total - before.pages_written_total
    copied = f"{n_fetched} pages fetched and {n_written} written, "
    if after.shared is not None:
        return f"shared store {'away' if after.shared.is_away else 'in use'}, {copied}"
    return f"disk tier {after.n_bytes / 2**30:.1f} GiB, {copied}"
