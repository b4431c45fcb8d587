"""The paged KV pool on the GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from radixkv.runtime.device.memory.cuda.recurrent_states import CudaStates
from radixkv.runtime.device.memory.page_shape import PageShape

COPIED_AT_ONCE_BYTES = 64 << 20
"""Bytes of K or V per chunk of a page copy, which bounds the temporary memory."""


class CudaPool:
    """Paged K and V of all layers.

    ``k`` and ``v`` are [layers, pages + 1, page_size, kv_heads, head_dim]. The last page stays zero and is never
    allocated: padding rows read it.

    Args:
        page: shape and dtype of one page.
        n_pages: pages that can be allocated.
        device: where the pool is allocated.
        states: of gated delta nets; None: there are none.
    """

    def __init__(
        self, page: PageShape, n_pages: int, device: torch.device, states: CudaStates | None = None
    ) -> None:
        shape = (page.n_layers, n_pages + 1, page.page_size, page.n_kv_heads, page.head_dim)
        self.k = torch.zeros(shape, dtype=page.dtype, device=device)
        self.v = torch.zeros(shape, dtype=page.dtype, device=device)
        self.layers = list(zip(self.k, self.v, strict=True))
        """K and V of each layer, [pages + 1, page_size, kv_heads, head_dim] each."""
        self.states = [] if states is None else states.layers
        """States of each gated delta net."""
        # Copied as words: torch indexes no 8-bit floats. Head sizes on CUDA are multiples of 64 bytes and more.
        self._words = [cache.view(torch.int64) for cache in (self.k, self.v)]
        self.n_pages = n_pages
        self._n_copied_at_once = max(1, COPIED_AT_ONCE_BYTES // (page.n_bytes // 2))
        self.page_bytes = page.n_bytes

    @property
    def zero_page(self) -> int:
        """The page that stays zero."""
        return self.n_pages

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies pages (source, destination) in all layers, on the current stream; no source is a destination."""
        for first in range(0, len(pairs), self._n_copied_at_once):
            chunk = pairs[first : first + self._n_copied_at_once]
            indices = torch.tensor(chunk, dtype=torch.int64, pin_memory=True).t()
            sources, destinations = indices.to(self.k.device, non_blocking=True)
            for cache in self._words:
                cache.index_copy_(1, destinations, cache.index_select(1, sources))
