"""The window pages of one request. See docs/decisions/0069-window-pages.md."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class WindowTable:
    """The window pages of one request, which cover what its next row reads, and its launched rows.

    It has no pages where all layers have their K and V in those of the block table.
    """

    first: int = 0
    """Entry of the block table that the first of ``pages`` has; those before it were freed, or never read."""
    pages: list[int] = field(default_factory=list)
    """Window pages in token order. Those of positions that are computed may be shared, and are only read."""
    n_on_device: int = 0
    """Leading entries that the device needs no more news of."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Copies of window pages (source, destination) that the plan of its next row must carry."""

    @property
    def end(self) -> int:
        """The entry after the last one: the length of the request's block table."""
        return self.first + len(self.pages)

    def take_news(self) -> tuple[int, tuple[int, ...]]:
        """Returns the first entry that the device does not have, and the pages from there on. O(their number)."""
        first = max(self.first, self.n_on_device)
        self.n_on_device = self.end
        return first, tuple(self.pages[first - self.first :])
