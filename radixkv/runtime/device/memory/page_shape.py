"""The shape of one page of KV on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from radixkv.errors import ConfigError
from radixkv.runtime.device.model_config.config import DecoderConfig


@dataclass(frozen=True)
class PageShape:
    """Shape of one page across all layers, K and V each."""

    n_layers: int
    n_kv_heads: int
    page_size: int
    """Tokens per page."""
    head_dim: int
    dtype: torch.dtype = torch.float32
    """Type of K and V as stored."""

    @classmethod
    def of(cls, config: DecoderConfig, page_size: int, dtype: torch.dtype) -> PageShape:
        """Returns the shape for a model."""
        return cls(len(config.attention_layers), config.n_kv_heads, page_size, config.head_dim, dtype)

    @property
    def n_bytes(self) -> int:
        """Size of a page in bytes, K and V together."""
        return 2 * self.n_layers * self.n_kv_heads * self.page_size * self.head_dim * self.dtype.itemsize


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
