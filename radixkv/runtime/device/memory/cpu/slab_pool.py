"""The paged KV pool of the CPU device for a model whose layers with windows have pages of their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from radixkv.runtime.device.memory.slab_shape import SlabShape
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
        page = shape.page
        units = (shape.n_units, page.n_kv_heads, page.page_size, page.head_dim)
        n_bytes = shape.n_units * page.n_bytes // page.n_layers
        with check_allocation(n_bytes, "a KV pool", "set kv_cache_memory_bytes or max_total_tokens lower"):
            self.k = torch.empty(units, dtype=page.dtype).zero_()
            self.v = torch.empty(units, dtype=page.dtype).zero_()
        self.layers: list[tuple[Tensor, Tensor]] = list(
            zip(shape.layer_views(self.k), shape.layer_views(self.v), strict=True)
        )
        """K and V of each layer."""
        self._shape = shape

    def copy_windows(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies window pages in all layers with windows.

        Args:
            pairs: (source, destination) window pages.
        """
        self._copy(pairs, is_window=True)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies pages in all layers without windows; all sources are read before any destination is written.

        Args:
            pairs: (source, destination) page indices.
        """
        self._copy(pairs, is_window=False)

    def _copy(self, pairs: Sequence[tuple[int, int]], *, is_window: bool) -> None:
        sources, destinations = [source for source, _ in pairs], [destination for _, destination in pairs]
        for window, layer in zip(self._shape.windows, self.layers, strict=True):
            if (window is not None) == is_window:
                for cache in layer:
                    cache[destinations] = cache[sources]
