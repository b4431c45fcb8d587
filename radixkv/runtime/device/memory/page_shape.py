"""The shape of one page of KV on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from radixkv.errors import ConfigError
from radixkv.runtime.device.model_config.config import DecoderConfig


class SizedPage(Protocol):
    """What a page takes of a pool."""

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        ...

    @property
    def n_bytes(self) -> int:
        """Size in bytes, K and V of all layers together."""
        ...


@dataclass(frozen=True)
class PageShape:
    """Shape of one page across layers that have the same heads, K and V each."""

    n_layers: int
    n_kv_heads: int
    page_size: int
    """Tokens per page."""
    head_dim: int
    dtype: torch.dtype = torch.float32
    """Type of K and V as stored."""

    @property
    def token_values(self) -> int:
        """Values of K of one token in one layer, and as many of V."""
        return self.n_kv_heads * self.head_dim

    @property
    def n_bytes(self) -> int:
        """Size of a page in bytes, K and V together."""
        return 2 * self.n_layers * self.page_size * self.token_values * self.dtype.itemsize

    def __str__(self) -> str:
        return (
            f"{self.n_layers} layers, {self.n_kv_heads} kv_heads, {self.page_size} tokens, {self.head_dim} head_dim"
        )


class LayerPlace(NamedTuple):
    """Where the K and V are that a layer reads."""

    part: int
    """Index of the part of a page."""
    layer: int
    """Index of the layer within the part."""


@dataclass(frozen=True)
class PageLayout:
    """One page in parts, each of the layers that have heads of one shape."""

    parts: tuple[PageShape, ...]
    places: tuple[LayerPlace, ...]
    """[attentions]; several may read the same K and V."""

    @classmethod
    def of(cls, config: DecoderConfig, page_size: int, dtype: torch.dtype) -> PageLayout:
        """Returns the layout for a model."""
        shapes: dict[tuple[int, int], list[int]] = {}
        for layer in config.stored_layers:
            heads = config.heads[layer]
            shapes.setdefault((heads.n_kv_heads, heads.head_dim), []).append(layer)
        found = {
            layer: LayerPlace(part, index)
            for part, layers in enumerate(shapes.values())
            for index, layer in enumerate(layers)
        }
        sources = ((layer, config.heads[layer].source) for layer in config.attention_layers)
        return cls(
            parts=tuple(
                PageShape(len(layers), n_kv_heads, page_size, head_dim, dtype)
                for (n_kv_heads, head_dim), layers in shapes.items()
            ),
            places=tuple(found[layer if source is None else source] for layer, source in sources),
        )

    @classmethod
    def uniform(cls, page: PageShape) -> PageLayout:
        """Returns the layout of layers that all have K and V of the same shape."""
        return cls((page,), tuple(LayerPlace(0, layer) for layer in range(page.n_layers)))

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.parts[0].page_size

    @property
    def dtype(self) -> torch.dtype:
        """Type of K and V as stored."""
        return self.parts[0].dtype

    @property
    def n_bytes(self) -> int:
        """Size of a page in bytes, K and V of all parts together."""
        return sum(part.n_bytes for part in self.parts)

    def __str__(self) -> str:
        return "; ".join(map(str, self.parts))


def count_pages(page: SizedPage, memory_bytes: int, max_total_tokens: int | None) -> int:
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
