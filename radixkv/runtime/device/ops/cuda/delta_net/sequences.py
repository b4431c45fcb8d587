"""The rows of a step as the kernels of gated delta nets read them, and the blocks of its prompts."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import triton
import triton.language as tl
from numpy.typing import NDArray

from radixkv.errors import DeviceError
from radixkv.runtime.device.ops.base import BLOCK_TOKENS, BlockArrays
from radixkv.runtime.device.pack import RowArrays
from radixkv.runtime.step.plan import StateSave

Ints = NDArray[np.int32]
_FIELDS = tl.constexpr(8)
"""Integers of a row's record in ``BlockArrays.rows``."""


def block_arrays(
    rows: RowArrays[Ints], n_decode: int, saves: Iterable[StateSave], n_batch_slots: int
) -> BlockArrays[Ints]:
    """Returns the rows of prompts, and the blocks in which their tokens are computed. O(rows + blocks).

    Blocks end at multiples of ``BLOCK_TOKENS`` positions, and where their row ends. So a sequence whose rows end at
    such multiples has the same blocks, and bits, as one that is computed at once.

    Args:
        rows: of the step.
        n_decode: leading rows that are not of prompts.
        saves: the states that the kernels save: those of a position within its row.
        n_batch_slots: number of batch slots; the slots of the tree come after them.

    Raises:
        DeviceError: a state is to be saved within a row, but not at the end of a block.
    """
    slots, starts, n_tokens, firsts = (array[n_decode:] for array in rows[:4])
    first_blocks = starts // BLOCK_TOKENS
    counts = (starts + n_tokens - 1) // BLOCK_TOKENS - first_blocks + 1
    ends = np.cumsum(counts, dtype=np.int32)
    records = np.zeros((len(slots), _FIELDS.value), np.int32)
    records[:, :5] = np.stack([slots, starts, n_tokens, firsts, ends - counts], 1)
    blocks = np.full((int(ends[-1]) if len(ends) else 0, 2), -1, np.int32)
    blocks[:, 0] = np.arange(len(slots)).repeat(counts)
    of_slot = {int(slot): row for row, slot in enumerate(slots)}
    for batch_slot, position, slot in saves:
        row = of_slot.get(batch_slot)
        if position % BLOCK_TOKENS or row is None:
            raise DeviceError(
                f"the state of batch slot {batch_slot} at position {position} is to be saved within a row; there "
                f"states are saved at multiples of {BLOCK_TOKENS} only"
            )
        block = ends[row] - counts[row] + position // BLOCK_TOKENS - 1 - first_blocks[row]
        blocks[block, 1] = n_batch_slots + slot
    return BlockArrays(records, blocks)


@triton.jit
def read_row(rows: tl.tensor, row: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Returns batch slot, start, tokens, first token and first block of a row."""
    record = rows + row * _FIELDS
    return (
        tl.load(record).to(tl.int64),
        tl.load(record + 1),
        tl.load(record + 2),
        tl.load(record + 3).to(tl.int64),
        tl.load(record + 4),
    )


@triton.jit
def block_range(
    index: tl.tensor, start: tl.tensor, n_tokens: tl.tensor, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Returns where block ``index`` of a row begins among its tokens, and the number of its tokens."""
    before = start % BLOCK
    first = tl.maximum(index * BLOCK - before, 0)
    return first, tl.minimum((index + 1) * BLOCK - before, n_tokens) - first
