"""The paged KV pool of the CPU device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from radixkv.errors import ConfigError
from radixkv.runtime.device.memory_check import check_allocation


@dataclass(frozen=True)
class PageShape:
    """Shape of one page across all layers, K and V each."""

    n_layers: int
    n_kv_heads: int
    page_size: int
    """Tokens per page."""
    head_dim: int
    dtype: torch.dtype = torch.float32
    """Of K and V as they are stored."""

    @property
    def n_bytes(self) -> int:
        """Size of a page in bytes, K and V together."""
        return 2 * self.n_layers * self.n_kv_heads * self.page_size * self.head_dim * self.dtype.itemsize


class KVPool:
    """Paged K and V of all layers, zeroed at start so that memory use stays constant afterwards.

    ``k`` and ``v`` are [layers, pages + 1, kv_heads, page_size, head_dim]. The last page is never allocated to a
    sequence: it stays zero and pads incomplete blocks of pages.

    Raises:
        ConfigError: the pool does not fit into memory.
    """

    def __init__(self, page: PageShape, n_pages: int) -> None:
        shape = (page.n_layers, n_pages + 1, page.n_kv_heads, page.page_size, page.head_dim)
        n_bytes = (n_pages + 1) * page.n_bytes
        with check_allocation(n_bytes, "a KV pool", "set kv_cache_memory_bytes or max_total_tokens lower"):
            self.k = torch.empty(shape, dtype=page.dtype).zero_()
            self.v = torch.empty(shape, dtype=page.dtype).zero_()
        self.layers = list(zip(self.k, self.v, strict=True))
        """K and V of each layer, [pages + 1, kv_heads, page_size, head_dim] each."""
        self.n_pages = n_pages

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

    def poison(self, page: int) -> None:
        """Fills a page with NaN in all layers, so that reads of unwritten positions become visible in tests."""
        if not 0 <= page < self.n_pages:
            raise IndexError(f"page {page} is not between 0 and {self.n_pages - 1}")
        self.k[:, page] = math.nan
        self.v[:, page] = math.nan


def count_pages(page: PageShape, memory_bytes: int, max_total_tokens: int | None) -> int:
    """Returns the number of pages that fit into ``max_total_tokens``, or into ``memory_bytes`` if that is None.

    Raises:
        ConfigError: not even one page fits.
    """
    page_size = page.page_size
    if max_total_tokens is not None:
        if max_total_tokens < page_size:
            raise ConfigError(
                f"max_total_tokens {max_total_tokens} is less than one page of {page_size} tokens; "
                f"set it to at least {page_size}, or page_size to at most {max_total_tokens}"
            )
        return max_total_tokens // page_size
    if memory_bytes < page.n_bytes:
        raise ConfigError(
            f"kv_cache_memory_bytes {memory_bytes} is less than one page, which takes {page.n_bytes}; "
            f"set it to at least {page.n_bytes}, or page_size {page_size} lower"
        )
    return memory_bytes // page.n_bytes
