"""The paged KV pool on the GPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from radixkv.runtime.device.memory.cuda.array_copies import to_device
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
        self.page = page
        """Shape of a page."""
        self.page_pitch = page.page_size
        """Tokens from the beginning of one page of a layer to that of the next."""
        self.page_bytes = page.n_bytes

    @property
    def zero_page(self) -> int:
        """The page that stays zero."""
        return self.n_pages

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies pages (source, destination) in all layers, on the current stream; no source is a destination."""
        copy_pages(self._words, 1, pairs, self.page_bytes)


def copy_pages(caches: Sequence[Tensor], dim: int, pairs: Sequence[tuple[int, int]], page_bytes: int) -> None:
    """Copies pages (source, destination) on the current stream; no source is a destination.

    Args:
        caches: K and V as words of 8 bytes.
        dim: their dimension that counts pages.
        pairs: of pages.
        page_bytes: of K and V together.
    """
    n_at_once = max(1, COPIED_AT_ONCE_BYTES // (page_bytes // 2))
    for first in range(0, len(pairs), n_at_once):
        indices = np.array(pairs[first : first + n_at_once], np.int64).T
        sources, destinations = to_device(indices, caches[0].device)
        for cache in caches:
            cache.index_copy_(dim, destinations, cache.index_select(dim, sources))
