"""Work items: which queries read which positions of which block table, and where their results go.

One item is one block of threads a KV head. Long rows and pages that rows share are cut into items here, on the
host. An item that is a row's only one gives the row's output; the results of others are merged.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from radixkv.runtime.device.staging_cuda import Field, Layout, Staged

Ints = NDArray[np.int32]

N_COLUMNS = 6
"""Numbers of an item, as ``ItemFields`` stages them: first query, queries, first entry, begin, end, result."""


@dataclass(frozen=True)
class Items:
    """Arrays of int32, one entry an item."""

    first_queries: Ints
    n_queries: Ints
    """Neighbours, that fit one tile: queries times heads that share a KV head."""
    first_entries: Ints
    """Where the block table begins in all tables, seen flat."""
    begins: Ints
    """The first position that the item reads."""
    ends: Ints
    """Behind the last one."""

    def __len__(self) -> int:
        return len(self.ends)

    def cut(self, n_tokens: int, multiple: int = 1) -> Items:
        """The same in items of at most so many tokens, the longest first; those of one item are equally long, but
        for the last.

        Args:
            n_tokens: a multiple of ``multiple``, of which parts are.
        """
        lengths = self.ends - self.begins
        n_parts = np.maximum(-(-lengths // n_tokens), 1)
        sizes = -(-lengths // (n_parts * multiple)) * multiple
        n_parts = -(-lengths // np.maximum(sizes, 1))
        item = np.repeat(np.arange(len(self)), n_parts)
        part = np.arange(len(item)) - np.repeat(np.cumsum(n_parts) - n_parts, n_parts)
        begins = self.begins[item] + part * sizes[item]
        ends = np.minimum(begins + sizes[item], self.ends[item])
        order = np.argsort(begins - ends, kind="stable")
        item = item[order]
        return Items(
            self.first_queries[item],
            self.n_queries[item],
            self.first_entries[item],
            begins[order].astype(np.int32),
            ends[order].astype(np.int32),
        )

    @classmethod
    def joined(cls, a: Items, b: Items) -> Items:
        """Those of both."""
        return cls(
            np.concatenate([a.first_queries, b.first_queries]),
            np.concatenate([a.n_queries, b.n_queries]),
            np.concatenate([a.first_entries, b.first_entries]),
            np.concatenate([a.begins, b.begins]),
            np.concatenate([a.ends, b.ends]),
        )


@dataclass(frozen=True)
class Merge:
    """Which results belong together."""

    results: Ints
    """[items]: where each item's first query's result goes, the others behind it; -1 for a query's only one."""
    indptr: Ints
    """[queries + 1]"""
    listed: Ints
    """Query i has ``listed[indptr[i] : indptr[i + 1]]``: none if it has one item."""

    @classmethod
    def of(cls, n_queries: int, items: Items) -> Merge:
        """Numbers the results of ``items``. Every query has one at least; those of several share no only one."""
        counts = items.n_queries
        query = np.repeat(items.first_queries, counts)
        query += np.arange(len(query), dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts)
        is_only = np.bincount(query, minlength=n_queries)[items.first_queries] == 1
        counts = np.where(is_only, 0, counts)
        results = np.where(is_only, -1, np.cumsum(counts) - counts).astype(np.int32)
        merged = query[np.repeat(~is_only, items.n_queries)]
        indptr = np.zeros(n_queries + 1, dtype=np.int32)
        np.cumsum(np.bincount(merged, minlength=n_queries), out=indptr[1:])
        return cls(results, indptr, np.argsort(merged, kind="stable").astype(np.int32))


@dataclass(frozen=True)
class ItemFields:
    """Where items are staged for ``attend.attend``: [columns, capacity]."""

    capacity: int
    field: Field

    @classmethod
    def place(cls, capacity: int, layout: Layout) -> ItemFields:
        """Room for ``capacity`` of them."""
        return cls(capacity, layout.field(N_COLUMNS * capacity))

    def fill(self, staged: Staged, items: Items, results: Ints, n_padded: int) -> None:
        """Stages the items, and behind them such as do nothing, until there are ``n_padded``."""
        n, columns = len(items), staged[self.field].reshape(N_COLUMNS, self.capacity)
        assert n <= n_padded <= self.capacity
        columns[:, :n] = (
            items.first_queries,
            items.n_queries,
            items.first_entries,
            items.begins,
            items.ends,
            results,
        )
        columns[:, n:n_padded] = 0


@dataclass(frozen=True)
class RequestFields:
    """Where items are staged for FlashInfer's FA2 kernel: one field, cut into its arrays (places within it).

    It takes a *request* as a span of queries and a span of page numbers, and numbers both by prefix sums
    ("indptr"). Only entries r and r + 1 of a sum are read for request r, so requests that use the even numbers
    alone are free: any queries against any pages of any block table, as often as wanted. An item is such a request;
    FlashInfer's own planner is not used (it copies from pinned memory without a fence).
    """

    capacity: int
    field: Field
    constants: int
    """Positions that FlashInfer reads at a time: all. Queries whose results it merges: none."""
    requests: int
    zeros: int
    query_indptr: int
    page_indptr: int
    last_page_lens: int
    results: int
    is_item: int
    """Bytes: whether there is one."""

    @classmethod
    def place(cls, capacity: int, layout: Layout) -> RequestFields:
        """Room for ``capacity`` items: 10 numbers and a byte each."""
        twice = 2 * capacity
        sizes = [2, capacity, capacity, twice, twice + 1, twice, twice, -(-capacity // 4)]
        firsts = [sum(-(-size // 4) * 4 for size in sizes[:index]) for index in range(len(sizes) + 1)]
        return cls(capacity, layout.field(firsts[-1]), *firsts[:-1])

    def fill(
        self, staged: Staged, items: Items, results: Ints, n_padded: int, *, page_size: int, n_entries: int
    ) -> None:
        """Stages the items, each of which begins with a page, and behind them such as do nothing.

        Args:
            results: [items], where each one's first query's result goes.
            n_padded: items that are launched, at least ``len(items)`` and at most ``capacity``.
            n_entries: of all block tables together.
        """
        n, numbers = len(items), staged[self.field]
        assert n <= n_padded <= self.capacity

        def put(first: int, values: Ints) -> None:
            field = numbers[first : first + 2 * n_padded]
            field[: 2 * n : 2] = values
            field[2 * n :] = 0

        numbers[self.constants] = 1 << 30
        numbers[self.constants + 1] = 0
        numbers[self.requests : self.requests + n_padded] = np.arange(0, 2 * n_padded, 2)
        numbers[self.zeros : self.zeros + n_padded] = 0
        put(self.query_indptr, items.first_queries)
        numbers[self.query_indptr + 1 : self.query_indptr + 2 * n : 2] = items.first_queries + items.n_queries
        put(self.page_indptr, items.first_entries + items.begins // page_size)
        last_pages = items.first_entries - (-items.ends // page_size)
        numbers[self.page_indptr + 1 : self.page_indptr + 2 * n : 2] = last_pages
        numbers[self.page_indptr + 2 * self.capacity] = n_entries
        put(self.last_page_lens, (items.ends - 1) % page_size + 1)
        put(self.results, results)
        is_item = numbers[self.is_item : self.is_item + -(-n_padded // 4)].view(np.uint8)
        is_item[:n] = 1
        is_item[n:] = 0
