"""Attention in float32 for CUDA's decoder, in plain torch: an oracle, because FlashInfer has no float32."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from radixkv.runtime.device.attention.cuda.base import AttentionPlanner, AttentionShape, DecodeRows
from radixkv.runtime.device.attention.cuda.decode_tiles import Variant
from radixkv.runtime.device.attention.cuda.work_items import Ints
from radixkv.runtime.device.memory.cuda.array_copies import to_device
from radixkv.runtime.device.memory.cuda.staging import Staging, StagingBuffer
from radixkv.runtime.device.model_config.config import DecoderConfig

_MAX_QUERIES = 64
"""Most queries per tile; a power of two."""
_BLOCK_TOKENS = 256
"""Positions copied out of the pool at a time."""
MAX_VALUES = 1 << 23


def reference_attention(
    config: DecoderConfig, page_size: int, device: torch.device, sinks: Sequence[Tensor | None]
) -> AttentionPlanner[Any, Any]:
    """Returns attention of all layers of a model in float32."""
    # Imported here, because it imports Triton, which is not installed where other tests use this module.
    from radixkv.runtime.device.attention.cuda.shaped import ShapedAttention

    windows, dtype = config.windows_within(1 << 30), torch.float32
    layers: dict[tuple[int, int], list[int]] = {shape: [] for shape in config.head_shapes}
    for index, layer in enumerate(config.attention_layers):
        layers[config.heads[layer].n_kv_heads, config.heads[layer].head_dim].append(index)
    parts = [
        ReferenceAttention(
            AttentionShape(config.n_heads, *sizes, page_size, dtype, config.attention_scale, dtype),
            [windows[index] for index in of_shape],
            device=device,
            sinks=[sinks[index] for index in of_shape],
        )
        for sizes, of_shape in layers.items()
    ]
    if len(parts) == 1:
        return parts[0]
    places = {i: (part, n) for part, of_shape in enumerate(layers.values()) for n, i in enumerate(of_shape)}
    return ShapedAttention(parts, [places[index] for index in range(len(places))])


class ReferenceDecode(NamedTuple):
    """Planned decode rows."""

    rows: Ints
    """[3, rows]: batch slots, starts and token counts."""
    variant: Variant = "whole"


class ReferenceAttention:
    """``base.AttentionPlanner`` in torch operations, for any sizes, without CUDA graphs.

    A row's tokens are split into tiles. Tiles of equal size are computed together, in blocks of the positions that
    they read. Products are full float32: torch does not use TF32 for them by default.

    Memory: some 200 MB while it runs, however long rows are. Cost: each tile copies all K and V that it reads, and
    a group of tiles takes some 20 launches per block.

    Args:
        shape: heads, page size and dtype.
        windows: by layer, how many positions a token attends to, its own included; None for all.
        device: where to compute.
        sinks: by layer, [heads]: a score of each head that takes part in the softmax and has no value; None for
            layers or models without.
        max_values: most elements of K, or of scores, per group of tiles.
    """

    def __init__(
        self,
        shape: AttentionShape,
        windows: Sequence[int | None],
        *,
        device: torch.device,
        sinks: Sequence[Tensor | None] | None = None,
        max_values: int = MAX_VALUES,
    ) -> None:
        self._max_values = max_values
        self._shape = shape
        self._windows = tuple(windows)
        self._device = device
        self._sinks = (None,) * len(windows) if sinks is None else tuple(sinks)

    def connect(self, staging: Staging, tables: Tensor, window_tables: Tensor | None = None) -> None:
        """Binds the block tables; this attention stages nothing."""
        self._tables = tables
        self._window_tables = tables if window_tables is None else window_tables

    def variants(self, bucket: int) -> list[Variant]:
        """Returns no variants: the launches depend on the rows' lengths."""
        return []

    def fits_prompts(self, starts: Ints, n_tokens: Ints) -> bool:
        """Returns that no prompt rows can be computed as decode rows: there are no graphs."""
        return False

    def plan_decode(
        self, staged: StagingBuffer, rows: DecodeRows, bucket: int | None = None, variant: Variant | None = None
    ) -> ReferenceDecode:
        """Plans decode rows, in one variant."""
        assert bucket is None, "there are no graphs"
        return ReferenceDecode(np.stack([rows.batch_slots, rows.lengths - 1, np.ones_like(rows.lengths)]))

    def plan_prompts(self, batch_slots: Ints, starts: Ints, n_tokens: Ints) -> Ints:
        """Returns [3, rows]: batch slots, starts and token counts."""
        return np.stack([batch_slots, starts, n_tokens])

    def step(self, decode: ReferenceDecode | None, prompts: Ints | None) -> ReferenceStep:
        """Splits the rows into tiles, and sends them on the current stream."""
        decode_rows = None if decode is None else decode.rows
        rows = np.concatenate([part for part in (decode_rows, prompts) if part is not None], axis=1)
        groups = list(self._groups(rows))
        joined = np.concatenate([tiles for _, tiles in groups], axis=1)
        sent = to_device(joined.astype(np.int64), self._device)
        tile_groups, first = [], 0
        for size, tiles in groups:
            end = first + tiles.shape[1]
            n_blocks = {window: self._n_blocks(size, tiles[1], window) for window in set(self._windows)}
            batch_slots, positions, indices = sent[:, first:end]
            tile_groups.append(_TileGroup(size, batch_slots, positions, indices, n_blocks))
            first = end
        tables = [self._tables if window is None else self._window_tables for window in self._windows]
        return ReferenceStep(self._shape, self._windows, self._sinks, tables, tile_groups)

    def _groups(self, rows: Ints) -> Iterator[tuple[int, Ints]]:
        """Yields groups of tiles of similar length to compute together: tile size, and tiles as in ``_tiles``."""
        shape = self._shape
        for size, tiles in _tiles(rows):
            n_values = max(size * shape.n_heads, shape.n_kv_heads * shape.head_dim)
            n = max(1, self._max_values // (_block_pages(shape) * shape.page_size * n_values))
            tiles = tiles[:, np.argsort(tiles[1], kind="stable")]
            yield from ((size, tiles[:, first : first + n]) for first in range(0, tiles.shape[1], n))

    def _n_blocks(self, size: int, positions: Ints, window: int | None) -> int:
        first_pages = 0 if window is None else np.maximum(positions - window + 1, 0) // self._shape.page_size
        n_pages = (positions + size - 1) // self._shape.page_size + 1 - first_pages
        return -(-int(n_pages.max()) // _block_pages(self._shape))


@dataclass(frozen=True)
class _TileGroup:
    """Tiles of one size that are computed together."""

    size: int
    """Queries per tile, consecutive in one row."""
    batch_slots: Tensor
    """[tiles]"""
    positions: Tensor
    """[tiles]: position of each tile's first query in its sequence."""
    indices: Tensor
    """[tiles]: index of each tile's first query in the step."""
    n_blocks: Mapping[int | None, int]
    """Blocks that cover the positions any of the tiles reads, by window."""


class ReferenceStep:
    """Attention of one planned step: ``base.LayerAttention``.

    Args:
        shape: heads, page size and dtype.
        windows: sliding window of each layer, None for all positions.
        sinks: those of each layer, None for none.
        tables: the block tables of each layer.
        groups: tiles that cover every token exactly once.
    """

    def __init__(
        self,
        shape: AttentionShape,
        windows: Sequence[int | None],
        sinks: Sequence[Tensor | None],
        tables: Sequence[Tensor],
        groups: Sequence[_TileGroup],
    ) -> None:
        self._shape = shape
        self._windows = windows
        self._sinks = sinks
        self._tables = tables
        self._groups = groups

    def run(self, layer: int, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
        """Computes one layer, as ``LayerAttention.run``."""
        for tiles in self._groups:
            indices = (tiles.indices[:, None] + torch.arange(tiles.size, device=q.device)).flatten()
            result = self._attend(tiles, layer, q.index_select(0, indices), k_cache, v_cache)
            out.index_copy_(0, indices, result)

    def _attend(self, tiles: _TileGroup, layer: int, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Computes [tiles * size, heads, head_dim] -> the same, with an online softmax."""
        window, sinks = self._windows[layer], self._sinks[layer]
        shape, page_size = self._shape, self._shape.page_size
        n_kv_heads, group, head_dim = shape.n_kv_heads, shape.group, shape.head_dim
        queries = tiles.positions[:, None] + torch.arange(tiles.size, device=q.device)
        first_seen = torch.zeros_like(queries) if window is None else (queries - window + 1).clamp(min=0)
        first_page, last_page = first_seen[:, :1] // page_size, queries[:, -1:] // page_size
        block = torch.arange(_block_pages(shape), device=q.device)

        q = q.view(-1, tiles.size, n_kv_heads, group, head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
        q = q * shape.scale
        peak = q.new_full(q.shape[:-1], torch.finfo(q.dtype).min)
        total, sums = torch.zeros_like(peak), torch.zeros_like(q)
        for block_index in range(tiles.n_blocks[window]):
            pages = first_page + block_index * len(block) + block
            page_ids = self._tables[layer][tiles.batch_slots[:, None], torch.minimum(pages, last_page)]
            keys = (pages[..., None] * page_size + torch.arange(page_size, device=q.device)).flatten(1)[:, None]
            is_seen = (keys <= queries[..., None]) & (keys >= first_seen[..., None])
            k, v = (self._gather_pages(cache, page_ids) for cache in (k_cache, v_cache))
            # Positions outside all masks may hold NaN, which a weight of 0 would not remove.
            v = v.masked_fill(~is_seen.any(1)[:, None, :, None], 0.0)

            scores = (q @ k.transpose(2, 3)).view(-1, n_kv_heads, group, tiles.size, keys.shape[-1])
            scores = scores.masked_fill_(~is_seen[:, None, None], -math.inf).flatten(2, 3)
            higher = torch.maximum(peak, scores.amax(-1))
            weights = scores.sub_(higher[..., None]).exp_()
            rescale = (peak - higher).exp_()
            total = total * rescale + weights.sum(-1)
            sums = sums * rescale[..., None] + weights @ v
            peak = higher
        if sinks is not None:
            total = total + (sinks.view(n_kv_heads, group).repeat_interleave(tiles.size, 1) - peak).exp_()
        out = (sums / total[..., None]).view(-1, n_kv_heads, group, tiles.size, head_dim)
        return out.permute(0, 3, 1, 2, 4).reshape(-1, shape.n_heads, head_dim)

    def _gather_pages(self, cache: Tensor, pages: Tensor) -> Tensor:
        """Copies pages out of the pool: [tiles, pages] page ids -> [tiles, kv_heads, tokens, head_dim]."""
        n_kv_heads, head_dim = cache.shape[-2:]
        tokens = cache.index_select(0, pages.flatten()).view(len(pages), -1, n_kv_heads, head_dim)
        return tokens.transpose(1, 2)


def _block_pages(shape: AttentionShape) -> int:
    return max(1, _BLOCK_TOKENS // shape.page_size)


def _tiles(rows: Ints) -> Iterator[tuple[int, Ints]]:
    """Splits rows into tiles whose sizes are powers of two, so that none is padded.

    Yields each size with its tiles, [3, tiles]: batch slots, first positions, and indices of the first queries in
    the step.

    Args:
        rows: [3, rows]: batch slots, starts and token counts.
    """
    batch_slots, starts, n_tokens = rows
    firsts = np.cumsum(n_tokens, dtype=np.int32) - n_tokens
    done, size = np.zeros_like(n_tokens), _MAX_QUERIES
    while size:
        counts = (n_tokens - done) // size
        row = np.repeat(np.arange(len(counts)), counts)
        tile = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        offsets = done[row] + tile * size
        yield size, np.stack([batch_slots[row], starts[row] + offsets, firsts[row] + offsets])
        done = done + counts * size
        size //= 2
