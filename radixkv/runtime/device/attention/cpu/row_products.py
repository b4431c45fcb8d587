"""How the rows of a step are cut into products over blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.runtime.device.attention.cpu.block_softmax import (
    Block,
    Gather,
    Layout,
    blocks_of,
    ordered_sum,
    products,
    visible_mask,
)
from radixkv.runtime.device.kv_pool_cpu import KVPool
from radixkv.runtime.device.pack_cpu import Span


class LongRow:
    """Attention of one row with many tokens: tiles of queries against all blocks that they see."""

    def __init__(self, span: Span, layout: Layout, pool: KVPool, tiles: Sequence[int], max_scores: int) -> None:
        self._layout = layout
        self._pool = pool
        self._gather = Gather(blocks_of(span, layout).values(), layout, pool.zero_page)
        self._tiles = []
        first = 0
        while first < span.n_tokens:
            left = span.n_tokens - first
            fitting = [tile for tile in tiles if self._n_scores(span, first, tile) <= max_scores] or tiles[:1]
            size = next((tile for tile in fitting if tile >= left), fitting[-1])
            self._tiles.append(self._tile(span, first, size, min(size, left)))
            first += size

    def _n_scores(self, span: Span, first: int, size: int) -> int:
        layout, start = self._layout, span.start + first
        n_blocks = layout.n_blocks(min(span.length, start + size)) - layout.first_block(start)
        return size * n_blocks * layout.block_tokens * layout.n_heads

    def _tile(self, span: Span, first: int, size: int, n_tokens: int) -> _Tile:
        layout, start = self._layout, span.start + first
        ends = torch.arange(start + 1, start + size + 1).clamp_(max=start + n_tokens)
        firsts = torch.zeros_like(ends) if layout.window is None else (ends - layout.window).clamp_(min=0)
        # Without a window, all the tile's tokens see the blocks before its own whole.
        masked = (start + 1) // layout.block_tokens if layout.window is None else layout.first_block(start)
        n_blocks = layout.n_blocks(start + n_tokens)
        before = torch.arange(masked, n_blocks)[:, None] * layout.block_tokens
        mask = visible_mask(firsts - before, ends - before, layout.block_tokens)
        gathered = layout.first_block(span.start)
        return _Tile(
            first=span.first + first,
            n_tokens=n_tokens,
            size=size,
            blocks=slice(layout.first_block(start) - gathered, n_blocks - gathered),
            n_open=masked - layout.first_block(start),
            mask=mask.unsqueeze(1).unsqueeze(3),
        )

    @property
    def n_gathered(self) -> int:
        """Numbers of K, or of V, that are copied at a time."""
        return self._gather.n_numbers

    def run(self, layer: int, q: Tensor, out: Tensor, workspace: tuple[Tensor, Tensor]) -> None:
        """Fills the row's part of ``out``; ``q`` and ``out`` are the step's [tokens, heads, head_dim]."""
        k = self._gather.read(self._pool.k[layer], workspace[0])
        v = self._gather.read(self._pool.v[layer], workspace[1])
        for tile in self._tiles:
            tokens = slice(tile.first, tile.first + tile.n_tokens)
            out[tokens] = self._attend(tile, q[tokens], k[tile.blocks], v[tile.blocks])

    def _attend(self, tile: _Tile, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n_kv_heads, group, head_dim = self._layout.n_kv_heads, self._layout.group, self._layout.head_dim
        if tile.n_tokens < tile.size:
            q = torch.cat([q, q.new_zeros(tile.size - tile.n_tokens, *q.shape[1:])])
        lines = q.view(tile.size, n_kv_heads, group, head_dim).transpose(0, 1)
        lines = lines.reshape(n_kv_heads, tile.size * group, head_dim).expand(len(k), -1, -1, -1)
        scores = products(lines, k.transpose(2, 3))
        by_token = scores.view(len(k), n_kv_heads, tile.size, group, -1)
        by_token[tile.n_open :].add_(tile.mask)
        peaks = scores.amax(-1).amax(0)
        weights = scores.sub_(peaks[:, :, None]).exp_()
        sums = ordered_sum(weights.sum(-1), 0)
        result = ordered_sum(products(weights, v), 0).div_(sums.unsqueeze(-1))
        result = result.view(n_kv_heads, tile.size, group, head_dim).transpose(0, 1)
        return result.reshape(tile.size, -1, head_dim)[: tile.n_tokens]


@dataclass(frozen=True)
class _Tile:
    first: int
    n_tokens: int
    size: int
    blocks: slice
    """Which of the gathered blocks it reads."""
    n_open: int
    """How many of them, from the first, all its tokens see whole."""
    mask: Tensor
    """Of the others: [blocks - n_open, 1, size, 1, block_tokens]"""


class ShortRows:
    """Attention of many rows with few tokens. A block that several tokens read is copied and multiplied once.

    A unit is a block with up to ``size`` tokens that read it; units of one size are one product.
    """

    def __init__(self, spans: Sequence[Span], layout: Layout, pool: KVPool, sizes: Sequence[int]) -> None:
        self._layout = layout
        self._pool = pool
        self._tokens = torch.tensor([span.first + i for span in spans for i in range(span.n_tokens)])
        positions = [span.start + i for span in spans for i in range(span.n_tokens)]
        readers: dict[tuple[Block, int], list[int]] = {}
        token = 0
        for span in spans:
            blocks = blocks_of(span, layout)
            for i in range(span.n_tokens):
                for index in layout.blocks(span.start + i):
                    readers.setdefault((blocks[index], index), []).append(token)
                token += 1
        units: dict[int, list[tuple[Block, int, list[int]]]] = {size: [] for size in sizes}
        for (block, index), tokens in readers.items():
            for first in range(0, len(tokens), sizes[-1]):
                some = tokens[first : first + sizes[-1]]
                fitting = next(size for size in sizes if size >= len(some))
                units[fitting].append((block, index, some))
        n_blocks = max(len(layout.blocks(position)) for position in positions)
        n_batch_slots = sum(size * len(those) for size, those in units.items())
        parts = np.full((len(positions), n_blocks), n_batch_slots, dtype=np.int64)
        self._buckets = []
        first_slot = 0
        for size, those in units.items():
            if those:
                self._buckets.append(self._bucket(size, those, positions, parts, first_slot))
                first_slot += size * len(those)
        self._parts = torch.from_numpy(parts)

    def _bucket(
        self,
        size: int,
        units: list[tuple[Block, int, list[int]]],
        positions: list[int],
        parts: NDArray[np.int64],
        first_slot: int,
    ) -> _Bucket:
        layout = self._layout
        nobody = len(positions)
        tokens = np.full((len(units), size), nobody, dtype=np.int64)
        firsts = np.zeros((len(units), size), dtype=np.int64)
        ends = np.full((len(units), size), layout.block_tokens, dtype=np.int64)
        for unit, (_, index, some) in enumerate(units):
            for place, token in enumerate(some):
                position, before = positions[token], index * layout.block_tokens
                tokens[unit, place] = token
                firsts[unit, place] = layout.first_visible(position) - before
                ends[unit, place] = position + 1 - before
                parts[token, index - layout.first_block(position)] = first_slot + unit * size + place
        mask = visible_mask(torch.from_numpy(firsts), torch.from_numpy(ends), layout.block_tokens)
        gather = Gather([block for block, _, _ in units], self._layout, self._pool.zero_page)
        return _Bucket(size, gather, torch.from_numpy(tokens.reshape(-1)), mask[:, None, :, None])

    @property
    def n_gathered(self) -> int:
        """Numbers of K, or of V, that are copied at a time."""
        return max(bucket.gather.n_numbers for bucket in self._buckets)

    def run(self, layer: int, q: Tensor, out: Tensor, workspace: tuple[Tensor, Tensor]) -> None:
        """Fills the rows' parts of ``out``; ``q`` and ``out`` are the step's [tokens, heads, head_dim]."""
        n_heads = self._layout.n_heads
        q = torch.index_select(q, 0, self._tokens)
        lines = torch.cat([q, q.new_zeros(1, *q.shape[1:])])
        scores = [self._scores(bucket, layer, lines, workspace[0]) for bucket in self._buckets]
        peaks = torch.cat([self._by_slot(part.amax(-1)) for part in scores] + [q.new_full((1, n_heads), -math.inf)])
        peak = peaks[self._parts].amax(1)
        peak = torch.cat([peak, peak.new_zeros(1, n_heads)])
        sums, results = [], []
        for bucket, part in zip(self._buckets, scores, strict=True):
            shape = (-1, bucket.size, self._layout.n_kv_heads, self._layout.group)
            part.sub_(peak[bucket.tokens].view(shape).transpose(1, 2).unsqueeze(-1)).exp_()
            v = bucket.gather.read(self._pool.v[layer], workspace[1])
            sums.append(self._by_slot(part.sum(-1)))
            results.append(self._by_slot(products(part.flatten(2, 3), v).view(*part.shape[:-1], -1)))
        total = ordered_sum(torch.cat([*sums, q.new_zeros(1, n_heads)])[self._parts], 1)
        result = torch.cat([*results, q.new_zeros(1, *q.shape[1:])])
        out[self._tokens] = ordered_sum(result[self._parts], 1).div_(total.unsqueeze(-1))

    def _scores(self, bucket: _Bucket, layer: int, lines: Tensor, workspace: Tensor) -> Tensor:
        """[units, kv_heads, size, group, block_tokens], masked."""
        n_kv_heads, group, head_dim = self._layout.n_kv_heads, self._layout.group, self._layout.head_dim
        k = bucket.gather.read(self._pool.k[layer], workspace)
        unit_lines = torch.index_select(lines, 0, bucket.tokens).view(-1, bucket.size, n_kv_heads, group, head_dim)
        scores = products(unit_lines.transpose(1, 2).flatten(2, 3), k.transpose(2, 3))
        return scores.view(-1, n_kv_heads, bucket.size, group, self._layout.block_tokens).add_(bucket.mask)

    def _by_slot(self, values: Tensor) -> Tensor:
        """[units, kv_heads, size, group, ...] -> [units * size, heads, ...]."""
        return values.transpose(1, 2).reshape(values.shape[0] * values.shape[2], -1, *values.shape[4:])


@dataclass(frozen=True)
class _Bucket:
    size: int
    gather: Gather
    tokens: Tensor
    """[units * size]: which of the short tokens, or their number where there is none."""
    mask: Tensor
    """[units, 1, size, 1, block_tokens]"""
