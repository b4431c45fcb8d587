"""The printed table of a simulation's results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from radixkv.lab.bench.formatting import format_tokens, plural, three_digits
from radixkv.lab.simulator.recording import Recording
from radixkv.lab.simulator.simulation import Result

_GIB = 1 << 30


class Column(NamedTuple):
    """A column of the table."""

    title: str
    cell: Callable[[Result], str]
    """Returns the text of a result."""
    width: int = 6
    """Characters that its texts take."""
    is_key: bool = False
    """Whether the column tells which replay a row is of, rather than its result. Such columns come first."""


def columns(*, has_host: bool, has_disk: bool, has_bytes: bool, has_servers: bool) -> list[Column]:
    """Returns the columns, from left to right.

    Args:
        has_host: whether a capacity has a host tier.
        has_disk: whether a capacity has a disk tier.
        has_bytes: whether the KV bytes per token are known.
        has_servers: whether there are several servers or replicas.
    """
    known = (
        (has_servers, Column("servers", lambda one: str(one.servers), is_key=True)),
        (has_servers, Column("routing", lambda one: one.routing or "-", 11, is_key=True)),
        (has_servers, Column("busiest", _busiest)),
        (True, Column("hit rate", lambda one: f"{one.hit_rate_pct:.1f}%")),
        (has_servers, Column("of each", _of_each, 11)),
        (has_host, Column("saved", lambda one: f"{three_digits(one.saved_seconds)} s", 8)),
        (True, Column("of infinite", _of_infinite)),
        (True, Column("cached tokens", lambda one: format_tokens(one.n_cached_tokens))),
        (has_host, Column("loaded tokens", lambda one: format_tokens(one.n_loaded_tokens))),
        (has_disk, Column("fetched tokens", lambda one: format_tokens(one.n_fetched_tokens))),
        (True, Column("evicted tokens", lambda one: format_tokens(one.n_evicted_tokens))),
        (True, Column("most cached", lambda one: format_tokens(one.most_cached_tokens))),
        (has_bytes, Column("pool GiB", _pool_gib, 7)),
        (has_bytes, Column("evicted GiB", lambda one: _gib(one.evicted_bytes), 7)),
    )
    keys = capacity_columns(has_host=has_host, has_disk=has_disk, has_policies=True)
    return [*keys, *(column for is_shown, column in known if is_shown)]


def capacity_columns(*, has_host: bool, has_disk: bool, has_policies: bool) -> list[Column]:
    """Returns the columns that tell which caches a row is of.

    Args:
        has_host: whether a capacity has a host tier.
        has_disk: whether a capacity has a disk tier.
        has_policies: whether the eviction policy is shown.
    """
    known = (
        (True, Column("capacity", lambda one: _capacity(one.capacity_tokens, "infinite"), 8, is_key=True)),
        (has_host, Column("host", lambda one: _capacity(one.host_capacity_tokens), is_key=True)),
        (has_disk, Column("disk", lambda one: _capacity(one.disk_capacity_tokens), is_key=True)),
        (
            has_policies,
            Column("policy", lambda one: "-" if one.capacity_tokens is None else one.policy, 8, is_key=True),
        ),
    )
    return [column for is_shown, column in known if is_shown]


def title(recording: Recording, concurrency: int | None, ends_known: float, n_states: int | None = None) -> str:
    """Returns one or two lines that describe the recording and how it is replayed."""
    traffic = recording.traffic
    in_flight = f", {concurrency} in flight" if (concurrency or 1) > 1 else ""
    ends = f", {100 * ends_known:g}% of ends known" if ends_known else ""
    states = f", {plural(n_states, 'state')} of recurrent layers" if n_states is not None else ""
    lines = [
        f"{recording.name}: {plural(len(traffic.n_tokens), 'request')}, "
        f"{plural(sum(traffic.n_tokens), 'prompt token')}; "
        f"rule {traffic.rule}, pages of {plural(traffic.page_size, 'token')}{in_flight}{ends}{states}"
    ]
    if recording.n_bad_lines:
        lines.append(f"{plural(recording.n_bad_lines, 'bad line')} left out")
    return "\n".join(lines)


def remarks(results: Sequence[Result], recording: Recording) -> list[str]:
    """Returns the remarks below the table.

    There is one for each capacity that refused requests as too large, one if answers are left out where requests
    take steps, and one if disk tiers have nothing to give.
    """
    largest = max(recording.traffic.n_tokens)
    n_refused = {result.capacity_tokens: result.n_too_large for result in results if result.n_too_large}
    remarks = [
        f"{plural(n_too_large, 'request')} too large for {format_tokens(capacity or 0)} tokens (the largest has "
        f"{largest:,}): refused by the engine, and counted here as never cached"
        for capacity, n_too_large in n_refused.items()
    ]
    last = results[-1]
    if last.max_num_batched_tokens is not None and last.n_answer_tokens is None:
        remarks.append(
            "answers are left out, because no lengths of them are known (--output-len): in a server "
            "they take pages from prompts, which lowers the hit rate, and later turns of chats find them, which "
            "raises it"
        )
    from_disk_us = last.fetch_us_per_token + last.load_us_per_token
    if from_disk_us >= last.compute_us_per_token and any(one.disk_capacity_tokens is not None for one in results):
        remarks.append(
            f"a disk hardly helps here: a token takes {from_disk_us:g} µs from disk and "
            f"{last.compute_us_per_token:g} µs to compute, so what only the disk has is computed"
        )
    return remarks


def _capacity(n_tokens: int | None, otherwise: str = "-") -> str:
    return otherwise if n_tokens is None else format_tokens(n_tokens)


def _busiest(result: Result) -> str:
    return "-" if result.busiest_server is None else f"{result.busiest_server:.2f}x"


def _of_each(result: Result) -> str:
    rates = result.server_hit_rates_pct
    return "-" if rates is None else f"{min(rates):.1f}-{max(rates):.1f}%"


def _of_infinite(result: Result) -> str:
    return "n/a" if result.of_infinite_pct is None else f"{result.of_infinite_pct:.1f}%"


def _pool_gib(result: Result) -> str:
    return _gib(result.most_cached_bytes if result.capacity_bytes is None else result.capacity_bytes)


def _gib(n_bytes: int | None) -> str:
    return three_digits((n_bytes or 0) / _GIB)  # small models have small caches
