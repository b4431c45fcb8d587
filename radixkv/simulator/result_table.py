"""The printed table of a simulation's results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from radixkv.bench.formatting import format_tokens, plural, three_digits
from radixkv.simulator.recording import Recording
from radixkv.simulator.simulation import Result

_GIB = 1 << 30


class Column(NamedTuple):
    """A column of the table."""

    title: str
    width: int
    """In characters, with the space before it."""


COLUMNS = (
    Column("capacity", 12),
    Column("policy", 8),
    Column("hit rate", 10),
    Column("of infinite", 13),
    Column("cached tokens", 15),
    Column("evicted tokens", 16),
    Column("most cached", 13),
)
BYTE_COLUMNS = (Column("pool GiB", 11), Column("evicted GiB", 13))
"""Columns that are added if the KV bytes per token are known."""


def title(recording: Recording, concurrency: int) -> str:
    """Returns one or two lines that describe the recording and how it is replayed."""
    traffic = recording.traffic
    in_flight = f", {concurrency} in flight" if concurrency > 1 else ""
    lines = [
        f"{recording.name}: {plural(len(traffic.n_tokens), 'request')}, "
        f"{plural(sum(traffic.n_tokens), 'prompt token')}; "
        f"rule {traffic.rule}, pages of {plural(traffic.page_size, 'token')}{in_flight}"
    ]
    if recording.n_bad_lines:
        lines.append(f"{plural(recording.n_bad_lines, 'bad line')} left out")
    return "\n".join(lines)


def columns(has_bytes: bool) -> Sequence[Column]:
    """Returns the columns of the table."""
    return (*COLUMNS, *BYTE_COLUMNS) if has_bytes else COLUMNS


def cells(result: Result) -> list[str]:
    """Returns the cells of a result, in the order of the columns."""
    texts = [
        "infinite" if result.capacity_tokens is None else format_tokens(result.capacity_tokens),
        "-" if result.capacity_tokens is None else result.policy,
        f"{result.hit_rate_pct:.1f}%",
        "n/a" if result.of_infinite_pct is None else f"{result.of_infinite_pct:.1f}%",
        format_tokens(result.n_cached_tokens),
        format_tokens(result.n_evicted_tokens),
        format_tokens(result.most_cached_tokens),
    ]
    if result.kv_bytes_per_token is not None:
        pool = result.most_cached_bytes if result.capacity_bytes is None else result.capacity_bytes
        texts += [_format_gib(n_bytes or 0) for n_bytes in (pool, result.evicted_bytes)]
    return texts


def format_row(texts: Sequence[str], has_bytes: bool) -> str:
    """Returns a line of the table: the first column aligned left, the others right."""
    padded = [f"{text:>{column.width}}" for text, column in zip(texts, columns(has_bytes), strict=True)]
    padded[0] = f"{texts[0]:<{COLUMNS[0].width}}"
    return "".join(padded).rstrip()


def remarks(results: Sequence[Result], recording: Recording) -> list[str]:
    """Returns the remarks below the table: one for each capacity that refused requests as too large."""
    largest = max(recording.traffic.n_tokens)
    n_refused = {result.capacity_tokens: result.n_too_large for result in results if result.n_too_large}
    return [
        f"{plural(n_too_large, 'request')} too large for {format_tokens(capacity or 0)} tokens (the largest has "
        f"{largest:,}): refused by the engine, and counted here as never cached"
        for capacity, n_too_large in n_refused.items()
    ]


def _format_gib(n_bytes: int) -> str:
    return three_digits(n_bytes / _GIB)  # small models have small caches
