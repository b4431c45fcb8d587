"""How the memory of a pool is divided among layers with and without windows."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from radixkv.runtime.device.device_settings import DeviceSettings
from radixkv.runtime.device.memory.page_shape import LayerPlace, PageLayout, PageShape
from radixkv.runtime.step.window_pool import WindowPool, max_window_pages

logger = logging.getLogger(__name__)


class StridedLayer(NamedTuple):
    """Where the pages of a layer are in the memory of K, and at the same places in that of V."""

    shape: PageShape
    """Of K and V of the layer; its number of layers does not count."""
    first: int
    """Values before the first page."""
    distance: int
    """Values from the beginning of one page to that of the next."""

    def view(self, memory: Tensor, sizes: tuple[int, int, int]) -> Tensor:
        """Returns the layer's pages, [pages, *sizes], as a view.

        Args:
            memory: [values], K or V of all slabs.
            sizes: of a page: its tokens, KV heads and head size, in the order of the device.
        """
        pages = memory.view(-1, self.distance)[:, self.first : self.first + math.prod(sizes)]
        return pages.view(len(pages), *sizes)


@dataclass(frozen=True)
class SlabShape:
    """The slabs of a pool: a slab has pages of the layers without windows, or one page of the layers with windows.

    K and V are in memories of their own, which are divided alike. Page ``p`` of the layers without windows begins
    at value ``p * page_values`` of each, and window page ``p`` at value ``p * slab_values``. In a page are the
    layers of its kind one after the other, so each layer's pages are at equal distances. A distance is a whole
    number of the layer's tokens, because kernels count in these.
    """

    page: PageLayout
    """Of all layers. Those with windows have K and V of one shape, and so have the others."""
    windows: tuple[int | None, ...]
    """[attentions]; there are two values, one of them None."""
    n_slabs: int
    """Slabs for pages of both kinds."""
    n_window_slabs: int
    """Further slabs, for window pages only: those that one request needs at once."""

    @property
    def window(self) -> int:
        """Positions that a token attends to in the layers with windows."""
        return max(window for window in self.windows if window is not None)

    @property
    def pages_per_slab(self) -> int:
        """Pages of layers without windows in a slab."""
        return pages_per_slab(self.page, self.windows)

    @property
    def page_values(self) -> int:
        """Values of K in a page of the layers without windows."""
        return self.page.page_size * _token_values(self.page, self.windows, has_window=False)

    @property
    def window_page_values(self) -> int:
        """Values of K in a window page."""
        return self.page.page_size * _token_values(self.page, self.windows, has_window=True)

    @property
    def slab_values(self) -> int:
        """Values of K in a slab; a window page may leave some of them unused."""
        return self.pages_per_slab * self.page_values

    @property
    def n_pages(self) -> int:
        """Pages of layers without windows, while no slab is a window page."""
        return self.n_slabs * self.pages_per_slab

    @property
    def n_slabs_in_memory(self) -> int:
        """All slabs, with one more that stays zero."""
        return self.n_slabs + self.n_window_slabs + 1

    @property
    def n_values(self) -> int:
        """Values of K in all slabs."""
        return self.n_slabs_in_memory * self.slab_values

    @property
    def n_bytes(self) -> int:
        """Bytes of K and V of all slabs."""
        return 2 * self.n_values * self.page.dtype.itemsize

    @property
    def n_window_layers(self) -> int:
        """Layers with windows that have K and V of their own."""
        return len(list(_layers(self.page, self.windows, has_window=True)))

    def pitch(self, *, has_window: bool) -> int:
        """Returns the tokens from the beginning of one page of a layer to that of the next."""
        _, shape = next(_layers(self.page, self.windows, has_window=has_window))
        return (self.slab_values if has_window else self.page_values) // shape.token_values

    def layers(self) -> list[StridedLayer]:
        """Returns where the K and V are that each attention reads."""
        found: dict[LayerPlace, StridedLayer] = {}
        for has_window, distance in ((False, self.page_values), (True, self.slab_values)):
            first = 0
            for place, shape in _layers(self.page, self.windows, has_window=has_window):
                found[place] = StridedLayer(shape, first, distance)
                first += shape.page_size * shape.token_values
        return [found[place] for place in self.page.places]

    def __str__(self) -> str:
        return f"{self.page}; {self.n_window_layers} layers with windows, {self.pages_per_slab} pages in a slab"

    @property
    def pool(self) -> WindowPool:
        """What the page cache has to know."""
        return WindowPool(self.window, self.pages_per_slab, self.n_slabs, self.n_window_slabs)


def are_mixed(windows: Sequence[int | None]) -> bool:
    """Returns whether some layers have windows, of one size, and others have none."""
    return len(set(windows)) == 2 and None in windows


def pages_per_slab(page: PageLayout, windows: Sequence[int | None]) -> int:
    """Returns how many pages of the layers without windows take the memory of one page of the others.

    That is rounded up to whole pages, and until a slab is a whole number of tokens of a layer with a window.
    """
    page_values = _token_values(page, windows, has_window=False)
    _, shape = next(_layers(page, windows, has_window=True))
    n_enough = -(-_token_values(page, windows, has_window=True) // page_values)
    multiple = shape.token_values // math.gcd(page_values, shape.token_values)
    return -(-n_enough // multiple) * multiple


def slab_shape(
    page: PageLayout, windows: tuple[int | None, ...], n_pages: int, *, max_row_tokens: int, max_model_len: int
) -> SlabShape | None:
    """Returns the slabs that take the memory of ``n_pages`` pages of all layers, and its page of padding.

    Args:
        page: of all layers.
        windows: of the attentions, which are mixed.
        n_pages: pages that the pool would have.
        max_row_tokens: maximum tokens of a row.
        max_model_len: most positions of a sequence.

    Returns:
        None if so little memory would hold fewer tokens than without slabs, and not those of one whole sequence; or
        if even the longest sequence takes no less memory, because it is hardly longer than the window, and slabs
        leave some of theirs unused.
    """
    n_longest = -(-max_model_len // page.page_size)
    window = max(window for window in windows if window is not None)
    n_window_slabs = min(max_window_pages(window, max_row_tokens, page.page_size), n_longest)
    shape = SlabShape(page, windows, 0, n_window_slabs)
    all_values = shape.page_values + shape.window_page_values
    n_slabs = (n_pages + 1) * all_values // shape.slab_values - 1 - n_window_slabs
    shape = SlabShape(page, windows, n_slabs, n_window_slabs)
    n_windows = min(n_longest, max_window_pages(window, 1, page.page_size))
    if n_longest * shape.window_page_values <= n_windows * shape.slab_values:
        return None
    return shape if shape.n_pages >= min(n_pages, n_longest) and n_slabs > 0 else None


def open_slabs(
    page: PageLayout, windows: tuple[int | None, ...], n_pages: int, settings: DeviceSettings
) -> SlabShape | None:
    """Returns the slabs of a new pool, and logs what they are.

    Args:
        page: of all layers.
        windows: of the attentions.
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
            "%d pages are kept of all layers: the pool is too small, or sequences too short, to give back those "
            "behind windows of %d tokens",
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


def empty_slabs(page: PageLayout, windows: tuple[int | None, ...]) -> SlabShape:
    """Returns the shape of a pool without slabs but the one that stays zero, for steps that store nothing."""
    return SlabShape(page, windows, 0, 0)


def _layers(
    page: PageLayout, windows: Sequence[int | None], *, has_window: bool
) -> Iterator[tuple[LayerPlace, PageShape]]:
    """Yields the layers of one kind that have K and V of their own, each once."""
    for place, window in dict(zip(page.places, windows, strict=True)).items():
        if (window is not None) == has_window:
            yield place, page.parts[place.part]


def _token_values(page: PageLayout, windows: Sequence[int | None], *, has_window: bool) -> int:
    """Returns the values of K of a token in all layers of one kind."""
    return sum(shape.token_values for _, shape in _layers(page, windows, has_window=has_window))
