"""What the page cache has to know of a pool where layers with windows have pages of their own."""

from __future__ import annotations

from typing import NamedTuple


class WindowPool(NamedTuple):
    """Slabs of the KV pool, which have pages of layers without windows, or a window page, of those with windows."""

    window: int
    """Positions that a token attends to in the layers with windows, its own included."""
    pages_per_slab: int
    """Pages of layers without windows in a slab; ``Executor.n_pages`` are those of all slabs for both kinds."""
    n_slabs: int
    """Slabs for pages of both kinds."""
    n_window_slabs: int
    """Further slabs, for window pages only."""


def max_window_pages(window: int, max_row_tokens: int, page_size: int) -> int:
    """Returns the most window pages that a request has at once, for the window before the last page's end and a row
    of ``max_row_tokens``."""
    return -(-window // page_size) - (-max_row_tokens // page_size) + 1
