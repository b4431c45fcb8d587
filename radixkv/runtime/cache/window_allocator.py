"""What a page cache asks about window pages, and the null object for a pool that has none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

from radixkv.runtime.cache.free_pages import FreeList, FreePages
from radixkv.runtime.cache.window_table import WindowTable
from radixkv.tree.node import State

if TYPE_CHECKING:
    from radixkv.runtime.cache.cache import PageCache


class WindowAllocator(Protocol):
    """Allocates window pages: K and V of the layers with windows, where these have pages of their own.

    A window page is in the place of pages of the layers without windows. States of the tree are then *tails*: they
    hold the window pages before a position. See docs/decisions/0069-window-pages.md.
    """

    window: int | None
    """Positions that a token attends to in the layers with windows; None without window pages."""

    @property
    def n_pages_evictable(self) -> int:
        """How many pages of layers without windows would be free without tails."""

    @property
    def n_pages_replaced(self) -> int:
        """How many pages of layers without windows have a window page in their place."""

    @property
    def can_replace_pages(self) -> bool:
        """Whether window pages can be in the place of other pages: a request may then find fewer of these than were
        promised to it."""

    def free_pages(self, n_pages: int) -> FreePages:
        """Returns the free pages of a new pool of ``n_pages`` pages of layers without windows."""

    def n_pages_missing(self, table: WindowTable, n_pages: int, max_row_tokens: int) -> int:
        """Returns how many pages of layers without windows are lost to the window pages that a request still needs.

        Args:
            table: of the request.
            n_pages: length that its block table will have.
            max_row_tokens: maximum tokens of a row.
        """

    def n_pages_lost(self, n_windows: int) -> int:
        """Returns how many pages of layers without windows there are less once ``n_windows`` more window pages are
        taken."""

    def make_room(
        self,
        cache: PageCache,
        n_pages: int,
        n_windows: int,
        *,
        n_left_free: int | None = None,
        spares_waiting: bool = False,
    ) -> bool:
        """Evicts until ``n_windows`` window pages can be taken, and then ``n_pages`` other pages are available.

        Args:
            cache: whose pages these are.
            n_pages: other pages.
            n_windows: window pages.
            n_left_free: see ``PageCache.reserve``.
            spares_waiting: whether pages stay that an upcoming prompt needs.

        Returns:
            False if that cannot be.
        """

    def waits_for_own_slabs(self, n_windows: int) -> bool:
        """Returns whether ``n_windows`` window pages would take slabs that are also for other pages."""

    def open(self, state: State) -> WindowTable:
        """Returns the table of a request that goes on from a tail. O(pages)."""

    def before(self, n_tokens: int) -> WindowTable:
        """Returns a table without pages that begins at the window before a position. O(1)."""

    def grow(self, table: WindowTable, n_pages: int) -> None:
        """Adds ``n_pages`` pages, which the slabs must have. O(new pages)."""

    def free_behind(self, table: WindowTable, n_tokens: int) -> bool:
        """Lets go of the pages that no row from position ``n_tokens`` on reads; returns whether there were any.

        No launched step may have a row that starts before, and no fork may still copy the pages. O(pages).
        """

    def is_behind(self, table: WindowTable, n_tokens: int) -> bool:
        """Returns whether ``free_behind`` would let go of pages."""

    def fork(self, table: WindowTable, n_tokens: int) -> WindowTable:
        """Returns a table of the first ``n_tokens`` tokens: whole pages are shared, and part of a page is copied.

        The slabs must have a page if there is such a part. O(pages).
        """

    def take_left(self) -> None:
        """Frees the pages of tails that have left the tree. O(their pages)."""

    def evict_tail(self) -> bool:
        """Evicts the tail that was used least recently; False if there is none that can be evicted. O(pages)."""

    def evict_tails(self) -> bool:
        """Evicts all tails for a request that begins again without the cache, so that its window pages are in slabs
        for windows only. O(tails).

        Returns:
            Whether that may give it room; False where no window page can be in the place of other pages.
        """

    def close(self, table: WindowTable) -> None:
        """Lets go of all pages of a table. O(pages)."""

    def pages_of(self, window_page: int) -> range:
        """Returns the pages of layers without windows that a window page is in the place of. O(1)."""

    def replaced_pages(self) -> Iterator[int]:
        """Yields the pages of layers without windows that have a window page in their place. O(these)."""

    def check(self, tables: Iterable[tuple[WindowTable, int]]) -> None:
        """Checks that each window page is free or held as often as was counted. O(pages of tables and tails).

        Args:
            tables: all of open block tables, with the length of each block table.

        Raises:
            InvariantError: a bug in radixkv.
        """


class NoWindowPages(WindowAllocator):
    """Stands where all layers have K and V in all pages: window tables stay empty, and nothing is lost. O(1) each,
    but ``free_pages``, which is O(pages)."""

    window = None

    @property
    def n_pages_evictable(self) -> int:
        """See ``WindowAllocator.n_pages_evictable``: none."""
        return 0

    @property
    def n_pages_replaced(self) -> int:
        """See ``WindowAllocator.n_pages_replaced``: none."""
        return 0

    @property
    def can_replace_pages(self) -> bool:
        """See ``WindowAllocator.can_replace_pages``."""
        return False

    def free_pages(self, n_pages: int) -> FreePages:
        """See ``WindowAllocator.free_pages``: a list."""
        return FreeList(range(n_pages - 1, -1, -1))

    def n_pages_missing(self, table: WindowTable, n_pages: int, max_row_tokens: int) -> int:
        """See ``WindowAllocator.n_pages_missing``: none."""
        return 0

    def n_pages_lost(self, n_windows: int) -> int:
        """See ``WindowAllocator.n_pages_lost``: none."""
        return 0

    def make_room(
        self,
        cache: PageCache,
        n_pages: int,
        n_windows: int,
        *,
        n_left_free: int | None = None,
        spares_waiting: bool = False,
    ) -> bool:
        """See ``WindowAllocator.make_room``: the page cache makes room for its pages itself."""
        return True

    def waits_for_own_slabs(self, n_windows: int) -> bool:
        """See ``WindowAllocator.waits_for_own_slabs``."""
        return False

    def open(self, state: State) -> WindowTable:
        """See ``WindowAllocator.open``: an empty table."""
        return WindowTable()

    def before(self, n_tokens: int) -> WindowTable:
        """See ``WindowAllocator.before``: an empty table."""
        return WindowTable()

    def grow(self, table: WindowTable, n_pages: int) -> None:
        """See ``WindowAllocator.grow``: the table stays empty."""

    def free_behind(self, table: WindowTable, n_tokens: int) -> bool:
        """See ``WindowAllocator.free_behind``."""
        return False

    def is_behind(self, table: WindowTable, n_tokens: int) -> bool:
        """See ``WindowAllocator.is_behind``."""
        return False

    def fork(self, table: WindowTable, n_tokens: int) -> WindowTable:
        """See ``WindowAllocator.fork``: an empty table."""
        return WindowTable()

    def take_left(self) -> None:
        """See ``WindowAllocator.take_left``: states have no pages."""

    def evict_tail(self) -> bool:
        """See ``WindowAllocator.evict_tail``: no eviction of a state gives a page."""
        return False

    def evict_tails(self) -> bool:
        """See ``WindowAllocator.evict_tails``."""
        return False

    def close(self, table: WindowTable) -> None:
        """See ``WindowAllocator.close``."""

    def pages_of(self, window_page: int) -> range:
        """See ``WindowAllocator.pages_of``: none."""
        return range(0)

    def replaced_pages(self) -> Iterator[int]:
        """See ``WindowAllocator.replaced_pages``: none."""
        return iter(())

    def check(self, tables: Iterable[tuple[WindowTable, int]]) -> None:
        """See ``WindowAllocator.check``: there is nothing to check."""
