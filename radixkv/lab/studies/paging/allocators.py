"""Allocators of contiguous memory, as used by serving engines before paging."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from sortedcontainers import SortedList


class Extent(NamedTuple):
    """Consecutive token slots."""

    start: int
    n_slots: int


class Allocator(Protocol):
    """Allocates consecutive token slots."""

    @property
    def n_free(self) -> int:
        """Free slots, contiguous or not."""
        ...

    def allocated_size(self, n_slots: int) -> int:
        """Returns the size of the extent that ``allocate(n_slots)`` takes."""
        ...

    def allocate(self, n_slots: int) -> Extent | None:
        """Returns an extent of at least ``n_slots`` slots, or None if no free extent is large enough."""
        ...

    def free(self, extent: Extent) -> None:
        """Takes an extent back and merges it with free neighbours."""
        ...


class BestFitAllocator:
    """Allocates extents of exactly the requested size from the smallest sufficient free extent. O(log extents)."""

    def __init__(self, n_slots: int) -> None:
        self.n_free = 0
        self._by_size: SortedList[tuple[int, int]] = SortedList()
        """Free extents as (size, start)."""
        self._size_by_start: dict[int, int] = {}
        """Size of each free extent, by its first slot."""
        self._start_by_end: dict[int, int] = {}
        """First slot of each free extent, by the slot after its last."""
        self._add(Extent(0, n_slots))

    def allocated_size(self, n_slots: int) -> int:
        """Returns ``n_slots``."""
        return n_slots

    def allocate(self, n_slots: int) -> Extent | None:
        """Returns the start of the smallest sufficient free extent; among equal sizes, of the first in memory."""
        index = self._by_size.bisect_left((n_slots, 0))
        if index == len(self._by_size):
            return None
        size, start = self._by_size[index]
        self._remove(Extent(start, size))
        if size > n_slots:
            self._add(Extent(start + n_slots, size - n_slots))
        return Extent(start, n_slots)

    def free(self, extent: Extent) -> None:
        """Merges the extent with the free extents on both sides."""
        start, end = extent.start, extent.start + extent.n_slots
        if (before := self._start_by_end.get(start)) is not None:
            self._remove(Extent(before, start - before))
            start = before
        if (n_after := self._size_by_start.get(end)) is not None:
            self._remove(Extent(end, n_after))
            end += n_after
        self._add(Extent(start, end - start))

    def _add(self, extent: Extent) -> None:
        self.n_free += extent.n_slots
        self._by_size.add((extent.n_slots, extent.start))
        self._size_by_start[extent.start] = extent.n_slots
        self._start_by_end[extent.start + extent.n_slots] = extent.start

    def _remove(self, extent: Extent) -> None:
        self.n_free -= extent.n_slots
        self._by_size.remove((extent.n_slots, extent.start))
        del self._size_by_start[extent.start]
        del self._start_by_end[extent.start + extent.n_slots]


class BuddyAllocator:
    """Allocates power-of-two extents, which are split in halves and merged with their buddy. O(log slots).

    A pool whose size is not a power of two starts as several extents, the largest first, which never merge.
    """

    def __init__(self, n_slots: int) -> None:
        self.n_free = n_slots
        self._free: list[SortedList[int]] = [SortedList() for _ in range(n_slots.bit_length())]
        """First slots of the free extents, by order: the exponent of their size."""
        start = 0
        for order in reversed(range(n_slots.bit_length())):
            if n_slots >> order & 1:
                self._free[order].add(start)
                start += 1 << order

    def allocated_size(self, n_slots: int) -> int:
        """Returns the smallest power of two that is at least ``n_slots``."""
        return next_power_of_two(n_slots)

    def allocate(self, n_slots: int) -> Extent | None:
        """Splits the first free extent of the smallest sufficient size until it has the size of the request."""
        target_order = self.allocated_size(n_slots).bit_length() - 1
        order = next((o for o in range(target_order, len(self._free)) if self._free[o]), None)
        if order is None:
            return None
        start = self._free[order].pop(0)
        while order > target_order:
            order -= 1
            self._free[order].add(start + (1 << order))
        self.n_free -= 1 << target_order
        return Extent(start, 1 << target_order)

    def free(self, extent: Extent) -> None:
        """Merges the extent with its buddy, and the result with its own, as long as the buddy is free."""
        start, order = extent.start, extent.n_slots.bit_length() - 1
        self.n_free += extent.n_slots
        # An initial extent of the pool has no buddy: fewer slots than its own size follow it.
        while (buddy := start ^ (1 << order)) in self._free[order]:
            self._free[order].remove(buddy)
            start = min(start, buddy)
            order += 1
        self._free[order].add(start)


def next_power_of_two(number: int) -> int:
    """Returns the smallest power of two that is at least a positive ``number``."""
    return 1 << (number - 1).bit_length()
