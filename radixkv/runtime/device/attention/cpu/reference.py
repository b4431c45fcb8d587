"""Attention in plain torch: the CPU's backend, and the oracle of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from radixkv.runtime.device.attention.cpu.block_softmax import Layout, blocks_of, products
from radixkv.runtime.device.attention.cpu.row_products import LongRow, ShortRows
from radixkv.runtime.device.kv_pool_cpu import KVPool
from radixkv.runtime.device.ops.cpu.agreeing_tiles import agreeing_tiles
from radixkv.runtime.device.pack_cpu import Batch, Span

_MIN_LINES = 8
_MAX_LINES = 256
_MAX_SCORES = 1 << 21
_MAX_GATHERED = 1 << 23


class ReferenceAttention:
    """Causal attention over the paged pool, computed in float32; batch-invariant.

    Cost: short rows copy the blocks they read, each once a layer however many of them read it; a long row copies
    its own once a layer.
    """

    def __init__(
        self,
        pool: KVPool,
        *,
        n_heads: int,
        windows: Sequence[int | None] | None = None,
        block_tokens: int = 256,
    ) -> None:
        """Tries which sizes of products agree.

        Args:
            windows: by layer, how many positions a token sees, its own included; None for all.
            block_tokens: positions that one partial sum covers, rounded down to whole pages, one at least.
        """
        n_layers, _, n_kv_heads, page_size, head_dim = pool.k.shape
        layout = Layout(
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            block_tokens=max(1, block_tokens // page_size) * page_size,
        )
        self._pool = pool
        self._windows = tuple(windows or [None] * n_layers)
        self._layouts = {window: replace(layout, window=window) for window in self._windows}
        self._tiles = _token_tiles(layout)
        self._scale = head_dim**-0.5
        self._parts: dict[int | None, list[LongRow | ShortRows]] = {}
        self._workspace = (torch.empty(0), torch.empty(0))
        self._written_tokens = torch.empty(0, dtype=torch.int64)
        self._slot_mapping = torch.empty(0, dtype=torch.int64)

    def plan(self, batch: Batch) -> None:
        """Cuts the step into products, once for each kind of layer. O(rows * blocks)."""
        self._written_tokens = batch.written_tokens
        self._slot_mapping = self._pool.slot_mapping(batch.written_pages, batch.written_offsets)
        self._parts = {window: self._cut(batch.spans, layout) for window, layout in self._layouts.items()}
        most = max(part.n_gathered for parts in self._parts.values() for part in parts)
        if most > len(self._workspace[0]):
            self._workspace = (torch.empty(most), torch.empty(most))

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As in ``Attention``."""
        self._pool.write(layer, self._slot_mapping, k[self._written_tokens], v[self._written_tokens])
        scaled = q.float() * self._scale
        out = torch.empty_like(scaled)
        for part in self._parts[self._windows[layer]]:
            part.run(layer, scaled, out, self._workspace)
        return out.flatten(1).to(q.dtype)

    def _cut(self, spans: Sequence[Span], layout: Layout) -> list[LongRow | ShortRows]:
        parts: list[LongRow | ShortRows] = []
        short: list[Span] = []
        for span in spans:
            if span.n_tokens <= self._tiles[0]:
                short.append(span)
            else:
                parts.append(LongRow(span, layout, self._pool, self._tiles, _MAX_SCORES))
        return [*parts, *(ShortRows(some, layout, self._pool, self._tiles) for some in _bounded(short, layout))]


def _bounded(spans: list[Span], layout: Layout) -> list[list[Span]]:
    """Short rows in groups whose copies of K stay below ``_MAX_GATHERED`` numbers, or that are one row."""
    block_numbers = layout.block_tokens * layout.n_kv_heads * layout.head_dim
    groups: list[list[Span]] = []
    seen: set[bytes] = set()
    for span in spans:
        pages = {block.pages for block in blocks_of(span, layout).values()}
        if not groups or len(seen | pages) * block_numbers > _MAX_GATHERED:
            groups.append([])
            seen = set()
        groups[-1].append(span)
        seen |= pages
    return groups


def _token_tiles(layout: Layout) -> tuple[int, ...]:
    """Tokens a product, ascending, all with the same bits."""
    sizes = [-(-_MIN_LINES // layout.group)]
    while 2 * sizes[-1] * layout.group <= _MAX_LINES:
        sizes.append(2 * sizes[-1])
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    k = random(1, layout.n_kv_heads, layout.block_tokens, layout.head_dim)
    q = random(sizes[-1], layout.group, layout.head_dim)

    def product(tokens: Tensor) -> Tensor:
        lines = tokens.flatten(0, 1).expand(1, layout.n_kv_heads, -1, -1)
        scores = products(lines, k.transpose(2, 3))
        both = torch.cat([scores, products(scores, k)], -1)
        return both[0].transpose(0, 1).reshape(len(tokens), -1)

    return agreeing_tiles(product, q, sizes)
