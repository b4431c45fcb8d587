"""Window pages of a pool of slabs: who holds each of them. See docs/decisions/0069-window-pages.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from radixkv.errors import InvariantError
from radixkv.runtime.cache.free_pages import FreePages, Slabs
from radixkv.runtime.cache.window_allocator import WindowAllocator
from radixkv.runtime.cache.window_table import WindowTable
from radixkv.runtime.step.window_pool import WindowPool, max_window_pages
from radixkv.tree.node import State
from radixkv.tree.states import NodeStates
from radixkv.wire.stats import WindowStats

if TYPE_CHECKING:
    from radixkv.runtime.cache.cache import PageCache


class WindowPages(WindowAllocator):
    """Counts who holds each window page: block tables, and tails in the tree, which are states of positions.

    A page is free once nobody holds it. A tail has the pages of the window before its position.

    Args:
        slabs: the free pages of the pool.
        window: positions that a token attends to in the layers with windows, its own included.
        page_size: tokens per page.
    """

    def __init__(self, slabs: Slabs, window: int, page_size: int) -> None:
        self.slabs = slabs
        self.window = window
        self._page_size = page_size
        self._states: NodeStates | None = None
        self._in_tables: Counter[int] = Counter()
        """How many block tables hold each page."""
        self._in_tails: Counter[int] = Counter()
        """How many tails hold each page."""
        self._of_copies: set[WindowTable] = set()
        """Pages that copies from and to other tiers hold."""
        self._n_idle = 0
        """Pages of slabs for both kinds that only tails hold."""
        self._n_idle_for_windows = 0
        """The same of slabs for window pages only."""

    @classmethod
    def of(cls, pool: WindowPool, page_size: int) -> WindowPages:
        """Returns the window pages of a device's pool, all of them free."""
        slabs = Slabs(pool.pages_per_slab, pool.n_slabs, pool.n_window_slabs)
        return cls(slabs, pool.window, page_size)

    @classmethod
    def of_host(cls, pool: WindowPool, page_size: int, n_slots: int) -> WindowPages:
        """Returns the window pages of host slots behind a device's pool, which the page cache will get."""
        slabs = Slabs(pool.pages_per_slab, n_slots // pool.pages_per_slab, 0, are_free=False)
        return cls(slabs, pool.window, page_size)

    def watch(self, states: NodeStates | None) -> None:
        """Takes the states of the tree, which are tails, before there are any; without states there are none."""
        self._states = states
        if states is not None:
            states.on_left = self._lose

    @property
    def n_pages_evictable(self) -> int:
        """See ``WindowAllocator.n_pages_evictable``. O(1)."""
        return self._n_idle * self.slabs.pages_per_slab

    @property
    def n_pages_replaced(self) -> int:
        """See ``WindowAllocator.n_pages_replaced``. O(1)."""
        return self.slabs.n_shared * self.slabs.pages_per_slab

    @property
    def can_replace_pages(self) -> bool:
        """See ``WindowAllocator.can_replace_pages``."""
        return True

    def free_pages(self, n_pages: int) -> FreePages:
        """See ``WindowAllocator.free_pages``: the slabs, which have so many."""
        assert len(self.slabs) == n_pages, "the pool is that of the slabs"
        return self.slabs

    def max_pages(self, max_row_tokens: int) -> int:
        """Returns the most window pages that a request needs for a window and a row."""
        return max_window_pages(self.window, max_row_tokens, self._page_size)

    def n_pages_missing(self, table: WindowTable, n_pages: int, max_row_tokens: int) -> int:
        """See ``WindowAllocator.n_pages_missing``."""
        n_missing = min(n_pages - table.first, self.max_pages(max_row_tokens)) - len(table.pages)
        return self.slabs.n_pages_lost(n_missing - self._n_idle_for_windows) if n_missing > 0 else 0

    def n_pages_lost(self, n_windows: int) -> int:
        """See ``WindowAllocator.n_pages_lost``."""
        return self.slabs.n_pages_lost(n_windows)

    def make_room(
        self,
        cache: PageCache,
        n_pages: int,
        n_windows: int,
        *,
        n_left_free: int | None = None,
        spares_waiting: bool = False,
    ) -> bool:
        """See ``WindowAllocator.make_room``.

        Window pages need whole slabs. So the least recently used leaves are evicted until there are enough, and
        tails when there is no such leaf any more. O(log leaves) a leaf evicted.
        """
        slabs = self.slabs
        if n_left_free is not None:
            n_needed = n_pages + n_left_free + slabs.n_pages_lost(n_windows)
            return n_windows <= slabs.n_free_windows and n_needed <= cache.n_free
        if cache.n_available < n_pages:
            return False
        while (n_short := n_windows - slabs.n_free_windows) > 0:
            n_evicted = cache.n_evicted
            if cache.tree.n_pages_evictable:
                cache.evict_leaves(n_short * slabs.pages_per_slab, spares_waiting=spares_waiting)
            if cache.n_evicted == n_evicted and (spares_waiting or not self.evict_tail()):
                return False
        while cache.n_available - slabs.n_pages_lost(n_windows) < n_pages:
            if not slabs.n_for_windows < n_windows or not self.evict_tail():
                return False
        return True

    def waits_for_own_slabs(self, n_windows: int) -> bool:
        """See ``WindowAllocator.waits_for_own_slabs``."""
        return n_windows > self.slabs.n_for_windows

    def first_read(self, n_tokens: int) -> int:
        """Returns the first entry that a row at position ``n_tokens`` reads. O(1)."""
        return max(0, n_tokens + 1 - self.window) // self._page_size

    def open(self, state: State) -> WindowTable:
        """See ``WindowAllocator.open``."""
        self._hold(state.pages)
        return WindowTable(state.n_tokens // self._page_size - len(state.pages), list(state.pages))

    def before(self, n_tokens: int) -> WindowTable:
        """See ``WindowAllocator.before``."""
        return WindowTable(self.first_read(n_tokens))

    def grow(self, table: WindowTable, n_pages: int) -> None:
        """See ``WindowAllocator.grow``."""
        for _ in range(n_pages):
            page = self.slabs.take_window()
            table.pages.append(page)
            self._in_tables[page] = 1

    def free_behind(self, table: WindowTable, n_tokens: int) -> bool:
        """See ``WindowAllocator.free_behind``."""
        n_pages = self._first_kept(n_tokens) - table.first
        if n_pages <= 0:
            return False
        behind, table.pages = table.pages[:n_pages], table.pages[n_pages:]
        table.first += len(behind)
        self._let_go(behind)
        return True

    def is_behind(self, table: WindowTable, n_tokens: int) -> bool:
        """See ``WindowAllocator.is_behind``."""
        return self._first_kept(n_tokens) > table.first and bool(table.pages)

    def fork(self, table: WindowTable, n_tokens: int) -> WindowTable:
        """See ``WindowAllocator.fork``."""
        first, last = max(self._first_kept(n_tokens), table.first), n_tokens // self._page_size
        second = WindowTable(first, table.pages[first - table.first : last - table.first])
        self._hold(second.pages)
        if n_tokens % self._page_size:
            self.grow(second, 1)
            second.copies = [(table.pages[last - table.first], second.pages[-1])]
        return second

    def reaches(self, table: WindowTable, n_tokens: int) -> bool:
        """Returns whether a request still has all pages of the window before a position. O(1)."""
        return table.first <= self.first_read(n_tokens)

    def keep(self, table: WindowTable, state: State) -> None:
        """Makes a state a tail: it gets the pages before its position, which the request's rows fill. O(pages)."""
        first, last = self.first_read(state.n_tokens), state.n_tokens // self._page_size
        state.pages = tuple(table.pages[first - table.first : last - table.first])
        assert first >= table.first, "a request has the pages of the window before each position of its rows"
        self._in_tails.update(state.pages)

    def open_copied(self, state: State) -> WindowTable:
        """Returns a table that holds the pages of a tail for a copy, until ``close_copied``. O(pages)."""
        table = self.open(state)
        self._of_copies.add(table)
        return table

    def reserve_tail(
        self, cache: PageCache, n_tokens: int, known: Mapping[int, int], *, spares_waiting: bool
    ) -> WindowTable | None:
        """Returns a table with the pages of a tail that is to be copied, until ``close_copied``.

        O(pages), and O(log leaves) a leaf evicted.

        Args:
            cache: whose pages these are.
            n_tokens: position of the tail.
            known: pages of other tails of the same sequence, by the entry of the block table. These are shared.
            spares_waiting: see ``make_room``.

        Returns:
            None if there is no room for the pages that are not known.
        """
        entries = range(self.first_read(n_tokens), n_tokens // self._page_size)
        shared = [known[entry] for entry in entries if entry in known]
        self._hold(shared)
        if not self.make_room(cache, 0, len(entries) - len(shared), spares_waiting=spares_waiting):
            self._let_go(shared)
            return None
        table = WindowTable(entries.start)
        for entry in entries:
            if entry in known:
                table.pages.append(known[entry])
            else:
                self.grow(table, 1)
        self._of_copies.add(table)
        return table

    def close_copied(self, table: WindowTable) -> None:
        """Lets go of the pages of a copy. O(pages)."""
        self._of_copies.remove(table)
        self.close(table)

    def take_left(self) -> None:
        """See ``WindowAllocator.take_left``."""
        if self._states is not None:
            self._states.take_left()

    def evict_tail(self) -> bool:
        """See ``WindowAllocator.evict_tail``."""
        return self._states is not None and self._states.evict()

    def evict_tails(self) -> bool:
        """See ``WindowAllocator.evict_tails``."""
        while self.evict_tail():
            pass
        return True

    def close(self, table: WindowTable) -> None:
        """See ``WindowAllocator.close``."""
        self._let_go(table.pages)
        table.pages = []

    def pages_of(self, window_page: int) -> range:
        """See ``WindowAllocator.pages_of``."""
        return self.slabs.pages_of(window_page)

    def replaced_pages(self) -> Iterator[int]:
        """See ``WindowAllocator.replaced_pages``."""
        for page in self._in_tables | self._in_tails:
            yield from self.slabs.pages_of(page)

    def stats(
        self, *, n_tails: int, tails_kept_total: int, hits_total: int, evicted_total: int, missed_tokens_total: int
    ) -> WindowStats:
        """Returns counters and gauges, with what was counted of tails. See ``WindowStats``. O(1)."""
        slabs = self.slabs
        return WindowStats(
            n_window_pages=slabs.n_shared + slabs.n_window_slabs - slabs.n_for_windows,
            n_window_pages_evictable=self._n_idle + self._n_idle_for_windows,
            n_slabs=slabs.n_slabs,
            n_slabs_taken=slabs.n_shared,
            n_tails=n_tails,
            tails_kept_total=tails_kept_total,
            hits_total=hits_total,
            evicted_total=evicted_total,
            missed_tokens_total=missed_tokens_total,
        )

    def check(self, tables: Iterable[tuple[WindowTable, int]]) -> None:
        """See ``WindowAllocator.check``."""
        states = () if self._states is None else tuple(self._states)
        held: Counter[int] = Counter()
        for table in self._of_copies:
            held.update(table.pages)
        for table, n_pages in tables:
            held.update(table.pages)
            if table.end != n_pages:
                raise InvariantError(f"a block table has {n_pages} pages, and window pages up to {table.end}")
        kept = Counter(page for state in states for page in state.pages)
        if held != self._in_tables or kept != self._in_tails:
            raise InvariantError("window pages are held by other tables and tails than were counted")
        free, used, n_slabs = set(self.slabs.free_windows()), held | kept, self.slabs.n_slabs
        if not free.isdisjoint(used):
            raise InvariantError(f"window pages {sorted(free & used.keys())[:8]} are free, and held")
        n_for_windows = sum(page >= n_slabs for page in (*free, *used))
        if n_for_windows != self.slabs.n_window_slabs:
            raise InvariantError(f"{n_for_windows} of {self.slabs.n_window_slabs} window pages are free or held")
        shared = [page for page in used if page < n_slabs]
        idle = [page for page in kept if page not in held]
        n_idle = sum(page < n_slabs for page in idle)
        if (n_idle, len(idle) - n_idle, len(shared)) != (
            self._n_idle,
            self._n_idle_for_windows,
            self.slabs.n_shared,
        ):
            raise InvariantError(
                f"{n_idle} shared slabs are of tails alone, and {len(shared)} of windows; counted were "
                f"{self._n_idle} and {self.slabs.n_shared}"
            )
        for state in states:
            n_pages = state.n_tokens // self._page_size - self.first_read(state.n_tokens)
            if len(state.pages) != n_pages:
                raise InvariantError(
                    f"a tail of {state.n_tokens} tokens has {len(state.pages)} pages, not {n_pages}"
                )

    def _first_kept(self, n_tokens: int) -> int:
        """Returns the first entry that a request has whose next row is at position ``n_tokens``: of the window
        before the last page's end, where a tail is kept if the answer ends. O(1)."""
        return self.first_read(n_tokens - n_tokens % self._page_size)

    def _hold(self, pages: Iterable[int]) -> None:
        for page in pages:
            if not self._in_tables[page]:
                self._count_idle(page, -1)
            self._in_tables[page] += 1

    def _let_go(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._in_tables[page] -= 1
            if not self._in_tables[page]:
                del self._in_tables[page]
                if page in self._in_tails:
                    self._count_idle(page, 1)
                else:
                    self.slabs.give_window_back(page)

    def _lose(self, state: State) -> None:
        """Lets go of the pages of a tail that has left the tree."""
        for page in state.pages:
            self._in_tails[page] -= 1
            if not self._in_tails[page]:
                del self._in_tails[page]
                if page not in self._in_tables:
                    self._count_idle(page, -1)
                    self.slabs.give_window_back(page)
        state.pages = ()

    def _count_idle(self, page: int, change: int) -> None:
        if page < self.slabs.n_slabs:
            self._n_idle += change
        else:
            self._n_idle_for_windows += change
