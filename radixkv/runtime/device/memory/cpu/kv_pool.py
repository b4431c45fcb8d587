"""The paged KV pool of the CPU device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from radixkv.runtime.device.memory.cpu.recurrent_states import RecurrentStates
from radixkv.runtime.device.memory.page_shape import PageShape
from radixkv.runtime.device.memory_check import check_allocation


class KVPool:
    """Paged K and V of all layers, zeroed at start so that memory use stays constant afterwards.

    ``k`` and ``v`` are [layers, pages + 1, kv_heads, page_size, head_dim]. The last page is never allocated to a
    sequence: it stays zero and pads incomplete blocks of pages.

    Args:
        page: shape of a page.
        n_pages: pages for sequences.
        states: of gated delta nets; None: there are none.

    Raises:
        ConfigError: the pool does not fit into memory.
    """

    def __init__(self, page: PageShape, n_pages: int, states: RecurrentStates | None = None) -> None:
        shape = (page.n_layers, n_pages + 1, page.n_kv_heads, page.page_size, page.head_dim)
        n_bytes = (n_pages + 1) * page.n_bytes
        with check_allocation(n_bytes, "a KV pool", "set kv_cache_memory_bytes or max_total_tokens lower"):
            self.k = torch.empty(shape, dtype=page.dtype).zero_()
            self.v = torch.empty(shape, dtype=page.dtype).zero_()
        self.layers = list(zip(self.k, self.v, strict=True))
        """K and V of each layer, [pages + 1, kv_heads, page_size, head_dim] each."""
        self.states = [] if states is None else states.layers
        """States of each gated delta net."""
        self.n_pages = n_pages
        self.page_bytes = page.n_bytes
        """Bytes of a page."""

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
        self.k[:, destinations] = self.k[:, sources]
        self.v[:, destinations] = self.v[:, sources]
