"""The paged KV pool on the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from radixkv.runtime.device.memory.cuda.array_copies import to_device
from radixkv.runtime.device.memory.cuda.recurrent_states import CudaStates
from radixkv.runtime.device.memory.page_shape import PageLayout, PageShape

COPIED_AT_ONCE_BYTES = 64 << 20
"""Bytes of K or V per chunk of a page copy, which bounds the temporary memory."""


class KVPart(NamedTuple):
    """[layers, pages + 1, page_size, kv_heads, head_dim] each, of the layers that have heads of one shape."""

    k: Tensor
    v: Tensor


class CopiedPool(Protocol):
    """Pages of one size, which are copied between a pool and host slots."""

    @property
    def parts(self) -> Sequence[KVPart]:
        """K and V of all layers; a page has the same index in all parts."""
        ...

    @property
    def page_bytes(self) -> int:
        """Size of a page in bytes, K and V of all parts together."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the pages are."""
        ...

    @property
    def zero_page(self) -> int:
        """The page that stays zero."""
        ...


class CudaPool:
    """Paged K and V of all layers.

    A page has the same index in all parts. The last page stays zero and is never allocated: padding rows read it.

    Args:
        page: layout and dtype of one page.
        n_pages: pages that can be allocated.
        device: where the pool is allocated.
        states: of recurrent layers; None: there are none.
    """

    def __init__(
        self, page: PageLayout, n_pages: int, device: torch.device, states: CudaStates | None = None
    ) -> None:
        self.parts = [KVPart(*(_zeros(shape, n_pages, device) for _ in range(2))) for shape in page.parts]
        self.layers = [(self.parts[part].k[layer], self.parts[part].v[layer]) for part, layer in page.places]
        """K and V that each attention reads, [pages + 1, page_size, kv_heads, head_dim] each."""
        self.states = [] if states is None else states.layers
        """States of each recurrent layer."""
        # Copied as words: torch indexes no 8-bit floats. Head sizes on CUDA are multiples of 64 bytes and more.
        self._words = [cache.view(torch.int64) for part in self.parts for cache in part]
        self.n_pages = n_pages
        self.device = self.parts[0].k.device
        self.dtype = page.dtype
        """Dtype of K and V."""
        self.layout = layout_name(page)
        """What a page consists of, as files of pages name it."""
        self.page_pitch = page.page_size
        """Tokens from the beginning of one page of a layer to that of the next."""
        self._largest_part_bytes = max(part.n_bytes for part in page.parts)
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
    def zero_page(self) -> int:
        """The page that stays zero."""
        return self.n_pages

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies pages (source, destination) in all layers, on the current stream; no source is a destination."""
        copy_pages(self._words, 1, pairs, self._largest_part_bytes)


def layout_name(page: PageLayout) -> str:
    """Returns what a page consists of, as files of pages name it."""
    parts = "; ".join(
        f"{part.n_layers} layers, {part.page_size} tokens, {part.n_kv_heads} kv_heads, {part.head_dim} head_dim"
        for part in page.parts
    )
    return f"k v, {parts}"


def _zeros(shape: PageShape, n_pages: int, device: torch.device) -> Tensor:
    sizes = (shape.n_layers, n_pages + 1, shape.page_size, shape.n_kv_heads, shape.head_dim)
    return torch.zeros(sizes, dtype=shape.dtype, device=device)


def copy_pages(caches: Sequence[Tensor], dim: int, pairs: Sequence[tuple[int, int]], page_bytes: int) -> None:
    """Copies pages (source, destination) on the current stream; no source is a destination.

    Args:
        caches: K and V as words of 8 bytes.
        dim: their dimension that counts pages.
        pairs: of pages.
        page_bytes: of K and V together, of the largest cache.
    """
    n_at_once = max(1, COPIED_AT_ONCE_BYTES // (page_bytes // 2))
    for first in range(0, len(pairs), n_at_once):
        indices = np.array(pairs[first : first + n_at_once], np.int64).T
        sources, destinations = to_device(indices, caches[0].device)
        for cache in caches:
            cache.index_copy_(dim, destinations, cache.index_select(dim, sources))
