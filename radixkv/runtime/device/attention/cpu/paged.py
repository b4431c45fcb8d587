"""Attention over the paged KV pool on the CPU, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from radixkv.runtime.device.attention.cpu.base import LayerPages, RowSpan
from radixkv.runtime.device.attention.cpu.block_softmax import BlockLayout, LayerKV, batched_matmul, blocks_of_row
from radixkv.runtime.device.attention.cpu.row_products import LongRow, ShortRows
from radixkv.runtime.device.kv_dtype import UNSCALED, LayerScales
from radixkv.runtime.device.ops.cpu.agreeing_tiles import agreeing_tiles

_MIN_PRODUCT_ROWS = 8
"""Minimum rows (tokens * query heads per key-value head) of a matrix product."""
_MAX_PRODUCT_ROWS = 256
"""Maximum rows of a matrix product."""
_MAX_SHORT_TOKENS = 32
"""Maximum tokens of a short row: one with drafts shares blocks with others, as one without them does."""
_MAX_SCORES = 1 << 21
"""Maximum scores of one tile of a long row, so that they take a bounded amount of memory."""
_MAX_GATHERED_VALUES = 1 << 23
"""Maximum values of K copied for one group of short rows."""


class PagedAttention:
    """Causal attention over the paged KV pool, computed in float32 and batch-invariant.

    Cost per layer: a group of short rows copies each block once, however many of its rows read it. A long row
    copies each of its blocks once.
    """

    def __init__(
        self,
        pool: LayerPages,
        *,
        n_heads: int,
        windows: Sequence[int | None],
        scale: float,
        sinks: Sequence[Tensor | None],
        kv_scales: Sequence[LayerScales] | None = None,
        block_tokens: int = 256,
    ) -> None:
        """Determines which tile sizes give bit-equal products on this machine.

        Args:
            pool: the pool to read, for its shapes. The last page of each layer stays zero.
            n_heads: number of query heads.
            windows: [layers], sliding window in positions, the token's own included; None for full attention.
            scale: multiplier of the scores.
            sinks: [layers] of [heads], a score of each head that takes part in the softmax and has no value.
            kv_scales: [layers], of a pool with a quantized dtype; None: all are 1.
            block_tokens: positions per partial sum, rounded down to whole pages, at least one page.
        """
        self._layouts = []
        for (k, _), window in zip(pool.layers, windows, strict=True):
            n_pages, n_kv_heads, page_size, head_dim = k.shape
            self._layouts.append(
                BlockLayout(
                    n_heads=n_heads,
                    n_kv_heads=n_kv_heads,
                    head_dim=head_dim,
                    page_size=page_size,
                    block_tokens=max(1, block_tokens // page_size) * page_size,
                    zero_page=n_pages - 1,
                    heads_per_page=k.stride(0) // (page_size * head_dim),
                    window=window,
                )
            )
        """[layers]."""
        self._tiles = {kind: _token_tiles(kind) for kind in {_kind(layout) for layout in self._layouts}}
        self._scale = scale
        self._kv_scales = kv_scales or [UNSCALED] * len(self._layouts)
        self._sinks = [None if sink is None else sink.float() for sink in sinks]
        self._parts: dict[BlockLayout, list[LongRow | ShortRows]] = {}
        self._workspace = (torch.empty(0), torch.empty(0))

    def plan(self, spans: Sequence[RowSpan], window_spans: Sequence[RowSpan] | None = None) -> None:
        """Partitions a step into matrix products, once for each kind of layer. O(rows * blocks)."""
        if window_spans is None:
            window_spans = spans
        self._parts = {
            layout: self._partition(spans if layout.window is None else window_spans, layout)
            for layout in set(self._layouts)
        }
        n_values = max(part.n_gathered for parts in self._parts.values() for part in parts)
        if n_values > len(self._workspace[0]):
            self._workspace = (torch.empty(n_values), torch.empty(n_values))

    def run(self, layer: int, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
        """See ``LayerAttention.run``."""
        scales = self._kv_scales[layer]
        scaled = q.float() * (self._scale * scales.k)
        attended = out if out.dtype == torch.float32 else torch.empty_like(scaled)
        kv = LayerKV(k_cache, v_cache, self._sinks[layer])
        for part in self._parts[self._layouts[layer]]:
            part.run(kv, scaled, attended, self._workspace)
        if scales.v != 1.0:
            attended.mul_(scales.v)
        if attended is not out:
            out.copy_(attended)

    def _partition(self, spans: Sequence[RowSpan], layout: BlockLayout) -> list[LongRow | ShortRows]:
        tiles = self._tiles[_kind(layout)]
        parts: list[LongRow | ShortRows] = []
        short: list[RowSpan] = []
        for span in spans:
            if span.n_tokens <= _MAX_SHORT_TOKENS:
                short.append(span)
            else:
                parts.append(LongRow(span, layout, tiles, _MAX_SCORES))
        return [*parts, *(ShortRows(group, layout, tiles) for group in _groups(short, layout))]


def _kind(layout: BlockLayout) -> BlockLayout:
    """Returns what layouts have in common whose products are of equal sizes."""
    return replace(layout, window=None, zero_page=0, heads_per_page=layout.n_kv_heads)


def _groups(spans: list[RowSpan], layout: BlockLayout) -> list[list[RowSpan]]:
    """Groups short rows so that each group gathers at most ``_MAX_GATHERED_VALUES`` of K or is a single row."""
    block_values = layout.block_tokens * layout.n_kv_heads * layout.head_dim
    groups: list[list[RowSpan]] = []
    seen: set[bytes] = set()
    for span in spans:
        pages = {block.pages for block in blocks_of_row(span, layout).values()}
        if not groups or len(seen | pages) * block_values > _MAX_GATHERED_VALUES:
            groups.append([])
            seen = set()
        groups[-1].append(span)
        seen |= pages
    return groups


def _token_tiles(layout: BlockLayout) -> tuple[int, ...]:
    """Returns the numbers of tokens per product, ascending, that give the same bits."""
    sizes = [-(-_MIN_PRODUCT_ROWS // layout.group)]
    while 2 * sizes[-1] * layout.group <= _MAX_PRODUCT_ROWS:
        sizes.append(2 * sizes[-1])
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    k = random(1, layout.n_kv_heads, layout.block_tokens, layout.head_dim)
    q = random(sizes[-1], layout.group, layout.head_dim)

    def product(tokens: Tensor) -> Tensor:
        query_rows = tokens.flatten(0, 1).expand(1, layout.n_kv_heads, -1, -1)
        scores = batched_matmul(query_rows, k.transpose(2, 3))
        both = torch.cat([scores, batched_matmul(scores, k)], -1)
        return both[0].transpose(0, 1).reshape(len(tokens), -1)

    return agreeing_tiles(product, q, sizes)
