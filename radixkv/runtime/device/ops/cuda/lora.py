"""Kernels that add the products of adapters to rows of a product, for many adapters at once.

The rows of an adapter are computed in blocks. One kernel multiplies a block with A of all matrices that the product
stacks, each program for some of the inputs, so that few rows use the whole GPU. The other one adds these sums in
order, and multiplies the total with B.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixkv.runtime.device.ops.cuda.cached_kernel import CachedKernel
from radixkv.runtime.device.ops.cuda.programmatic_launch import overlapping, power_of_two

MIN_RANKS = 16
"""Tensor cores need as many ranks: for lower ones the others are zero."""
_RANKS_AT_ONCE = 64
"""Ranks up to which a program of the first kernel computes all parts of a product, and so reads its inputs once."""
_PROGRAMS = 400
"""Most programs of the first kernel, if it splits inputs. An H200 has 132 multiprocessors."""
_SPLITS = {16: (16, 8, 4), 32: (4,)}
"""Numbers of splits beside 1, the highest first, by rows of a block.

Steps that are too long for graphs have blocks of 32 rows, and must not be the first to need a kernel: the one of 4
splits is compiled with the graphs of most tokens, the one without a split with the largest step, at the start."""


@dataclass(frozen=True)
class AdapterBlocks:
    """The rows of activations that adapters change, in blocks of rows of one adapter. The arrays are int32."""

    count: Tensor
    """[1]: number of blocks."""
    slots: Tensor
    """[n_max, or more]: slot of each block's adapter."""
    rows: Tensor
    """[n_max * n_rows, or more]: the row of activations at each place of the blocks; -1 where there is none."""
    n_rows: int
    """Rows of a block: 16 or 32. With 64 other instructions would be used, which need more ranks."""
    n_max: int
    """Most blocks that there can be."""
    n_programs: int
    """Blocks that are computed at the same time; each program goes on to further ones."""


@dataclass(frozen=True)
class LoraMatrices:
    """A and B of the matrices that a product stacks, of the adapters in all slots."""

    a: Tensor
    """Begins with A of slot 0: [parts, max_rank, n_in]."""
    b: Tensor
    """Begins with B of slot 0, transposed: [max_rank, n_out] of each part, one after the other."""
    ranks: Tensor
    """Begins with [parts] int32 of slot 0: the rank of each part, 0 where the adapter does not change it."""
    scales: Tensor
    """Likewise float32: what the part's product is multiplied by."""
    tiles: Tensor
    """[tiles, 4] int32: of each tile of outputs its part, the first and the number of outputs of the part, and
    the tile's first output within the part."""
    n_parts: int
    n_in: int
    max_rank: int
    """Rows of each matrix in memory."""
    columns: int
    """Outputs of a tile."""
    is_aligned: bool
    """Whether the outputs of all parts are multiples of 16."""
    slot_stride: int
    """Values from the matrices of one slot to those of the next."""
    table_stride: int
    """Likewise of ``ranks`` and ``scales``."""


def tile_columns(n_out: int) -> int:
    """Returns the outputs of a tile, for a product with so many."""
    return 256 if n_out >= 8192 else 128


