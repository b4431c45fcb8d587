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


class Table(NamedTuple):
    """The columns of a table and its cells."""

    has_host: bool
    """Whether a capacity has a host tier."""
    has_disk: bool
    """Whether a capacity has a disk tier."""
    has_bytes: bool
    """Whether the KV bytes per token are known."""
    has_servers: bool = False
    """Whether there are several servers."""

    @property
    def columns(self) -> Sequence[Column]:
        """The columns, from left to right."""
        columns = [Column("capacity", 12)]
        if self.has_host:
            columns.append(Column("host", 10))
        if self.has_disk:
            columns.append(Column("disk", 10))
        columns.append(Column("policy", 10))
        if self.has_servers:
            columns += [Column("servers", 9), Column("routing", 13), Column("busiest", 9)]
        columns.append(Column("hit rate", 10))
        if self.has_host:
            columns.append(Column("saved", 10))
        columns += [Column("of infinite", 13), Column("cached tokens", 15)]
        if self.has_host:
            columns.append(Column("loaded tokens", 15))
        if self.has_disk:
            columns.append(Column("fetched tokens", 16))
        columns += [Column("evicted tokens", 16), Column("most cached", 13)]
        if self.has_bytes:
            columns += [Column("pool GiB", 11), Column("evicted GiB", 13)]
        return columns

    def cells(self, result: Result) -> list[str]:
        """Returns the cells of a result, in the order of the columns."""
        texts = ["infinite" if result.capacity_tokens is None else format_tokens(result.capacity_tokens)]
        if self.has_host:
            texts.append(_format_capacity(result.host_capacity_tokens))
        if self.has_disk:
            texts.append(_format_capacity(result.disk_capacity_tokens))
        texts.append("-" if result.capacity_tokens is None else result.policy)
        if self.has_servers:
            busiest = "-" if result.busiest_server is None else f"{result.busiest_server:.2f}x"
            texts += [str(result.servers), result.routing or "-", busiest]
        texts.append(f"{result.hit_rate_pct:.1f}%")
        if self.has_host:
            texts.append(f"{three_digits(result.saved_seconds)} s")
        texts.append("n/a" if result.of_infinite_pct is None else f"{result.of_infinite_pct:.1f}%")
        texts.append(format_tokens(result.n_cached_tokens))
        if self.has_host:
            texts.append(format_tokens(result.n_loaded_tokens))
        if self.has_disk:
            texts.append(format_tokens(result.n_fetched_tokens))
        texts += [format_tokens(result.n_evicted_tokens), format_tokens(result.most_cached_tokens)]
        if result.kv_bytes_per_token is not None:
            pool = result.most_cached_bytes if result.capacity_bytes is None else result.capacity_bytes
            texts += [_format_gib(n_bytes or 0) for n_bytes in (pool, result.evicted_bytes)]
        return texts

    def format_row(self, texts: Sequence[str]) -> str:
        """Returns a line of the table: the first column aligned left, the others right."""
        columns = self.columns
        padded = [f"{text:>{column.width}}" for text, column in zip(texts, columns, strict=True)]
        padded[0] = f"{texts[0]:<{columns[0].width}}"
        return "".join(padded).rstrip()


def title(recording: Recording, concurrency: int, ends_known: float) -> str:
    """Returns one or two lines that describe the recording and how it is replayed."""
    traffic = recording.traffic
    in_flight = f", {concurrency} in flight" if concurrency > 1 else ""
    ends = f", {100 * ends_known:g}% of ends known" if ends_known else ""
    lines = [
        f"{recording.name}: {plural(len(traffic.n_tokens), 'request')}, "
        f"{plural(sum(traffic.n_tokens), 'prompt token')}; "
        f"rule {traffic.rule}, pages of {plural(traffic.page_size, 'token')}{in_flight}{ends}"
    ]
    if recording.n_bad_lines:
        lines.append(f"{plural(recording.n_bad_lines, 'bad line')} left out")
    return "\n".join(lines)


def remarks(results: Sequence[Result], recording: Recording) -> list[str]:
    """Returns the remarks below the table.

    There is one for each capacity that refused requests as too large, and one if disk tiers have nothing to give.
    """
    largest = max(recording.traffic.n_tokens)
    n_refused = {result.capacity_tokens: result.n_too_large for result in results if result.n_too_large}
    remarks = [
        f"{plural(n_too_large, 'request')} too large for {format_tokens(capacity or 0)} tokens (the largest has "
        f"{largest:,}): refused by the engine, and counted here as never cached"
        for capacity, n_too_large in n_refused.items()
    ]
    last = results[-1]
    from_disk_us = last.fetch_us_per_token + last.load_us_per_token
    if from_disk_us >= last.compute_us_per_token and any(one.disk_capacity_tokens is not None for one in results):
        remarks.append(
            f"a disk hardly helps here: a token takes {from_disk_us:g} µs from disk and "
            f"{last.compute_us_per_token:g} µs to compute, so what only the disk has is computed"
        )
    return remarks


def _format_capacity(n_tokens: int | None) -> str:
    return "-" if n_tokens is None else format_tokens(n_tokens)


def _format_gib(n_bytes: int) -> str:
    return three_digits(n_bytes / _GIB)  # small models have small caches
