"""Results of a simulation for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from radixkv.bench.plural import counted
from radixkv.simulator.recording import Recording
from radixkv.simulator.simulation import Result

_GIB = 1 << 30


class Column(NamedTuple):
    """Of the table."""

    head: str
    width: int


COLUMNS = (
    Column("capacity", 12),
    Column("policy", 8),
    Column("hit rate", 10),
    Column("of infinite", 13),
    Column("cached tokens", 15),
    Column("evicted tokens", 16),
    Column("most cached", 13),
)
COLUMNS_OF_BYTES = (Column("pool GiB", 11), Column("evicted GiB", 13))
"""Where the bytes of a token are known."""


def title(recording: Recording, concurrency: int) -> str:
    """What is replayed, in a line or two."""
    traffic = recording.traffic
    crowd = f", {concurrency} in flight" if concurrency > 1 else ""
    lines = [
        f"{recording.name}: {counted(len(traffic.n_tokens), 'request')}, "
        f"{counted(sum(traffic.n_tokens), 'prompt token')}; "
        f"rule {traffic.rule}, pages of {counted(traffic.page_size, 'token')}{crowd}"
    ]
    if recording.n_bad_lines:
        lines.append(f"{counted(recording.n_bad_lines, 'bad line')} left out")
    return "\n".join(lines)


def columns(has_bytes: bool) -> Sequence[Column]:
    """The table's."""
    return (*COLUMNS, *COLUMNS_OF_BYTES) if has_bytes else COLUMNS


def cells(result: Result) -> list[str]:
    """A result's, in the columns' order."""
    shown = [
        "infinite" if result.capacity_tokens is None else short(result.capacity_tokens),
        "-" if result.capacity_tokens is None else result.policy,
        f"{result.hit_rate_pct:.1f}%",
        "n/a" if result.of_infinite_pct is None else f"{result.of_infinite_pct:.1f}%",
        short(result.n_cached_tokens),
        short(result.n_evicted_tokens),
        short(result.most_cached_tokens),
    ]
    if result.kv_bytes_per_token is not None:
        pool = result.most_cached_bytes if result.capacity_bytes is None else result.capacity_bytes
        shown += [_gib(n_bytes or 0) for n_bytes in (pool, result.evicted_bytes)]
    return shown


def line(texts: Sequence[str], has_bytes: bool) -> str:
    """A line of the table."""
    padded = [f"{text:>{column.width}}" for text, column in zip(texts, columns(has_bytes), strict=True)]
    padded[0] = f"{texts[0]:<{COLUMNS[0].width}}"
    return "".join(padded).rstrip()


def remarks(results: Sequence[Result], recording: Recording) -> list[str]:
    """What must be said beside the table."""
    largest = max(recording.traffic.n_tokens)
    unfit = {result.capacity_tokens: result.n_too_large for result in results if result.n_too_large}
    return [
        f"{counted(n_too_large, 'request')} too large for {short(capacity or 0)} tokens (the largest has "
        f"{largest:,}): refused by the engine, and counted here as never cached"
        for capacity, n_too_large in unfit.items()
    ]


def short(n_tokens: int) -> str:
    """0.5M, 512k, 17: at most four digits, exact for round capacities."""
    for unit, name in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if n_tokens >= unit or (unit == 10**6 and n_tokens >= unit // 2):
            return f"{n_tokens / unit:.4g}{name}"
    return str(n_tokens)


def _gib(n_bytes: int) -> str:
    """Three digits or more: small models have small caches."""
    gib = n_bytes / _GIB
    return f"{gib:,.0f}" if gib >= 100 else f"{gib:.3g}"