def add_adapters(x: Tensor, matrices: LoraMatrices, blocks: AdapterBlocks, out: Tensor) -> None:
    """Computes ``out[row] += scale * B @ A @ x[row]`` for the rows of adapters, with the same bits every time.

    ``A @ x`` is summed in float32, scaled, and rounded before it is multiplied with B. The sum is rounded again.

    Args:
        x: [rows, in], in the dtype of the matrices. Its rows may be strided.
        matrices: of the product.
        blocks: which rows are whose.
        out: [rows, out], of the same dtype. Its rows may be strided.

    Memory while it runs: a float32 for each rank of each row, part and split of ``n_max`` blocks. These are 48 KB a
    block of 16 rows for three parts of rank 16 in 16 splits.
    """
    ranks, n_parts = power_of_two(max(matrices.max_rank, MIN_RANKS)), matrices.n_parts
    n_at_once = parts_at_once(n_parts, ranks)
    n_groups = n_parts // n_at_once
    n_splits = split_count(matrices.n_in, n_groups * blocks.n_programs, blocks.n_rows)
    sums = x.new_empty(blocks.n_max * n_parts * n_splits * blocks.n_rows * ranks, dtype=torch.float32)
    at_once = power_of_two(n_at_once * ranks)
    columns, n_stages = shrink_tile(at_once)
    _shrink[blocks.n_programs, n_groups * n_splits](
        x,
        matrices.a,
        matrices.ranks,
        blocks.count,
        blocks.slots,
        blocks.rows,
        sums,
        x.stride(0),
        matrices.n_in,
        matrices.slot_stride,
        matrices.table_stride,
        MAX_RANK=matrices.max_rank,
        PARTS=n_parts,
        SPLITS=n_splits,
        ROWS=blocks.n_rows,
        RANKS=ranks,
        PARTS_AT_ONCE=n_at_once,
        RANKS_AT_ONCE=at_once,
        COLUMNS=columns,
        num_warps=4,
        num_stages=n_stages,
        **overlapping(x),
    )
    _expand[blocks.n_programs, len(matrices.tiles)](
        sums,
        matrices.b,
        matrices.ranks,
        matrices.scales,
        matrices.tiles,
        blocks.count,
        blocks.slots,
        blocks.rows,
        out,
        out.stride(0),
        matrices.slot_stride,
        matrices.table_stride,
        MAX_RANK=matrices.max_rank,
        PARTS=n_parts,
        SPLITS=n_splits,
        ROWS=blocks.n_rows,
        RANKS=ranks,
        COLUMNS=matrices.columns,
        ALIGNED=matrices.is_aligned,
        num_warps=4,
        **overlapping(x),
    )


def parts_at_once(n_parts: int, ranks: int) -> int:
    """Returns how many parts a program of the first kernel computes: all, or one.

    Args:
        n_parts: matrices that the product stacks.
        ranks: of each, a power of two.
    """
    return n_parts if power_of_two(n_parts * ranks) <= _RANKS_AT_ONCE else 1


