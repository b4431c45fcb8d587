"""The paged KV pool of the CPU device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from radixkv.runtime.device.memory.cpu.recurrent_states import RecurrentStates
from radixkv.runtime.device.memory.page_shape import PageLayout, PageShape
from radixkv.runtime.device.memory_check import check_allocation


class KVPart(NamedTuple):
    """[layers, pages + 1, kv_heads, page_size, head_dim] each, of the layers that have heads of one shape."""

    k: Tensor
    v: Tensor


class KVPool:
    """Paged K and V of all layers, zeroed at start so that memory use stays constant afterwards.

    A page has the same index in all parts. The last page is never allocated to a sequence: it stays zero and pads
    incomplete blocks of pages.

    Args:
        page: layout of a page.
        n_pages: pages for sequences.
        states: of recurrent layers; None: there are none.

    Raises:
        ConfigError: the pool does not fit into memory.
    """

    def __init__(self, page: PageLayout, n_pages: int, states: RecurrentStates | None = None) -> None:
        n_bytes = (n_pages + 1) * page.n_bytes
        with check_allocation(n_bytes, "a KV pool", "set kv_cache_memory_bytes or max_total_tokens lower"):
            self.parts = [KVPart(_zeros(shape, n_pages), _zeros(shape, n_pages)) for shape in page.parts]
        self.layers = [(self.parts[part].k[layer], self.parts[part].v[layer]) for part, layer in page.places]
        """K and V that each attention reads, [pages + 1, kv_heads, page_size, head_dim] each."""
        self.states = [] if states is None else states.layers
        """States of each recurrent layer."""
        self.n_pages = n_pages
        self.page_bytes = page.n_bytes
        """Bytes of a page."""

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
        """Index of the page that stays zero."""
        return self.n_pages

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies pages in all layers; all sources are read before any destination is written.

        Args:
            pairs: (source, destination) page indices.
        """
        sources, destinations = [source for source, _ in pairs], [destination for _, destination in pairs]
        for part in self.parts:
            for values in part:
                values[:, destinations] = values[:, sources]


def _zeros(shape: PageShape, n_pages: int) -> Tensor:
    sizes = (shape.n_layers, n_pages + 1, shape.n_kv_heads, shape.page_size, shape.head_dim)
    return torch.empty(sizes, dtype=shape.dtype).zero_()
