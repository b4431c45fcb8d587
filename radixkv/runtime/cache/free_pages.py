"""The free pages of a pool: a plain list, or slabs that are divided between pages of two kinds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, Self


class FreePages(Protocol):
    """The free pages of a pool. Freed pages are added with ``+=``."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]: ...

    def __iadd__(self, pages: Iterable[int]) -> Self: ...

    def take(self, n_pages: int) -> list[int]:
        """Removes and returns ``n_pages`` pages, at least 1; there must be so many. O(pages)."""


class FreeList(list[int]):
    """Free pages as a stack: the pages that were freed last are taken first."""

    def take(self, n_pages: int) -> list[int]:
        """See ``FreePages.take``."""
        pages = self[-n_pages:]
        del self[-n_pages:]
        return pages


class Slabs:
    """The free pages of a pool whose layers with and without windows have pages of their own in the same memory.

    The memory consists of slabs. A slab has ``pages_per_slab`` pages of the layers without windows, or one *window
    page*, which has K and V of the same number of tokens in the layers with windows. Page ``p`` is in slab
    ``p // pages_per_slab``, and window page ``p`` is slab ``p``. The last slabs are for window pages only, so that
    pages which are in use in all other slabs leave room for the windows of one request. As ``FreePages`` these are
    the pages of layers without windows. Pages are taken from divided slabs first, and window pages from those slabs
    first that are for nothing else. O(1) a page.

    Args:
        pages_per_slab: pages of layers without windows in a slab.
        n_slabs: slabs for pages of both kinds.
        n_window_slabs: further slabs, for window pages only.
        are_free: whether the slabs for both kinds are free at first; if not, their pages are added as they come.
    """

    def __init__(self, pages_per_slab: int, n_slabs: int, n_window_slabs: int, *, are_free: bool = True) -> None:
        self.pages_per_slab = pages_per_slab
        self.n_slabs = n_slabs
        self.n_window_slabs = n_window_slabs
        self._whole = list(range(n_slabs - 1, -1, -1)) if are_free else []
        """Free slabs for pages of both kinds."""
        self._divided: dict[int, list[int]] = {}
        """The free pages of each slab that has both free pages and others."""
        self._for_windows = list(range(n_slabs + n_window_slabs - 1, n_slabs - 1, -1))
        """Free slabs for window pages only."""
        self._n_free = len(self._whole) * pages_per_slab
        self.n_shared = 0
        """Slabs for pages of both kinds that are window pages now."""

    def __len__(self) -> int:
        return self._n_free

    def __iter__(self) -> Iterator[int]:
        for slab in self._whole:
            yield from self.pages_of(slab)
        for pages in self._divided.values():
            yield from pages

    def __iadd__(self, pages: Iterable[int]) -> Self:
        for page in pages:
            slab = page // self.pages_per_slab
            free = self._divided.setdefault(slab, [])
            free.append(page)
            self._n_free += 1
            if len(free) == self.pages_per_slab:
                del self._divided[slab]
                self._whole.append(slab)
        return self

    def take(self, n_pages: int) -> list[int]:
        """See ``FreePages.take``."""
        taken: list[int] = []
        while len(taken) < n_pages:
            if not self._divided:
                slab = self._whole.pop()
                self._divided[slab] = list(reversed(self.pages_of(slab)))
            slab, free = next(reversed(self._divided.items()))
            while free and len(taken) < n_pages:
                taken.append(free.pop())
            if not free:
                del self._divided[slab]
        self._n_free -= n_pages
        return taken

    @property
    def n_for_windows(self) -> int:
        """Free slabs for window pages only. O(1)."""
        return len(self._for_windows)

    @property
    def n_free_windows(self) -> int:
        """How many window pages can be taken. O(1)."""
        return len(self._for_windows) + len(self._whole)

    def n_pages_lost(self, n_windows: int) -> int:
        """Returns how many pages of layers without windows there are less once ``n_windows`` window pages are
        taken. O(1)."""
        return self.pages_per_slab * max(0, n_windows - len(self._for_windows))

    def take_window(self) -> int:
        """Removes and returns a window page; there must be one. O(1)."""
        if self._for_windows:
            return self._for_windows.pop()
        self._n_free -= self.pages_per_slab
        self.n_shared += 1
        return self._whole.pop()

    def give_window_back(self, page: int) -> None:
        """Frees a window page. O(1)."""
        if page >= self.n_slabs:
            self._for_windows.append(page)
            return
        self._whole.append(page)
        self._n_free += self.pages_per_slab
        self.n_shared -= 1

    def pages_of(self, window_page: int) -> range:
        """Returns the pages of layers without windows that a window page takes the place of. O(1)."""
        if window_page >= self.n_slabs:
            return range(0)
        return range(window_page * self.pages_per_slab, (window_page + 1) * self.pages_per_slab)

    def free_windows(self) -> Iterator[int]:
        """Yields the window pages that are free, and whose slabs have no other pages in use. O(slabs)."""
        yield from self._for_windows
        yield from self._whole
