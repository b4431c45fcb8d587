"""Staging of work items over shared pages for FlashInfer's FA3 kernel.

That kernel takes the queries of one head at a time, and writes a query's result to the query's own index. So each
item gets a copy of its rows' queries at the indices of their results, and all (row, head) pairs of a KV head are
its queries, as if the model had no more heads than KV heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from radixkv.runtime.device.attention.cuda.base import Geometry
from radixkv.runtime.device.attention.cuda.fa3_prefill import balance_tiles
from radixkv.runtime.device.attention.cuda.work_items import Ints, WorkItems
from radixkv.runtime.device.memory.cuda.staging import StagingBuffer, StagingField, StagingLayout

_WORK_TOKENS = 256
"""Fixed cost of a tile, in tokens read."""
_MAX_PARTS = 16
"""Most parts of an item."""


def choose_part_tokens(items: WorkItems, geometry: Geometry, max_items: int, minimum: int) -> int:
    """Returns the tokens per part, a multiple of ``minimum``, with which the split items finish earliest."""
    if not len(items):
        return minimum
    n_tokens = items.ends - items.begins
    longest, best, earliest = int(n_tokens.max()), 0, np.inf
    for n_parts in range(1, _MAX_PARTS + 1):
        part = -(-longest // (n_parts * minimum)) * minimum
        n_items = int((-(-n_tokens // part)).sum())
        if best and n_items > max_items:
            break
        end = -(-n_items * geometry.shape.n_kv_heads // geometry.n_processors) * (part + _WORK_TOKENS)
        if end < earliest:
            best, earliest = part, end
    return best


@dataclass(frozen=True)
class Fa3Fields:
    """Staging fields of large items for the FA3 kernel.

    ``field`` holds the kernel's schedule; the integer attributes from ``zeros`` on are offsets of its arrays in it.
    """

    capacity: int
    """Most items; each is one tile per KV head."""
    geometry: Geometry
    field: StagingField
    copies: StagingField
    """[3, capacity]: first query, number of queries, and index of the first result of each item, for
    ``query_order.copy_item_queries``."""
    zeros: int
    """Index of each tile within its queries: always 0."""
    queries: int
    entries: int
    n_queries: int
    lengths: int
    heads: int
    ends: int
    """[processors + 1]: 0, then the end of each multiprocessor's tiles."""

    @classmethod
    def allocate(cls, capacity: int, geometry: Geometry, layout: StagingLayout) -> Fa3Fields:
        """Adds fields for ``capacity`` items to the layout."""
        size = -(-capacity * geometry.shape.n_kv_heads // 4) * 4
        field = layout.field(6 * size + geometry.n_processors + 1)
        offsets = [index * size for index in range(7)]
        return cls(capacity, geometry, field, layout.field(3 * capacity), *offsets)

    def fill(self, staged: StagingBuffer, items: WorkItems, results: Ints, n_padded: int) -> None:
        """Stages the items, each of which starts at a page, and then padding items.

        Args:
            staged: the step's staging buffer.
            items: items of whole pages.
            results: [items], index of each item's first result.
            n_padded: items to launch, at least ``len(items)`` and at most ``capacity``.
        """
        n, schedule, shape = len(items), staged[self.field], self.geometry.shape
        assert n <= n_padded <= self.capacity
        copies = staged[self.copies].reshape(3, self.capacity)
        copies[:, :n] = items.first_queries, items.n_queries, results
        copies[:, n:n_padded] = 0
        lengths = items.ends - items.begins
        item, head = np.repeat(np.arange(n), shape.n_kv_heads), np.tile(np.arange(shape.n_kv_heads), n)
        owners = balance_tiles(lengths[item].astype(np.int64) + _WORK_TOKENS, self.geometry.n_processors)
        work = np.argsort(owners, kind="stable")
        item, head = item[work], head[work]

        def put(first: int, values: NDArray[np.signedinteger]) -> None:
            schedule[first : first + len(values)] = values

        put(self.zeros, np.zeros_like(item))
        put(self.queries, results[item] * shape.group)
        put(self.entries, items.first_entries[item] + items.begins[item] // shape.page_size)
        put(self.n_queries, items.n_queries[item] * shape.group)
        put(self.lengths, lengths[item])
        put(self.heads, head)
        schedule[self.ends] = 0
        put(self.ends + 1, np.cumsum(np.bincount(owners, minlength=self.geometry.n_processors)))

    @property
    def plan(self) -> list[int]:
        """Byte offsets of the kernel's arrays in the field, in FlashInfer's order, then whether all heads share one
        schedule (never)."""
        offsets = (self.zeros, self.queries, self.entries, self.n_queries, self.lengths, self.heads, self.ends)
        return [4 * offset for offset in (*offsets, self.zeros)] + [0]
