"""The paged KV pool on the GPU for a model whose layers with windows have pages of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from radixkv.runtime.device.memory.cuda.kv_pool import KVPart, copy_pages, layout_name
from radixkv.runtime.device.memory.slab_shape import SlabShape, StridedLayer
from radixkv.runtime.device.ops.base import LayerStates


class SlabParts(NamedTuple):
    """A ``CopiedPool`` whose pages are slabs."""

    parts: Sequence[KVPart]
    page_bytes: int
    """Bytes of a slab."""
    device: torch.device
    zero_page: int
    """The slab that stays zero."""


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
        self.k, self.v = (torch.zeros(shape.n_values, dtype=shape.page.dtype, device=device) for _ in range(2))
        self.layers = [(_pages(layer, self.k), _pages(layer, self.v)) for layer in shape.layers()]
        """K and V that each attention reads."""
        self.layout = f"{layout_name(shape.page)}; {shape}"
        """What a page and a window page consist of, as files of pages name them."""
        self.dtype = shape.page.dtype
        """Dtype of K and V."""
        self.n_pages = shape.n_pages
        """Pages of layers without windows that can be allocated."""
        self.zero_window_page = shape.n_slabs_in_memory - 1
        """The window page that stays zero."""
        self.zero_page = self.zero_window_page * shape.pages_per_slab
        """The first page of the slab that stays zero."""
        self.page_pitch = shape.pitch(has_window=False)
        """Tokens from the beginning of one page of a layer without a window to that of the next."""
        self.window_pitch = shape.pitch(has_window=True)
        """The same in layers with windows."""
        # The layers of a page are consecutive, so that it is copied in all of them at once.
        pages = [memory.view(-1, shape.page_values) for memory in (self.k, self.v)]
        window_pages = [
            memory.view(-1, shape.slab_values)[:, : shape.window_page_values] for memory in (self.k, self.v)
        ]
        self._pages, self._window_pages = (
            [values.view(torch.int64) for values in of_kind] for of_kind in (pages, window_pages)
        )
        self.page_bytes = 2 * shape.page_values * self.dtype.itemsize
        """Of a page of the layers without windows."""
        self._window_page_bytes = 2 * shape.window_page_values * self.dtype.itemsize
        self.device = self.k.device
        of_pages, of_slabs = (
            KVPart(*(memory.view(1, -1, n_values) for memory in (self.k, self.v)))
            for n_values in (shape.page_values, shape.slab_values)
        )
        self.parts = [of_pages]
        """All layers without windows as one, [1, pages, values] each of K and V."""
        self.slabs = SlabParts(
            [of_slabs], shape.pages_per_slab * self.page_bytes, self.device, self.zero_window_page
        )
        """Whole slabs, which are copied for window pages."""

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies pages (source, destination) in all layers without windows, on the current stream; no source is a
        destination."""
        copy_pages(self._pages, 0, pairs, self.page_bytes)

    def copy_windows(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies window pages, as ``copy``."""
        copy_pages(self._window_pages, 0, pairs, self._window_page_bytes)


def _pages(layer: StridedLayer, memory: Tensor) -> Tensor:
    shape = layer.shape
    return layer.view(memory, (shape.page_size, shape.n_kv_heads, shape.head_dim))
