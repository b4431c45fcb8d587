"""Partition of a step's rows into matrix products over blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.runtime.device.attention.cpu.base import RowSpan
from radixkv.runtime.device.attention.cpu.block_softmax import (
    BlockGather,
    BlockLayout,
    KVBlock,
    LayerKV,
    batched_matmul,
    blocks_of_row,
    ordered_sum,
    visible_mask,
)


class LongRow:
    """Attention of one row with many tokens, in tiles of queries against all blocks that they read."""

    def __init__(self, span: RowSpan, layout: BlockLayout, tiles: Sequence[int], max_scores: int) -> None:
        self._layout = layout
        self._gather = BlockGather(blocks_of_row(span, layout).values(), layout)
        self._tiles = []
        first = 0
        while first < span.n_tokens:
            left = span.n_tokens - first
            fitting = [tile for tile in tiles if self._n_scores(span, first, tile) <= max_scores] or tiles[:1]
            size = next((tile for tile in fitting if tile >= left), fitting[-1])
            self._tiles.append(self._tile(span, first, size, min(size, left)))
            first += size

    def _n_scores(self, span: RowSpan, first: int, size: int) -> int:
        layout, start = self._layout, span.start + first
        n_blocks = layout.n_blocks(min(span.length, start + size)) - layout.first_block(start)
        return size * n_blocks * layout.block_tokens * layout.n_heads

    def _tile(self, span: RowSpan, first: int, size: int, n_tokens: int) -> _Tile:
        layout, start = self._layout, span.start + first
        ends = torch.arange(start + 1, start + size + 1).clamp_(max=start + n_tokens)
        firsts = torch.zeros_like(ends) if layout.window is None else (ends - layout.window).clamp_(min=0)
        # Without a window, all tokens of the tile see every position of the blocks before the tile's first token.
        first_masked = (start + 1) // layout.block_tokens if layout.window is None else layout.first_block(start)
        n_blocks = layout.n_blocks(start + n_tokens)
        block_starts = torch.arange(first_masked, n_blocks)[:, None] * layout.block_tokens
        mask = visible_mask(firsts - block_starts, ends - block_starts, layout.block_tokens)
        first_gathered = layout.first_block(span.start)
        return _Tile(
            first_token=span.first_token + first,
            n_tokens=n_tokens,
            size=size,
            blocks=slice(layout.first_block(start) - first_gathered, n_blocks - first_gathered),
            n_unmasked=first_masked - layout.first_block(start),
            mask=mask.unsqueeze(1).unsqueeze(3),
        )

    @property
    def n_gathered(self) -> int:
        """Number of values of K (and as many of V) that are gathered at once."""
        return self._gather.n_values

    def run(self, layer: LayerKV, q: Tensor, out: Tensor, workspace: tuple[Tensor, Tensor]) -> None:
        """Computes the row's part of ``out``.

        Args:
            layer: the layer's KV, with that of this step.
            q: [tokens, heads, head_dim], scaled queries of the whole step.
            out: [tokens, heads, head_dim], attention output of the whole step.
            workspace: flat buffers for K and V, at least ``n_gathered`` long.
        """
        k = self._gather.read(layer.k, workspace[0])
        v = self._gather.read(layer.v, workspace[1])
        for tile in self._tiles:
            tokens = slice(tile.first_token, tile.first_token + tile.n_tokens)
            out[tokens] = self._attend(tile, layer.sinks, q[tokens], k[tile.blocks], v[tile.blocks])

    def _attend(self, tile: _Tile, sinks: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n_kv_heads, group, head_dim = self._layout.n_kv_heads, self._layout.group, self._layout.head_dim
        if tile.n_tokens < tile.size:
            q = torch.cat([q, q.new_zeros(tile.size - tile.n_tokens, *q.shape[1:])])
        query_rows = q.view(tile.size, n_kv_heads, group, head_dim).transpose(0, 1)
        query_rows = query_rows.reshape(n_kv_heads, tile.size * group, head_dim).expand(len(k), -1, -1, -1)
        scores = batched_matmul(query_rows, k.transpose(2, 3))
        by_token = scores.view(len(k), n_kv_heads, tile.size, group, -1)
        by_token[tile.n_unmasked :].add_(tile.mask)
        peaks = scores.amax(-1).amax(0)
        weights = scores.sub_(peaks[:, :, None]).exp_()
        sums = ordered_sum(weights.sum(-1), 0)
        if sinks is not None:
            by_head = (n_kv_heads, tile.size, group)
            sums.view(by_head).add_((sinks.view(n_kv_heads, 1, group) - peaks.view(by_head)).exp_())
        result = ordered_sum(batched_matmul(weights, v), 0).div_(sums.unsqueeze(-1))
        result = result.view(n_kv_heads, tile.size, group, head_dim).transpose(0, 1)
        return result.reshape(tile.size, -1, head_dim)[: tile.n_tokens]


@dataclass(frozen=True)
class _Tile:
    """A tile of queries of a long row."""

    first_token: int
    """Index of the tile's first token in the step."""
    n_tokens: int
    size: int
    """Tokens of the matrix product: ``n_tokens`` and padding."""
    blocks: slice
    """The gathered blocks that the tile reads."""
    n_unmasked: int
    """Number of leading blocks that every token of the tile sees completely."""
    mask: Tensor
    """[blocks - n_unmasked, 1, size, 1, block_tokens]: additive mask of the remaining blocks."""


