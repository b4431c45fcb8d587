"""The paged KV pool of the CPU device for a model whose layers with windows have pages of their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from radixkv.runtime.device.memory.cpu.kv_pool import KVPart
from radixkv.runtime.device.memory.slab_shape import SlabShape, StridedLayer
from radixkv.runtime.device.memory_check import check_allocation
from radixkv.runtime.device.ops.base import LayerStates


class SlabPool:
    """Paged K and V of all layers in slabs, zeroed at start so that memory use stays constant afterwards.

    ``layers`` are views, [pages, kv_heads, page_size, head_dim], whose pages are as far from each other as
    ``SlabShape`` says. The last page of each layer, in a slab of its own, stays zero.

    Args:
        shape: of the slabs.

    Raises:
        ConfigError: the pool does not fit into memory.
    """

    states: Sequence[LayerStates] = ()

    def __init__(self, shape: SlabShape) -> None:
        with check_allocation(shape.n_bytes, "a KV pool", "set kv_cache_memory_bytes or max_total_tokens lower"):
            self.k, self.v = (torch.empty(shape.n_values, dtype=shape.page.dtype).zero_() for _ in range(2))
        self.layers = [(_pages(layer, self.k), _pages(layer, self.v)) for layer in shape.layers()]
        """K and V that each attention reads."""
        self._pages = [memory.view(-1, shape.page_values) for memory in (self.k, self.v)]
        self._window_pages = [
            memory.view(-1, shape.slab_values)[:, : shape.window_page_values] for memory in (self.k, self.v)
        ]
        self.parts = [KVPart(*(pages[None] for pages in self._pages))]
        """All layers without windows as one, [1, pages, values] each of K and V."""
        self.windows = KVPart(*(pages[None] for pages in self._window_pages))
        """The same of the layers with windows, by window page."""

    def copy_windows(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies window pages in all layers with windows.

        Args:
            pairs: (source, destination) window pages.
        """
        _copy(self._window_pages, pairs)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies pages in all layers without windows; all sources are read before any destination is written.

        Args:
            pairs: (source, destination) page indices.
        """
        _copy(self._pages, pairs)


def _pages(layer: StridedLayer, memory: Tensor) -> Tensor:
    shape = layer.shape
    return layer.view(memory, (shape.n_kv_heads, shape.page_size, shape.head_dim))


def _copy(memories: Sequence[Tensor], pairs: Sequence[tuple[int, int]]) -> None:
    sources, destinations = [source for source, _ in pairs], [destination for _, destination in pairs]
    for pages in memories:
        pages[destinations] = pages[sources]
