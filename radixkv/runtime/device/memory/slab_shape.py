"""How the memory of a pool is divided among layers with and without windows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from radixkv.runtime.device.device_settings import DeviceSettings
from radixkv.runtime.device.memory.page_shape import PageShape
from radixkv.runtime.step.window_pool import WindowPool, max_window_pages

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SlabShape:
    """The slabs of a pool: a slab has pages of the layers without windows, or one page of the layers with windows.

    A slab consists of *units*, each K and V of a page's tokens in one layer. Unit ``u`` of page ``p`` of the layers
    without windows is ``p * n_full + u`` of the pool, and that of window page ``p`` is
    ``p * units_per_slab + u``: each layer's pages are at equal distances.
    """

    page: PageShape
    """Of all layers."""
    windows: tuple[int | None, ...]
    """Window of each layer; there are two values, one of them None."""
    n_slabs: int
    """Slabs for pages of both kinds."""
    n_window_slabs: int
    """Further slabs, for window pages only: those that one request needs at once."""

    @property
    def window(self) -> int:
        """Positions that a token attends to in the layers with windows."""
        return max(window for window in self.windows if window is not None)

    @property
    def n_full(self) -> int:
        """Layers without windows."""
        return self.windows.count(None)

    @property
    def pages_per_slab(self) -> int:
        """Pages of layers without windows in a slab."""
        return pages_per_slab(self.windows)

    @property
    def units_per_slab(self) -> int:
        """Units of a slab; a window page leaves some of them unused unless the layers divide evenly."""
        return self.pages_per_slab * self.n_full

    @property
    def n_pages(self) -> int:
        """Pages of layers without windows, while no slab is a window page."""
        return self.n_slabs * self.pages_per_slab

    @property
    def n_units(self) -> int:
        """Units of all slabs, and of one more that stays zero."""
        return (self.n_slabs + self.n_window_slabs + 1) * self.units_per_slab

    def layer_views(self, units: Tensor) -> list[Tensor]:
        """Returns the pages of each layer, or its window pages, as views of all units of K or of V."""
        views, n_done = [], {True: 0, False: 0}
        for window in self.windows:
            is_full = window is None
            views.append(units[n_done[is_full] :: self.n_full if is_full else self.units_per_slab])
            n_done[is_full] += 1
        return views

    @property
    def pool(self) -> WindowPool:
        """What the page cache has to know."""
        return WindowPool(self.window, self.pages_per_slab, self.n_slabs, self.n_window_slabs)


def are_mixed(windows: Sequence[int | None]) -> bool:
    """Returns whether some layers have windows, of one size, and others have none."""
    return len(set(windows)) == 2 and None in windows


def pages_per_slab(windows: Sequence[int | None]) -> int:
    """Returns how many pages of the layers without windows take the memory of one page of the others."""
    n_full = windows.count(None)
    return -(-(len(windows) - n_full) // n_full)


def slab_shape(
    page: PageShape, windows: tuple[int | None, ...], n_pages: int, *, max_row_tokens: int, max_model_len: int
) -> SlabShape | None:
    """Returns the slabs that take the memory of ``n_pages`` pages of all layers, and its page of padding.

    Args:
        page: of all layers.
        windows: of the layers, which are mixed.
        n_pages: pages that the pool would have.
        max_row_tokens: maximum tokens of a row.
        max_model_len: most positions of a sequence.

    Returns:
        None if so little memory would hold fewer tokens than without slabs, and not those of one whole sequence.
    """
    n_longest = -(-max_model_len // page.page_size)
    window = max(window for window in windows if window is not None)
    n_window_slabs = min(max_window_pages(window, max_row_tokens, page.page_size), n_longest)
    units = pages_per_slab(windows) * windows.count(None)
    n_slabs = n_pages * page.n_layers // units - n_window_slabs
    shape = SlabShape(page, windows, n_slabs, n_window_slabs)
    return shape if shape.n_pages >= min(n_pages, n_longest) and n_slabs > 0 else None


def open_slabs(
    page: PageShape, windows: tuple[int | None, ...], n_pages: int, settings: DeviceSettings
) -> SlabShape | None:
    """Returns the slabs of a new pool, and logs what they are.

    Args:
        page: of all layers.
        windows: of the layers.
        n_pages: pages of all layers that the pool would have.
        settings: all of the device.

    Returns:
        None if the pool has pages of all layers.
    """
    if not settings.has_window_pages:
        return None
    shape = slab_shape(
        page,
        windows,
        n_pages,
        max_row_tokens=settings.max_num_batched_tokens,
        max_model_len=settings.max_model_len,
    )
    if shape is None:
        logger.info(
            "%d pages are kept of all layers: the pool is too small to give back those behind windows of %d tokens",
            n_pages,
            max(window for window in windows if window is not None),
        )
        return None
    logger.info(
        "layers with windows of %d tokens have pages of their own: %d slabs of %d pages or one for windows and %d "
        "for windows only",
        shape.window,
        shape.n_slabs,
        shape.pages_per_slab,
        shape.n_window_slabs,
    )
    return shape


def empty_slabs(page: PageShape, windows: tuple[int | None, ...]) -> SlabShape:
    """Returns the shape of a pool without slabs but the one that stays zero, for steps that store nothing."""
    return SlabShape(page, windows, 0, 0)
