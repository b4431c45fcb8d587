"""Attention in float32, which FlashInfer does not have, in plain torch: to compare with, not to be fast."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from radixkv.runtime.device.attention.cuda.decode_tiles import Variant
from radixkv.runtime.device.attention.cuda.flashinfer import Shape
from radixkv.runtime.device.attention.cuda.work_items import Ints
from radixkv.runtime.device.staging_cuda import Staged, Staging
from radixkv.runtime.device.transfer_cuda import to_device
from radixkv.runtime.step.plan import SharedRun

_MAX_QUERIES = 64
"""Of a tile; a power of two."""
_BLOCK_TOKENS = 256
"""Positions that are copied out of the pool at a time."""
_MAX_NUMBERS = 1 << 23
"""Of K, or of scores, that a lot of tiles has at a time."""


class ReferenceAttention:
    """Attention without kernels of its own: ``base.Attention``, for any sizes, always launched one by one.

    A row's tokens are cut into tiles, and tiles of equal size computed together, block by block of the positions
    that they read. Products are float32 throughout, as torch leaves TF32 out of them unless it is told otherwise.

    Memory: some 200 MB while it runs, however long rows are. Cost: each tile copies all that it reads, and a lot of
    tiles takes some 20 launches a block.

    Args:
        shape: heads, page size and dtype.
        windows: by layer, how many positions a token sees, its own included; None for all.
        device: where.
    """

    def __init__(self, shape: Shape, windows: Sequence[int | None], *, device: torch.device) -> None:
        self._shape = shape
        self._windows = tuple(windows)
        self._device = device

    def connect(self, staging: Staging, tables: Tensor) -> None:
        """As in ``Attention``; nothing of it is staged."""
        self._tables = tables

    def variants(self, bucket: int) -> list[Variant]:
        """None: how much is launched depends on how long rows are."""
        return []

    def plan_decode(
        self,
        staged: Staged,
        batch_slots: Ints,
        lengths: Ints,
        shared: Sequence[SharedRun] = (),
        bucket: int | None = None,
        variant: Variant | None = None,
    ) -> Ints:
        """[3, rows]: slots, starts and numbers of tokens."""
        assert bucket is None, "there are no graphs"
        return np.stack([batch_slots, lengths - 1, np.ones_like(lengths)])

    def plan_prompts(self, batch_slots: Ints, starts: Ints, n_tokens: Ints) -> Ints:
        """The same."""
        return np.stack([batch_slots, starts, n_tokens])

    def step(self, decode: Ints | None, prompts: Ints | None) -> ReferenceStep:
        """Cuts the rows, and sends the tiles on the current stream."""
        rows = np.concatenate([part for part in (decode, prompts) if part is not None], axis=1)
        tiles = list(self._lots(rows))
        joined = np.concatenate([numbers for _, numbers in tiles], axis=1)
        sent = to_device(joined.astype(np.int64), self._device)
        lots, first = [], 0
        for size, numbers in tiles:
            end = first + numbers.shape[1]
            n_blocks = {window: self._n_blocks(size, numbers[1], window) for window in set(self._windows)}
            batch_slots, positions, places = sent[:, first:end]
            lots.append(_Lot(size, batch_slots, positions, places, n_blocks))
            first = end
        return ReferenceStep(self._shape, self._windows, self._tables, lots)

    def _lots(self, rows: Ints) -> Iterator[tuple[int, Ints]]:
        """Tiles that are computed together, those of similar length: their size, and numbers as in ``_tiles``."""
        shape = self._shape
        for size, tiles in _tiles(rows):
            numbers = max(size * shape.n_heads, shape.n_kv_heads * shape.head_dim)
            n = max(1, _MAX_NUMBERS // (_block_pages(shape) * shape.page_size * numbers))
            tiles = tiles[:, np.argsort(tiles[1], kind="stable")]
            yield from ((size, tiles[:, first : first + n]) for first in range(0, tiles.shape[1], n))

    def _n_blocks(self, size: int, positions: Ints, window: int | None) -> int:
        first_pages = 0 if window is None else np.maximum(positions - window + 1, 0) // self._shape.page_size
        n_pages = (positions + size - 1) // self._shape.page_size + 1 - first_pages
        return -(-int(n_pages.max()) // _block_pages(self._shape))


@dataclass(frozen=True)
class _Lot:
    """Tiles of one size."""

    size: int
    """Queries of each, neighbours in one row."""
    batch_slots: Tensor
    """[tiles]"""
    positions: Tensor
    """[tiles]: each tile's first, in its sequence."""
    places: Tensor
    """[tiles]: the same, in the batch."""
    n_blocks: Mapping[int | None, int]
    """Blocks that cover what any of the tiles reads, by window."""


