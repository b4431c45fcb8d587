"""Allocators of contiguous memory, as serving engines had them before paging."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from sortedcontainers import SortedList


class Block(NamedTuple):
    """Consecutive token slots."""

    start: int
    n_slots: int


class Allocator(Protocol):
    """Hands out consecutive token slots."""

    @property
    def n_free(self) -> int:
        """Slots that nobody has, wherever they lie."""
        ...

    def size_of(self, n_slots: int) -> int:
        """The size of the block that a request for so many slots takes."""
        ...

    def allocate(self, n_slots: int) -> Block | None:
        """A block of at least so many slots; None if no free run of slots is long enough."""
        ...

    def free(self, block: Block) -> None:
        """Takes a block back, which becomes one with free neighbours."""
        ...


class BestFit:
    """Blocks of exactly the size asked for, from the smallest free run that holds it. O(log runs)."""

    def __init__(self, n_slots: int) -> None:
        self.n_free = 0
        self._by_size: SortedList[tuple[int, int]] = SortedList()
        """Free runs: size, start."""
        self._size_at: dict[int, int] = {}
        """Of the free run that starts there."""
        self._start_of_end: dict[int, int] = {}
        """Of the free run that ends before that slot."""
        self._add(Block(0, n_slots))

    def size_of(self, n_slots: int) -> int:
        """The size itself."""
        return n_slots

    def allocate(self, n_slots: int) -> Block | None:
        """The beginning of the smallest run that holds so many, the first in memory of equal ones."""
        place = self._by_size.bisect_left((n_slots, 0))
        if place == len(self._by_size):
            return None
        size, start = self._by_size[place]
        self._remove(Block(start, size))
        if size > n_slots:
            self._add(Block(start + n_slots, size - n_slots))
        return Block(start, n_slots)

    def free(self, block: Block) -> None:
        """Joins the block with the free runs on both sides."""
        start, end = block.start, block.start + block.n_slots
        if (before := self._start_of_end.get(start)) is not None:
            self._remove(Block(before, start - before))
            start = before
        if (n_after := self._size_at.get(end)) is not None:
            self._remove(Block(end, n_after))
            end += n_after
        self._add(Block(start, end - start))

    def _add(self, run: Block) -> None:
        self.n_free += run.n_slots
        self._by_size.add((run.n_slots, run.start))
        self._size_at[run.start] = run.n_slots
        self._start_of_end[run.start + run.n_slots] = run.start

    def _remove(self, run: Block) -> None:
        self.n_free -= run.n_slots
        self._by_size.remove((run.n_slots, run.start))
        del self._size_at[run.start]
        del self._start_of_end[run.start + run.n_slots]


class Buddy:
    """Blocks whose sizes are powers of two, halved from larger ones and joined with their other half. O(log slots).

    A pool whose size is no power of two begins as several blocks, the largest first, which never join.
    """

    def __init__(self, n_slots: int) -> None:
        self.n_free = n_slots
        self._free: list[SortedList[int]] = [SortedList() for _ in range(n_slots.bit_length())]
        """Starts of free blocks, by the exponent of their size."""
        start = 0
        for order in reversed(range(n_slots.bit_length())):
            if n_slots >> order & 1:
                self._free[order].add(start)
                start += 1 << order

    def size_of(self, n_slots: int) -> int:
        """The next power of two."""
        return next_power_of_two(n_slots)

    def allocate(self, n_slots: int) -> Block | None:
        """The first block of the smallest size that will do, halved until it is as small as can be."""
        wanted = self.size_of(n_slots).bit_length() - 1
        order = next((o for o in range(wanted, len(self._free)) if self._free[o]), None)
        if order is None:
            return None
        start = self._free[order].pop(0)
        while order > wanted:
            order -= 1
            self._free[order].add(start + (1 << order))
        self.n_free -= 1 << wanted
        return Block(start, 1 << wanted)

    def free(self, block: Block) -> None:
        """Joins the block with its other half, and the two with theirs, as long as those are free."""
        start, order = block.start, block.n_slots.bit_length() - 1
        self.n_free += block.n_slots
        # A block that the pool began as has no other half: behind it there are fewer slots than its own.
        while (other := start ^ (1 << order)) in self._free[order]:
            self._free[order].remove(other)
            start = min(start, other)
            order += 1
        self._free[order].add(start)


def next_power_of_two(number: int) -> int:
    """The least that is not below a positive number."""
    return 1 << (number - 1).bit_length()
