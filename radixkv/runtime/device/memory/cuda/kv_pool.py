"""The paged KV pool on the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from radixkv.runtime.device.memory.cuda.recurrent_states import CudaStates
from radixkv.runtime.device.memory.page_shape import PageLayout, PageShape

COPIED_AT_ONCE_BYTES = 64 << 20
"""Bytes of K or V per chunk of a page copy, which bounds the temporary memory."""


class KVPart(NamedTuple):
    """[layers, pages + 1, page_size, kv_heads, head_dim] each, of the layers that have heads of one shape."""

    k: Tensor
    v: Tensor


class CudaPool:
    """Paged K and V of all layers.

    A page has the same index in all parts. The last page stays zero and is never allocated: padding rows read it.

    Args:
        page: layout and dtype of one page.
        n_pages: pages that can be allocated.
        device: where the pool is allocated.
        states: of gated delta nets; None: there are none.
    """

    def __init__(
        self, page: PageLayout, n_pages: int, device: torch.device, states: CudaStates | None = None
    ) -> None:
        self.parts = [KVPart(*(_zeros(shape, n_pages, device) for _ in range(2))) for shape in page.parts]
        self.layers = [(self.parts[part].k[layer], self.parts[part].v[layer]) for part, layer in page.places]
        """K and V that each attention reads, [pages + 1, page_size, kv_heads, head_dim] each."""
        self.states = [] if states is None else states.layers
        """States of each gated delta net."""
        # Copied as words: torch indexes no 8-bit floats. Head sizes on CUDA are multiples of 64 bytes and more.
        self._words = [cache.view(torch.int64) for part in self.parts for cache in part]
        self.n_pages = n_pages
        self.device = self.parts[0].k.device
        self.dtype = page.dtype
        """Dtype of K and V."""
        largest = max(part.n_bytes for part in page.parts)
        self._n_copied_at_once = max(1, COPIED_AT_ONCE_BYTES // (largest // 2))
        self.page_bytes = page.n_bytes

    @property
    def k(self) -> Tensor:
        """K of all layers, where these have heads of one shape."""
        (part,) = self.parts
        return part.k

    @property
    def v(self) -> Tensor:
        """V of all layers, where these have heads of one shape."""
        (part,) = self.parts
        return part.v

    @property
    def layout(self) -> str:
        """What a page consists of, as files of pages name it."""
        shapes = (part.k.shape for part in self.parts)
        parts = "; ".join(
            f"{n_layers} layers, {page_size} tokens, {n_kv_heads} kv_heads, {head_dim} head_dim"
            for n_layers, _, page_size, n_kv_heads, head_dim in shapes
        )
        return f"k v, {parts}"

    @property
    def zero_page(self) -> int:
        """The page that stays zero."""
        return self.n_pages

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies pages (source, destination) in all layers, on the current stream; no source is a destination."""
        for first in range(0, len(pairs), self._n_copied_at_once):
            chunk = pairs[first : first + self._n_copied_at_once]
            indices = torch.tensor(chunk, dtype=torch.int64, pin_memory=True).t()
            sources, destinations = indices.to(self.device, non_blocking=True)
            for cache in self._words:
                cache.index_copy_(1, destinations, cache.index_select(1, sources))


def _zeros(shape: PageShape, n_pages: int, device: torch.device) -> Tensor:
    sizes = (shape.n_layers, n_pages + 1, shape.page_size, shape.n_kv_heads, shape.head_dim)
    return torch.zeros(sizes, dtype=shape.dtype, device=device)
