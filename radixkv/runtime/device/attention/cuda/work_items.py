"""Work items of attention: which queries read which positions of which block table, and where results go.

An item is computed by one thread block per KV head. Long rows and shared pages are split into items here, on the
host. The single item of a row writes the row's output; the results of several items are merged.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from radixkv.runtime.device.memory.cuda.staging import StagingBuffer, StagingField, StagingLayout

Ints = NDArray[np.int32]

N_COLUMNS = 7
"""Values per item in ``ItemFields``: first query, number of queries, first entry, begin, end, limit, result."""
UNLIMITED = 1 << 30
"""Limit of an item whose queries attend to all positions that it reads."""


@dataclass(frozen=True)
class WorkItems:
    """Work items as one int32 array with a column per item, because every call of NumPy costs a microsecond."""

    columns: Ints
    """[6, items]: the properties below."""

    def __len__(self) -> int:
        return int(self.columns.shape[1])

    @property
    def first_queries(self) -> Ints:
        """Index of the first query."""
        return self._column(0)

    @property
    def n_queries(self) -> Ints:
        """Consecutive queries of the item; times the heads that share a KV head, they fit one tile."""
        return self._column(1)

    @property
    def first_entries(self) -> Ints:
        """Index of the block table's first entry in the flattened block tables."""
        return self._column(2)

    @property
    def begins(self) -> Ints:
        """First position that the item reads."""
        return self._column(3)

    @property
    def ends(self) -> Ints:
        """Position after the last one that the item reads."""
        return self._column(4)

    @property
    def limits(self) -> Ints:
        """Position after the last one that the first query attends to. Each further query attends to one more, if
        the item reads it."""
        return self._column(5)

    def split(self, n_tokens: int, multiple: int = 1) -> WorkItems:
        """Splits items into parts of at most ``n_tokens`` tokens, the longest first.

        The parts of one item are equally long, except for the last.

        Args:
            n_tokens: most tokens per part, a multiple of ``multiple``.
            multiple: parts are multiples of this many tokens, except for the last.
        """
        lengths = self.ends - self.begins
        n_parts = np.maximum(-(-lengths // n_tokens), 1)
        sizes = np.maximum(-(-lengths // (n_parts * multiple)) * multiple, 1)
        n_parts = -(-lengths // sizes)
        item = np.arange(len(self)).repeat(n_parts)
        part = np.arange(len(item)) - (n_parts.cumsum() - n_parts)[item]
        columns, sizes = self.columns[:, item], sizes[item]
        begins, ends = columns[3], columns[4]
        begins += part * sizes
        np.minimum(ends, begins + sizes, out=ends)
        return WorkItems(columns[:, np.argsort(begins - ends, kind="stable")])

    def _column(self, index: int) -> Ints:
        column: Ints = self.columns[index]
        return column

    @classmethod
    def of(cls, *columns: Ints) -> WorkItems:
        """Returns items of these columns, in their order."""
        return cls(np.array(columns, np.int32))

    @classmethod
    def joined(cls, a: WorkItems, b: WorkItems) -> WorkItems:
        """Concatenates items."""
        return cls(np.concatenate([a.columns, b.columns], axis=1)) if len(a) and len(b) else a if len(a) else b


@dataclass(frozen=True)
class MergePlan:
    """Which partial results are merged into which query, in CSR form."""

    results: NDArray[np.signedinteger]
    """[items]: index of the item's first result, which the results of its other queries follow; -1 for the
    single item of its queries."""
    indptr: Ints
    """[queries + 1]: offsets into ``indices``."""
    indices: NDArray[np.signedinteger]
    """The results of query i are ``indices[indptr[i] : indptr[i + 1]]``: none if it has a single item."""

    @classmethod
    def from_items(cls, n_queries: int, items: WorkItems) -> MergePlan:
        """Assigns indices to the results of ``items``.

        Every query must have an item, and the single item of a query must be that of all its queries.
        """
        counts = items.n_queries
        results = counts.cumsum() - counts
        query = (items.first_queries - results).repeat(counts)
        query += np.arange(len(query))
        n_items = np.bincount(query, minlength=n_queries)
        is_single = n_items[items.first_queries] == 1
        if is_single.any():
            query = query[~is_single.repeat(counts)]
            counts = np.where(is_single, 0, counts)
            results = np.where(is_single, -1, counts.cumsum() - counts)
            n_items[n_items == 1] = 0
        indptr = np.zeros(n_queries + 1, dtype=np.int32)
        n_items.cumsum(out=indptr[1:])
        return cls(results, indptr, np.argsort(query, kind="stable"))


@dataclass(frozen=True)
class ItemFields:
    """Staging field of items for ``decode_kernel.attend_decode``: [columns, capacity]."""

    capacity: int
    field: StagingField

    @classmethod
    def allocate(cls, capacity: int, layout: StagingLayout) -> ItemFields:
        """Adds a field for ``capacity`` items to the layout."""
        return cls(capacity, layout.field(N_COLUMNS * capacity))

    def fill(self, staged: StagingBuffer, items: WorkItems, results: Ints, n_padded: int) -> None:
        """Stages the items, and then padding items up to ``n_padded``."""
        n, columns = len(items), staged[self.field].reshape(N_COLUMNS, self.capacity)
        assert n <= n_padded <= self.capacity
        columns[:-1, :n] = items.columns
        columns[-1, :n] = results
        columns[:, n:n_padded] = 0


@dataclass(frozen=True)
class Fa2Fields:
    """Staging field of items for FlashInfer's FA2 kernel, and the offsets of its arrays in the field.

    The kernel takes a *request* as a range of queries and a range of page ids, both given by prefix sums
    ("indptr"). For request r it reads only entries r and r + 1, so requests with even numbers are independent of
    each other: any queries against any pages of any block table, any number of times. An item is such a request.
    FlashInfer's own planner is not used, because it copies from pinned memory without a fence.
    """

    capacity: int
    """Most items."""
    field: StagingField
    constants: int
    """Two constants: FlashInfer's chunk size in positions, unlimited, and the number of queries it merges, 0."""
    requests: int
    zeros: int
    query_indptr: int
    page_indptr: int
    last_page_lens: int
    results: int
    is_item: int
    """One byte per item: 0 for padding."""

    @classmethod
    def allocate(cls, capacity: int, layout: StagingLayout) -> Fa2Fields:
        """Adds a field for ``capacity`` items to the layout: 10 int32 and a byte each."""
        twice = 2 * capacity
        sizes = [2, capacity, capacity, twice, twice + 1, twice, twice, -(-capacity // 4)]
        firsts = [sum(-(-size // 4) * 4 for size in sizes[:index]) for index in range(len(sizes) + 1)]
        return cls(capacity, layout.field(firsts[-1]), *firsts[:-1])

    def fill(
        self,
        staged: StagingBuffer,
        items: WorkItems,
        results: Ints,
        n_padded: int,
        *,
        page_size: int,
        n_entries: int,
    ) -> None:
        """Stages the items, each of which starts at a page, and then padding items.

        Args:
            staged: the step's staging buffer.
            items: items of whole pages.
            results: [items], index of each item's first result.
            n_padded: items to launch, at least ``len(items)`` and at most ``capacity``.
            page_size: tokens per page.
            n_entries: entries of all block tables together.
        """
        n, arrays = len(items), staged[self.field]
        assert n <= n_padded <= self.capacity

        def put(first: int, values: Ints) -> None:
            field = arrays[first : first + 2 * n_padded]
            field[: 2 * n : 2] = values
            field[2 * n :] = 0

        arrays[self.constants] = 1 << 30
        arrays[self.constants + 1] = 0
        arrays[self.requests : self.requests + n_padded] = np.arange(0, 2 * n_padded, 2)
        arrays[self.zeros : self.zeros + n_padded] = 0
        put(self.query_indptr, items.first_queries)
        arrays[self.query_indptr + 1 : self.query_indptr + 2 * n : 2] = items.first_queries + items.n_queries
        put(self.page_indptr, items.first_entries + items.begins // page_size)
        last_pages = items.first_entries - (-items.ends // page_size)
        arrays[self.page_indptr + 1 : self.page_indptr + 2 * n : 2] = last_pages
        arrays[self.page_indptr + 2 * self.capacity] = n_entries
        put(self.last_page_lens, (items.ends - 1) % page_size + 1)
        put(self.results, results)
        is_item = arrays[self.is_item : self.is_item + -(-n_padded // 4)].view(np.uint8)
        is_item[:n] = 1
        is_item[n:] = 0
