"""The paged KV pool on the GPU for a model whose layers with windows have pages of their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from radixkv.runtime.device.memory.cuda.kv_pool import copy_pages, layout_name
from radixkv.runtime.device.memory.page_shape import PageLayout
from radixkv.runtime.device.memory.slab_shape import SlabShape
from radixkv.runtime.device.ops.base import LayerStates


class CudaSlabPool:
    """Paged K and V of all layers in slabs.

    ``layers`` are views, [pages, page_size, kv_heads, head_dim], whose pages are as far from each other as
    ``SlabShape`` says: kernels take that distance. The last slab stays zero and is never allocated: padding rows
    read its pages.

    Args:
        shape: of the slabs; there may be none but the last.
        device: where the pool is allocated.
    """

    states: Sequence[LayerStates] = ()

    def __init__(self, shape: SlabShape, device: torch.device) -> None:
        page, n_slabs = shape.page, shape.n_units // shape.units_per_slab
        units = (shape.n_units, page.page_size, page.n_kv_heads, page.head_dim)
        self.k = torch.zeros(units, dtype=page.dtype, device=device)
        self.v = torch.zeros(units, dtype=page.dtype, device=device)
        self.layers = list(zip(shape.layer_views(self.k), shape.layer_views(self.v), strict=True))
        """K and V of each layer."""
        self.layout = layout_name(PageLayout.uniform(page))
        """K and V of a page's tokens in all layers, as files of pages name them."""
        self.dtype = page.dtype
        """Dtype of K and V."""
        self.n_pages = shape.n_pages
        """Pages of layers without windows that can be allocated."""
        self.zero_page = (n_slabs - 1) * shape.pages_per_slab
        """The first page of the slab that stays zero."""
        self.zero_window_page = n_slabs - 1
        """The window page that stays zero."""
        self.page_pitch = shape.n_full * page.page_size
        """Tokens from the beginning of one page of a layer without a window to that of the next."""
        self.window_pitch = shape.units_per_slab * page.page_size
        """The same in layers with windows."""
        n_windows = page.n_layers - shape.n_full
        # The units of a page are consecutive, so that it is copied in all layers at once.
        words = [cache.view(torch.int64) for cache in (self.k, self.v)]
        self._pages = [cache.view(n_slabs * shape.pages_per_slab, -1) for cache in words]
        self._window_pages: list[Tensor] = [
            cache.view(n_slabs, shape.units_per_slab, -1)[:, :n_windows] for cache in words
        ]
        self._page_bytes = page.n_bytes // page.n_layers * shape.n_full
        self._window_page_bytes = page.n_bytes // page.n_layers * n_windows

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies pages (source, destination) in all layers without windows, on the current stream; no source is a
        destination."""
        copy_pages(self._pages, 0, pairs, self._page_bytes)

    def copy_windows(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies window pages, as ``copy``."""
        copy_pages(self._window_pages, 0, pairs, self._window_page_bytes)