def split_count(n_in: int, n_programs: int, n_rows: int) -> int:
    """Returns into how many parts inputs are split, which have 128 or more on average.

    Parts are whole tiles of inputs. So the last ones may have none, and sums of zero.

    Args:
        n_in: inputs.
        n_programs: programs without a split.
        n_rows: rows of a block.
    """
    most = min(_PROGRAMS // n_programs, n_in // 128)
    return next((n_splits for n_splits in _SPLITS[n_rows] if n_splits <= most), 1)


def shrink_tile(ranks: int) -> tuple[int, int]:
    """Returns the inputs that a program of the first kernel takes at once, and how many such are in flight.

    Args:
        ranks: of all parts that it computes.
    """
    if ranks <= 32:
        return 256, 3
    return (128, 4) if ranks <= 64 else (64, 3)


@CachedKernel
@triton.jit
def _shrink(
    x: tl.tensor,
    a: tl.tensor,
    ranks: tl.tensor,
    count: tl.tensor,
    slots: tl.tensor,
    rows: tl.tensor,
    sums: tl.tensor,
    x_stride: tl.tensor,
    n_in: tl.tensor,
    slot_stride: tl.tensor,
    table_stride: tl.tensor,
    MAX_RANK: tl.constexpr,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    PARTS_AT_ONCE: tl.constexpr,
    RANKS_AT_ONCE: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Sums ``A @ x`` of blocks over some inputs: [blocks, PARTS, SPLITS, ROWS, RANKS] float32."""
    if OVERLAP:
        gdc_launch_dependents()
    first_part, split = tl.program_id(1) // SPLITS * PARTS_AT_ONCE, tl.program_id(1) % SPLITS
    n_split = tl.cdiv(n_in, COLUMNS * SPLITS) * COLUMNS
    first = split * n_split
    place, rank_of_all, columns = tl.arange(0, ROWS), tl.arange(0, RANKS_AT_ONCE), tl.arange(0, COLUMNS)
    part, index = first_part + rank_of_all // RANKS, rank_of_all % RANKS
    is_part = rank_of_all < PARTS_AT_ONCE * RANKS
    n_blocks = tl.load(count)
    if OVERLAP:
        gdc_wait()
    for block in range(tl.program_id(0), n_blocks, tl.num_programs(0)):
        slot = tl.load(slots + block).to(tl.int64)
        rank = tl.load(ranks + slot * table_stride + part, is_part, 0)
        if tl.max(rank, 0) > 0:
            row = tl.load(rows + block * ROWS + place)
            x_rows = x + row.to(tl.int64)[:, None] * x_stride
            a_rows = a + slot * slot_stride + (part * MAX_RANK + index)[None, :] * n_in
            product = tl.zeros([ROWS, RANKS_AT_ONCE], tl.float32)
            for begin in range(first, tl.minimum(first + n_split, n_in), COLUMNS):
                column = begin + columns
                inputs = tl.load(x_rows + column[None, :], (row >= 0)[:, None] & (column < n_in)[None, :], 0.0)
                matrix = tl.load(a_rows + column[:, None], (index < rank)[None, :] & (column < n_in)[:, None], 0.0)
                product = tl.dot(inputs, matrix, product, input_precision="ieee")  # of float32
            target = sums + ((block * PARTS + part) * SPLITS + split) * ROWS * RANKS + index
            tl.store(target[None, :] + place[:, None] * RANKS, product, is_part[None, :])


@CachedKernel
@triton.jit
def _expand(
    sums: tl.tensor,
    b: tl.tensor,
    ranks: tl.tensor,
    scales: tl.tensor,
    tiles: tl.tensor,
    count: tl.tensor,
    slots: tl.tensor,
    rows: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    slot_stride: tl.tensor,
    table_stride: tl.tensor,
    MAX_RANK: tl.constexpr,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGNED: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Adds ``scale * B @ sums`` to some outputs of blocks. Reads B before the sums are ready."""
    if OVERLAP:
        gdc_launch_dependents()
    tile = tiles + tl.program_id(1) * 4
    part, part_first, n_part, first = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    if ALIGNED:
        part_first, n_part, first = (
            tl.multiple_of(part_first, 16),
            tl.multiple_of(n_part, 16),
            tl.multiple_of(first, 16),
        )
    place, index, column = tl.arange(0, ROWS), tl.arange(0, RANKS), first + tl.arange(0, COLUMNS)
    is_column = (column < n_part)[None, :]
    n_blocks = tl.load(count)
    for block in range(tl.program_id(0), n_blocks, tl.num_programs(0)):
        slot = tl.load(slots + block).to(tl.int64)
        rank = tl.load(ranks + slot * table_stride + part)
        if rank > 0:
            matrix = tl.load(
                b + slot * slot_stride + part_first * MAX_RANK + index[:, None] * n_part + column[None, :],
                (index < rank)[:, None] & is_column,
                0.0,
            )
            scale = tl.load(scales + slot * table_stride + part)
            row = tl.load(rows + block * ROWS + place)
            if OVERLAP:
                gdc_wait()
            source = sums + (block * PARTS + part) * SPLITS * ROWS * RANKS
            source += place[:, None] * RANKS + index[None, :]
            product = tl.load(source)
            for split in tl.static_range(1, SPLITS):
                product += tl.load(source + split * ROWS * RANKS)
            added = tl.dot((product * scale).to(matrix.dtype), matrix, input_precision="ieee")
            target = out + row.to(tl.int64)[:, None] * out_stride + (part_first + column)[None, :]
            is_stored = (row >= 0)[:, None] & is_column
            total = tl.load(target, is_stored, 0.0).to(tl.float32) + added
            tl.store(target, total.to(out.dtype.element_ty), is_stored)
    if OVERLAP:
        gdc_wait()
