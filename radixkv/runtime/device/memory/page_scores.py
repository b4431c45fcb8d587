"""Scores of pages, by which PagedEviction decides what an answer goes on without."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from radixkv.runtime.device.kv_dtype import LayerScales
from radixkv.runtime.device.memory.page_shape import PageLayout

_AT_ONCE_BYTES = 16 << 20
"""Most bytes of K that are gathered at once. The temporary memory is six times as much at most."""


class PageScores:
    """Computes the mean of |V| / |K| of pages, with the Euclidean norms of a head's vectors of one token.

    The mean is over the tokens of a page, the heads of a layer, and the layers. Rotary embeddings change no norm.
    See docs/decisions/0088-paged-eviction.md.

    Args:
        parts: K and V of the pool, [layers, pages, ..., head_dim] each, of the layers with heads of one shape.
        page: layout of a page.
        kv_scales: [attentions], of a quantized pool; None: all are 1.
    """

    def __init__(
        self,
        parts: Sequence[tuple[Tensor, Tensor]],
        page: PageLayout,
        kv_scales: Sequence[LayerScales] | None = None,
    ) -> None:
        self._parts = parts
        self._n_layers = sum(shape.n_layers for shape in page.parts)
        factors = [torch.ones(shape.n_layers, 1) for shape in page.parts]
        for place, scales in zip(page.places, kv_scales or (), strict=kv_scales is not None):
            factors[place.part][place.layer] = scales.v / scales.k
        self._factors = [of_part.to(k.device) for of_part, (k, _) in zip(factors, parts, strict=True)]

    def of(self, pages: Tensor) -> Tensor:
        """Returns the scores of pages, on their device: [n] int64 -> [n] float32. A GPU only gets work enqueued."""
        n_bytes = max(k[:, 0].nbytes for k, _ in self._parts)
        return torch.cat([self._of_chunk(chunk) for chunk in pages.split(max(1, _AT_ONCE_BYTES // n_bytes))])

    def _of_chunk(self, pages: Tensor) -> Tensor:
        total = torch.zeros(len(pages), device=pages.device)
        for (k, v), factors in zip(self._parts, self._factors, strict=True):
            ratios = _norms(v, pages) / _norms(k, pages).clamp_min(torch.finfo(torch.float32).tiny)
            total += (ratios.flatten(2).mean(2) * factors).sum(0)
        return total / self._n_layers


def _norms(values: Tensor, pages: Tensor) -> Tensor:
    """Returns the norms of vectors of pages: [layers, all pages, ..., head_dim] -> [layers, pages, ...] float32."""
    if values.dtype.itemsize > 1:
        chosen = values.index_select(1, pages)
    else:  # torch indexes no 8-bit floats
        chosen = values.view(torch.uint8).index_select(1, pages).view(values.dtype).float()
    norms: Tensor = torch.linalg.vector_norm(chosen, dim=-1, dtype=torch.float32)
    return norms
