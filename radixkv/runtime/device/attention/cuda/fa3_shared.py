"""Items of pages that many rows share, as tiles of FlashInfer's FA3 kernel.

That kernel takes the queries of one head at a time, and writes a query's result to the query's own place. So each
item gets a copy of its rows' queries, at the places of their results; and all (row, head) pairs of a KV head are
its queries, as if the model had no more heads than KV heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from radixkv.runtime.device.attention.cuda.fa3_prefill import balanced
from radixkv.runtime.device.attention.cuda.work_items import Ints, Items
from radixkv.runtime.device.staging_cuda import Field, Layout, Staged

_WORK_TOKENS = 256
"""Tokens that a tile costs besides those that it reads."""
_MAX_PARTS = 16


def part_tokens(items: Items, n_kv_heads: int, n_processors: int, max_items: int, least: int) -> int:
    """Tokens of a part, a multiple of ``least``, so that items that are cut into such are done soonest."""
    if not len(items):
        return least
    n_tokens = items.ends - items.begins
    longest, best, soonest = int(n_tokens.max()), 0, np.inf
    for n_parts in range(1, _MAX_PARTS + 1):
        part = -(-longest // (n_parts * least)) * least
        n_items = int((-(-n_tokens // part)).sum())
        if best and n_items > max_items:
            break
        end = -(-n_items * n_kv_heads // n_processors) * (part + _WORK_TOKENS)
        if end < soonest:
            best, soonest = part, end
    return best


@dataclass(frozen=True)
class TileFields:
    """Where items are staged: a field of the kernel's schedule, cut into its arrays (places within it), and one of
    what ``reorder.spread`` copies."""

    capacity: int
    """Items; each is a tile of every KV head."""
    n_kv_heads: int
    group: int
    n_processors: int
    field: Field
    copies: Field
    """[3, capacity]: first query, queries, result."""
    zeros: int
    """Which tile of its queries a tile is: the first."""
    queries: int
    entries: int
    n_queries: int
    lengths: int
    heads: int
    ends: int
    """[processors + 1]: 0, and where each one's tiles end."""

    @classmethod
    def place(cls, capacity: int, n_kv_heads: int, group: int, n_processors: int, layout: Layout) -> TileFields:
        """Room for ``capacity`` items."""
        size = -(-capacity * n_kv_heads // 4) * 4
        field = layout.field(6 * size + n_processors + 1)
        places = [index * size for index in range(7)]
        return cls(capacity, n_kv_heads, group, n_processors, field, layout.field(3 * capacity), *places)

    def fill(self, staged: Staged, items: Items, results: Ints, n_padded: int, page_size: int) -> None:
        """Stages the items, each of which begins with a page, and behind them such as do nothing.

        Args:
            results: [items], where each one's first query's result goes.
            n_padded: items that are launched, at least ``len(items)`` and at most ``capacity``.
        """
        n, numbers = len(items), staged[self.field]
        assert n <= n_padded <= self.capacity
        copies = staged[self.copies].reshape(3, self.capacity)
        copies[:, :n] = items.first_queries, items.n_queries, results
        copies[:, n:n_padded] = 0
        lengths = items.ends - items.begins
        item, head = np.repeat(np.arange(n), self.n_kv_heads), np.tile(np.arange(self.n_kv_heads), n)
        owners = balanced(lengths[item].astype(np.int64) + _WORK_TOKENS, self.n_processors)
        work = np.argsort(owners, kind="stable")
        item, head = item[work], head[work]

        def put(first: int, values: NDArray[np.signedinteger]) -> None:
            numbers[first : first + len(values)] = values

        put(self.zeros, np.zeros_like(item))
        put(self.queries, results[item] * self.group)
        put(self.entries, items.first_entries[item] + items.begins[item] // page_size)
        put(self.n_queries, items.n_queries[item] * self.group)
        put(self.lengths, lengths[item])
        put(self.heads, head)
        numbers[self.ends] = 0
        put(self.ends + 1, np.cumsum(np.bincount(owners, minlength=self.n_processors)))

    @property
    def plan(self) -> list[int]:
        """Byte offsets of the kernel's arrays in the field, in FlashInfer's order, and whether all heads have one
        schedule (never)."""
        places = (self.zeros, self.queries, self.entries, self.n_queries, self.lengths, self.heads, self.ends)
        return [4 * place for place in (*places, self.zeros)] + [0]