class ShortRows:
    """Attention of many rows with few tokens. A block that several tokens read is copied and multiplied once.

    A unit is a block with up to ``size`` tokens that read it. Units of the same size form a bucket, which is one
    batched matrix product. A unit yields one partial result (maximum, sum, weighted values) per token and head.
    """

    def __init__(self, spans: Sequence[RowSpan], layout: BlockLayout, sizes: Sequence[int]) -> None:
        self._layout = layout
        self._tokens = torch.tensor([span.first_token + i for span in spans for i in range(span.n_tokens)])
        positions = [span.start + i for span in spans for i in range(span.n_tokens)]
        readers: dict[tuple[KVBlock, int], list[int]] = {}
        token = 0
        for span in spans:
            blocks = blocks_of_row(span, layout)
            for i in range(span.n_tokens):
                for index in layout.blocks(span.start + i):
                    readers.setdefault((blocks[index], index), []).append(token)
                token += 1
        units: dict[int, list[tuple[KVBlock, int, list[int]]]] = {size: [] for size in sizes}
        for (block, index), tokens in readers.items():
            for first in range(0, len(tokens), sizes[-1]):
                unit_tokens = tokens[first : first + sizes[-1]]
                fitting = next(size for size in sizes if size >= len(unit_tokens))
                units[fitting].append((block, index, unit_tokens))
        n_blocks = max(len(layout.blocks(position)) for position in positions)
        n_partials = sum(size * len(bucket) for size, bucket in units.items()) * layout.n_heads
        partials = np.full((len(positions), n_blocks, layout.n_heads), n_partials, dtype=np.int64)
        self._buckets = []
        first_partial = 0
        for size, bucket in units.items():
            if bucket:
                self._buckets.append(self._bucket(size, bucket, positions, partials, first_partial))
                first_partial += size * len(bucket) * layout.n_heads
        self._partials = torch.from_numpy(partials)
        """[tokens, blocks, heads]: where each token's partial results are among those of all products, in block
        order; padded with ``n_partials``, the index of a neutral element."""

    def _bucket(
        self,
        size: int,
        units: list[tuple[KVBlock, int, list[int]]],
        positions: list[int],
        partials: NDArray[np.int64],
        first_partial: int,
    ) -> _Bucket:
        layout = self._layout
        padding_token = len(positions)
        tokens = np.full((len(units), size), padding_token, dtype=np.int64)
        firsts = np.zeros((len(units), size), dtype=np.int64)
        ends = np.full((len(units), size), layout.block_tokens, dtype=np.int64)
        kv_heads, members = np.divmod(np.arange(layout.n_heads), layout.group)
        heads = first_partial + kv_heads * size * layout.group + members
        for unit, (_, index, unit_tokens) in enumerate(units):
            for column, token in enumerate(unit_tokens):
                position, block_start = positions[token], index * layout.block_tokens
                tokens[unit, column] = token
                firsts[unit, column] = layout.first_visible(position) - block_start
                ends[unit, column] = position + 1 - block_start
                first = unit * size * layout.n_heads + column * layout.group
                partials[token, index - layout.first_block(position)] = heads + first
        mask = visible_mask(torch.from_numpy(firsts), torch.from_numpy(ends), layout.block_tokens)
        gather = BlockGather([block for block, _, _ in units], layout)
        return _Bucket(size, gather, torch.from_numpy(tokens.reshape(-1)), mask[:, None, :, None])

    @property
    def n_gathered(self) -> int:
        """Number of values of K (and as many of V) that are gathered at once."""
        return max(bucket.gather.n_values for bucket in self._buckets)

    def run(self, layer: LayerKV, q: Tensor, out: Tensor, workspace: tuple[Tensor, Tensor]) -> None:
        """Computes the rows' parts of ``out``.

        Args:
            layer: the layer's KV, with that of this step.
            q: [tokens, heads, head_dim], scaled queries of the whole step.
            out: [tokens, heads, head_dim], attention output of the whole step.
            workspace: flat buffers for K and V, at least ``n_gathered`` long.
        """
        layout, (k_space, v_space) = self._layout, workspace
        q = torch.index_select(q, 0, self._tokens)
        query_rows = torch.cat([q, q.new_zeros(1, *q.shape[1:])])
        scores, peaks = [], []
        for bucket in self._buckets:
            k = bucket.gather.read(layer.k, k_space)
            queries = torch.index_select(query_rows, 0, bucket.tokens).view(
                -1, bucket.size, layout.n_kv_heads, layout.group, layout.head_dim
            )
            products = batched_matmul(queries.transpose(1, 2).flatten(2, 3), k.transpose(2, 3))
            part = products.unflatten(2, (bucket.size, layout.group)).add_(bucket.mask)
            scores.append(part)
            peaks.append(part.amax(-1).flatten())
        peak = torch.cat([*peaks, q.new_full((1,), -math.inf)])[self._partials].amax(1)
        padded_peak = torch.cat([peak, peak.new_zeros(1, layout.n_heads)])
        sums, results = [], []
        for bucket, part in zip(self._buckets, scores, strict=True):
            shape = (-1, bucket.size, layout.n_kv_heads, layout.group)
            part.sub_(padded_peak[bucket.tokens].view(shape).transpose(1, 2).unsqueeze(-1)).exp_()
            v = bucket.gather.read(layer.v, v_space)
            sums.append(part.sum(-1).flatten())
            results.append(batched_matmul(part.flatten(2, 3), v).view(-1, layout.head_dim))
        total = ordered_sum(torch.cat([*sums, q.new_zeros(1)])[self._partials], 1)
        if layer.sinks is not None:
            total.add_((layer.sinks - peak).exp_())
        result = torch.cat([*results, q.new_zeros(1, layout.head_dim)])
        out[self._tokens] = ordered_sum(result[self._partials], 1).div_(total.unsqueeze(-1))


@dataclass(frozen=True)
class _Bucket:
    """All units of one size."""

    size: int
    """Tokens per unit, padding included."""
    gather: BlockGather
    tokens: Tensor
    """[units * size]: index among the short rows' tokens; their count marks padding."""
    mask: Tensor
    """[units, 1, size, 1, block_tokens]: additive mask."""
