"""The printed table of a simulation's results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from radixkv.lab.bench.formatting import MAX_COLUMNS, format_tokens, plural, three_digits
from radixkv.lab.simulator.recording import Recording
from radixkv.lab.simulator.simulation import Result

_GIB = 1 << 30


class Column(NamedTuple):
    """A column of the table."""

    title: str
    width: int
    """In characters, with the space before it."""
    compact_width: int
    """The same in a wide table, whose titles stand on two lines."""
    is_key: bool = False
    """Whether the column says which replay it is, and not what came of it."""


class Table(NamedTuple):
    """The columns of a table and its cells.

    A table that is wider than ``MAX_COLUMNS`` is compact, and what does not fit even so comes in a second one.
    """

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
        columns = [Column("capacity", 12, 8, True)]
        if self.has_host:
            columns.append(Column("host", 10, 8, True))
        if self.has_disk:
            columns.append(Column("disk", 10, 8, True))
        columns.append(Column("policy", 10, 9, True))
        if self.has_servers:
            columns += [
                Column("servers", 9, 8, True),
                Column("routing", 13, 12, True),
                Column("busiest", 9, 8),
            ]
        columns.append(Column("hit rate", 10, 7))
        if self.has_host:
            columns.append(Column("saved", 10, 9))
        columns += [Column("of infinite", 13, 9), Column("cached tokens", 15, 8)]
        if self.has_host:
            columns.append(Column("loaded tokens", 15, 8))
        if self.has_disk:
            columns.append(Column("fetched tokens", 16, 8))
        columns += [Column("evicted tokens", 16, 8), Column("most cached", 13, 8)]
        if self.has_bytes:
            columns += [Column("pool GiB", 11, 7), Column("evicted GiB", 13, 8)]
        return columns

    @property
    def header(self) -> str:
        """The titles of the columns, on one line or two."""
        if not self._is_compact:
            return self.row([column.title for column in self.columns])
        titles = [column.title.rpartition(" ") for column in self.columns]
        return "\n".join(self.row([title[part] for title in titles]) for part in (0, 2))

    def row(self, texts: Sequence[str]) -> str:
        """Returns a line of the table, of the cells that fit."""
        return self._line(texts, self._parts[0])

    def rest(self, rows: Sequence[Sequence[str]]) -> list[str]:
        """Returns the lines of the second table, with titles; none if all columns fit."""
        if len(self._parts) == 1:
            return []
        titles = [column.title.rpartition(" ") for column in self.columns]
        heads = [[title[part] for title in titles] for part in (0, 2)]
        return ["", *(self._line(texts, self._parts[1]) for texts in (*heads, *rows))]

    @property
    def _is_compact(self) -> bool:
        return sum(column.width for column in self.columns) > MAX_COLUMNS

    @property
    def _parts(self) -> list[list[int]]:
        """Indices of the columns of each table: the second has the first one's keys and what did not fit there."""
        indices = range(len(self.columns))
        if not self._is_compact:
            return [list(indices)]
        widths = [column.compact_width for column in self.columns]
        n_fit = max(n for n in range(len(widths) + 1) if sum(widths[:n]) <= MAX_COLUMNS)
        keys = [index for index in indices if self.columns[index].is_key]
        return [list(indices)] if n_fit == len(widths) else [list(indices[:n_fit]), [*keys, *indices[n_fit:]]]

    def _line(self, texts: Sequence[str], shown: Sequence[int]) -> str:
        """Returns a line: the first column aligned left, the others right."""
        columns = self.columns
        widths = [column.compact_width if self._is_compact else column.width for column in columns]
        padded = [f"{texts[index]:>{widths[index]}}" for index in shown]
        padded[0] = f"{texts[0]:<{widths[0]}}"
        return "".join(padded).rstrip()

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

    There is one for each capacity that refused requests as too large, one if answers are left out with several
    requests in flight, and one if disk tiers have nothing to give.
    """
    largest = max(recording.traffic.n_tokens)
    n_refused = {result.capacity_tokens: result.n_too_large for result in results if result.n_too_large}
    remarks = [
        f"{plural(n_too_large, 'request')} too large for {format_tokens(capacity or 0)} tokens (the largest has "
        f"{largest:,}): refused by the engine, and counted here as never cached"
        for capacity, n_too_large in n_refused.items()
    ]
    last = results[-1]
    if last.concurrency > 1 and last.n_answer_tokens is None:
        remarks.append(
            "answers are left out, because the file does not say how long they are (--output-len): in a server "
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


def _format_capacity(n_tokens: int | None) -> str:
    return "-" if n_tokens is None else format_tokens(n_tokens)


def _format_gib(n_bytes: int) -> str:
    return three_digits(n_bytes / _GIB)  # small models have small caches
