"""The arithmetic of the reference attention: softmax over fixed blocks of positions.

Whatever else is in the step, a token's result is the same bits, because

- a score and a partial sum come from products of agreeing sizes over one block of ``block_tokens`` positions,
- the largest score is exact in any order,
- partial sums are added in the order of the blocks, and masked positions add exact zeros.

In a layer with a window, a token reads only blocks that hold a position of its window.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from radixkv.runtime.device.pack_cpu import Span


@dataclass(frozen=True)
class Layout:
    """Sizes that all parts of the attention share."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    page_size: int
    block_tokens: int
    """Positions a block, a multiple of ``page_size``."""
    window: int | None = None
    """How many positions a token sees, its own included; None for all before it."""

    @property
    def pages_per_block(self) -> int:
        return self.block_tokens // self.page_size

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.n_heads // self.n_kv_heads

    def n_blocks(self, length: int) -> int:
        """Blocks that hold positions ``0 .. length - 1``."""
        return -(-length // self.block_tokens)

    def first_visible(self, position: int) -> int:
        """The first position that the token at ``position`` sees."""
        return 0 if self.window is None else max(0, position + 1 - self.window)

    def first_block(self, position: int) -> int:
        """The first block that the token at ``position`` reads."""
        return self.first_visible(position) // self.block_tokens

    def blocks(self, position: int) -> range:
        """The blocks that the token at ``position`` reads."""
        return range(self.first_block(position), self.n_blocks(position + 1))


class Block(NamedTuple):
    """Pages of consecutive positions, and how many of the positions are written."""

    pages: bytes
    """int32; equal bytes are equal pages."""
    n_written: int


def blocks_of(span: Span, layout: Layout) -> dict[int, Block]:
    """The blocks that a row reads, by index, in order."""
    return {
        index: Block(
            span.pages[index * layout.pages_per_block : (index + 1) * layout.pages_per_block].tobytes(),
            min(layout.block_tokens, span.length - index * layout.block_tokens),
        )
        for index in range(layout.first_block(span.start), layout.n_blocks(span.length))
    }


class Gather:
    """Copies blocks out of the pool, as float32. What was not written reads as zero, whatever lies there."""

    def __init__(self, blocks: Collection[Block], layout: Layout, zero_page: int) -> None:
        pages = np.full((len(blocks), layout.pages_per_block), zero_page, dtype=np.int64)
        unwritten = []
        for index, block in enumerate(blocks):
            known = np.frombuffer(block.pages, dtype=np.int32)
            pages[index, : len(known)] = known
            unwritten += [(index, at) for at in range(block.n_written, len(known) * layout.page_size)]
        heads = np.arange(layout.n_kv_heads)
        self._page_heads = torch.from_numpy((pages[:, None, :] * layout.n_kv_heads + heads[:, None]).reshape(-1))
        self._unwritten = torch.tensor(
            [
                (index * layout.n_kv_heads + head) * layout.block_tokens + position
                for index, position in unwritten
                for head in range(layout.n_kv_heads)
            ],
            dtype=torch.int64,
        )
        self._shape = (len(blocks), layout.n_kv_heads, layout.block_tokens, layout.head_dim)

    @property
    def n_numbers(self) -> int:
        """Numbers that a read gives."""
        return math.prod(self._shape)

    def read(self, layer: Tensor, workspace: Tensor) -> Tensor:
        """[blocks, kv_heads, block_tokens, head_dim], copied into the flat ``workspace``.

        Args:
            layer: one layer's K or V, [pages + 1, kv_heads, page_size, head_dim].
        """
        page_numbers = layer[0, 0].numel()
        copied = workspace[: self.n_numbers].view(-1, page_numbers)
        if layer.dtype == copied.dtype:
            torch.index_select(layer.view(-1, page_numbers), 0, self._page_heads, out=copied)
        else:
            copied.copy_(torch.index_select(layer.view(-1, page_numbers), 0, self._page_heads))
        if len(self._unwritten):
            copied.view(-1, layer.shape[-1]).index_fill_(0, self._unwritten, 0.0)
        return copied.view(self._shape)


def visible_mask(first: Tensor, end: Tensor, block_tokens: int) -> Tensor:
    """0 where a position is visible, else -inf: [..., block_tokens].

    Args:
        first: [...], the first position that a token sees, counted from the block's first.
        end: [...], the position after the last, counted so.
    """
    positions = torch.arange(block_tokens)
    seen = (positions >= first.unsqueeze(-1)) & (positions < end.unsqueeze(-1))
    return torch.zeros(seen.shape).masked_fill_(~seen, -math.inf)


def ordered_sum(parts: Tensor, dim: int) -> Tensor:
    """A sum that always adds from first to last, so that zeros before and after change nothing."""
    first, *rest = parts.unbind(dim)
    total = first.clone()
    for part in rest:
        total.add_(part)
    return total


def products(x: Tensor, y: Tensor) -> Tensor:
    """Matrix products over two leading dimensions."""
    z = torch.bmm(x.reshape(-1, *x.shape[2:]), y.flatten(0, 1))
    return z.view(*y.shape[:2], *z.shape[1:])
