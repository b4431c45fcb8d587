"""Block-wise softmax arithmetic of the CPU attention, over fixed blocks of positions.

A token's result has the same bits whatever else is in the step, because

- scores and partial sums come from matrix products of bit-equal tile sizes over one block of ``block_tokens``
  positions,
- the maximum score is exact in any order,
- partial sums are added in block order, and masked positions add exact zeros.

In a layer with a sliding window, a token reads only blocks that contain a position of its window. Pages of such a
block that lie behind the window of the row's first token are not read: other requests may have them.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from radixkv.runtime.device.attention.cpu.base import RowSpan
from radixkv.runtime.device.ops.cpu.page_rows import rows_of


@dataclass(frozen=True)
class BlockLayout:
    """Head sizes and block partition of one kind of layer."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    page_size: int
    block_tokens: int
    """Positions per block, a multiple of ``page_size``."""
    zero_page: int
    """Page that stays zero; it stands for pages that no token of a row reads."""
    heads_per_page: int
    """Distance of two pages of a layer in the pool, as a multiple of a page of one key-value head."""
    window: int | None = None
    """Sliding window in positions, the token's own included; None: full causal attention."""

    @cached_property
    def pages_per_block(self) -> int:
        return self.block_tokens // self.page_size

    @cached_property
    def group(self) -> int:
        """Number of query heads that share a key-value head."""
        return self.n_heads // self.n_kv_heads

    def n_blocks(self, length: int) -> int:
        """Returns the number of blocks that contain positions ``0 .. length - 1``."""
        return -(-length // self.block_tokens)

    def first_visible(self, position: int) -> int:
        """Returns the first position that the token at ``position`` attends to."""
        return 0 if self.window is None else max(0, position + 1 - self.window)

    def first_block(self, position: int) -> int:
        """Returns the first block that the token at ``position`` reads."""
        return self.first_visible(position) // self.block_tokens

    def blocks(self, position: int) -> range:
        """Returns the blocks that the token at ``position`` reads."""
        return range(self.first_block(position), self.n_blocks(position + 1))


class KVBlock(NamedTuple):
    """A block's pages in the pool."""

    pages: bytes
    """Page indices as int32, in position order; bytes, so that a block is hashable."""
    n_written: int
    """Number of positions, from the block's first, that are written."""


def blocks_of_row(span: RowSpan, layout: BlockLayout) -> dict[int, KVBlock]:
    """Returns the blocks that a row reads, by block index, in ascending order; without pages behind its window."""
    pages = span.pages
    if layout.window is not None:
        pages = pages.copy()
        pages[: layout.first_visible(span.start) // layout.page_size] = layout.zero_page
    return {
        index: KVBlock(
            pages[index * layout.pages_per_block : (index + 1) * layout.pages_per_block].tobytes(),
            min(layout.block_tokens, span.length - index * layout.block_tokens),
        )
        for index in range(layout.first_block(span.start), layout.n_blocks(span.length))
    }


class LayerKV(NamedTuple):
    """What attention reads of one layer."""

    k: Tensor
    """[pages, kv_heads, page_size, head_dim], as is ``v``."""
    v: Tensor
    sinks: Tensor | None
    """[heads]: a score of each head that takes part in the softmax and has no value."""


class BlockGather:
    """Copies blocks out of the pool as float32. Unwritten positions read as zero, whatever the pool contains."""

    def __init__(self, blocks: Collection[KVBlock], layout: BlockLayout) -> None:
        pages = np.full((len(blocks), layout.pages_per_block), layout.zero_page, dtype=np.int64)
        unwritten = []
        for index, block in enumerate(blocks):
            block_pages = np.frombuffer(block.pages, dtype=np.int32)
            pages[index, : len(block_pages)] = block_pages
            unwritten += [(index, offset) for offset in range(block.n_written, len(block_pages) * layout.page_size)]
        heads = np.arange(layout.n_kv_heads)
        self._page_heads = torch.from_numpy(
            (pages[:, None, :] * layout.heads_per_page + heads[:, None]).reshape(-1)
        )
        self._unwritten = torch.tensor(
            [
                (index * layout.n_kv_heads + head) * layout.block_tokens + offset
                for index, offset in unwritten
                for head in range(layout.n_kv_heads)
            ],
            dtype=torch.int64,
        )
        self._shape = (len(blocks), layout.n_kv_heads, layout.block_tokens, layout.head_dim)
        self.n_values = math.prod(self._shape)
        """Number of values that one ``read`` copies."""

    def read(self, layer: Tensor, workspace: Tensor) -> Tensor:
        """Copies the blocks into the flat ``workspace``.

        Args:
            layer: K or V of one layer, [pages + 1, kv_heads, page_size, head_dim].
            workspace: float32, at least ``n_values`` long.

        Returns:
            [blocks, kv_heads, block_tokens, head_dim], a view of ``workspace``.
        """
        page_head_size = layer[0, 0].numel()
        copied = workspace[: self.n_values].view(-1, page_head_size)
        page_heads = rows_of(layer, page_head_size)
        if layer.dtype == copied.dtype:
            torch.index_select(page_heads, 0, self._page_heads, out=copied)
        else:
            copied.copy_(torch.index_select(page_heads, 0, self._page_heads))
        if len(self._unwritten):
            copied.view(-1, layer.shape[-1]).index_fill_(0, self._unwritten, 0.0)
        return copied.view(self._shape)


def visible_mask(first: Tensor, end: Tensor, block_tokens: int) -> Tensor:
    """Returns an additive mask, [..., block_tokens]: 0 where a position is visible, else -inf.

    Args:
        first: [...], first visible position, relative to the start of the block.
        end: [...], position after the last visible one, relative to the start of the block.
        block_tokens: positions per block.
    """
    positions = torch.arange(block_tokens)
    is_visible = (positions >= first.unsqueeze(-1)) & (positions < end.unsqueeze(-1))
    return torch.zeros(is_visible.shape).masked_fill_(~is_visible, -math.inf)


def ordered_sum(parts: Tensor, dim: int) -> Tensor:
    """Sums ``parts`` over ``dim`` strictly from first to last, so that leading or trailing zeros change no bit."""
    first, *rest = parts.unbind(dim)
    total = first.clone()
    for part in rest:
        total.add_(part)
    return total


def batched_matmul(x: Tensor, y: Tensor) -> Tensor:
    """Returns the matrix products of ``x`` and ``y`` over their two leading dimensions."""
    z = torch.bmm(x.reshape(-1, *x.shape[2:]), y.flatten(0, 1))
    return z.view(*y.shape[:2], *z.shape[1:])