class ReferenceStep:
    """One planned step: ``base.LayerAttention``.

    Args:
        shape: heads, page size and dtype.
        windows: by layer.
        tables: the block tables.
        lots: every token is in one tile of one of them.
    """

    def __init__(self, shape: Shape, windows: Sequence[int | None], tables: Tensor, lots: Sequence[_Lot]) -> None:
        self._shape = shape
        self._windows = windows
        self._tables = tables
        self._lots = lots

    def run(self, layer: int, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
        """As in ``LayerAttention``."""
        for lot in self._lots:
            places = (lot.places[:, None] + torch.arange(lot.size, device=q.device)).flatten()
            attended = self._attend(lot, self._windows[layer], q.index_select(0, places), k_cache, v_cache)
            out.index_copy_(0, places, attended)

    def _attend(self, lot: _Lot, window: int | None, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """[tiles * size, heads, head_dim] -> the same. Sums are kept relative to the highest score so far."""
        shape, page_size = self._shape, self._shape.page_size
        n_kv_heads, group, head_dim = shape.n_kv_heads, shape.group, shape.head_dim
        queries = lot.positions[:, None] + torch.arange(lot.size, device=q.device)
        first_seen = torch.zeros_like(queries) if window is None else (queries - window + 1).clamp(min=0)
        first_page, last_page = first_seen[:, :1] // page_size, queries[:, -1:] // page_size
        block = torch.arange(_block_pages(shape), device=q.device)

        q = q.view(-1, lot.size, n_kv_heads, group, head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
        q = q * head_dim**-0.5
        peak = q.new_full(q.shape[:-1], torch.finfo(q.dtype).min)
        total, sums = torch.zeros_like(peak), torch.zeros_like(q)
        for number in range(lot.n_blocks[window]):
            pages = first_page + number * len(block) + block
            known = self._tables[lot.batch_slots[:, None], torch.minimum(pages, last_page)]
            keys = (pages[..., None] * page_size + torch.arange(page_size, device=q.device)).flatten(1)[:, None]
            is_seen = (keys <= queries[..., None]) & (keys >= first_seen[..., None])
            k, v = (self._gathered(cache, known) for cache in (k_cache, v_cache))
            # Whatever is where nobody looks, NaN for instance, would not go away by a weight of 0.
            v = v.masked_fill(~is_seen.any(1)[:, None, :, None], 0.0)

            scores = (q @ k.transpose(2, 3)).view(-1, n_kv_heads, group, lot.size, keys.shape[-1])
            scores = scores.masked_fill_(~is_seen[:, None, None], -math.inf).flatten(2, 3)
            higher = torch.maximum(peak, scores.amax(-1))
            weights = scores.sub_(higher[..., None]).exp_()
            shrunk = (peak - higher).exp_()
            total = total * shrunk + weights.sum(-1)
            sums = sums * shrunk[..., None] + weights @ v
            peak = higher
        attended = (sums / total[..., None]).view(-1, n_kv_heads, group, lot.size, head_dim)
        return attended.permute(0, 3, 1, 2, 4).reshape(-1, shape.n_heads, head_dim)

    def _gathered(self, cache: Tensor, pages: Tensor) -> Tensor:
        """[tiles, pages] -> [tiles, kv_heads, tokens, head_dim]."""
        n_kv_heads, head_dim = cache.shape[-2:]
        tokens = cache.index_select(0, pages.flatten()).view(len(pages), -1, n_kv_heads, head_dim)
        return tokens.transpose(1, 2)


def _block_pages(shape: Shape) -> int:
    return max(1, _BLOCK_TOKENS // shape.page_size)


def _tiles(rows: Ints) -> Iterator[tuple[int, Ints]]:
    """Each size, and [3, tiles] of it: slots, first positions and places in the batch. Sizes are powers of two, so
    that none is padded.

    Args:
        rows: [3, rows]: slots, starts and numbers of tokens.
    """
    batch_slots, starts, n_tokens = rows
    firsts = np.cumsum(n_tokens, dtype=np.int32) - n_tokens
    done, size = np.zeros_like(n_tokens), _MAX_QUERIES
    while size:
        counts = (n_tokens - done) // size
        row = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        offsets = done[row] + number * size
        yield size, np.stack([batch_slots[row], starts[row] + offsets, firsts[row] + offsets])
        done = done + counts * size
        size //= 2
