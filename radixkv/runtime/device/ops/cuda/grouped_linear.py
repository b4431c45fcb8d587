"""Grouped matrix products: rows in the order of their experts, each times the matrix of its expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixkv.runtime.device.ops.base import Fp8Rows
from radixkv.runtime.device.ops.cuda.activation import squared_positive
from radixkv.runtime.device.ops.cuda.cached_kernel import CachedKernel
from radixkv.runtime.device.ops.cuda.expert_routing import Routing
from radixkv.runtime.device.ops.cuda.programmatic_launch import overlapping
from radixkv.runtime.device.weights.fp8_matrix import BLOCK, Fp8Matrix
from radixkv.runtime.device.weights.layer_weights import LinearWeights

ExpertActivation = Literal["silu", "clamped_silu", "gelu_tanh", "relu2"]
"""See ``families.Activation``; ``relu2`` has no gate."""


@dataclass(frozen=True)
class GroupedTile:
    """Tile of a program."""

    rows: int
    """Pairs of a token and an expert, all of one expert."""
    columns: int
    """Rows of the expert's matrix that a program multiplies by.

    In a gated half these are rows of gate and up in turn, or so many of gate and so many of up if
    ``has_row_factors`` is true."""
    depth: int
    """Step along the inner dimension."""
    n_warps: int
    n_stages: int
    """Tiles in flight at once."""
    group: int = 8
    """Parts of row tiles whose programs for the same columns are consecutive, so that they share the weight in the
    cache. A part has ``rows`` rows."""


class GroupedTiles(NamedTuple):
    """Tiles of the two halves of a mixture; those of the routing have ``first.rows``."""

    first: GroupedTile
    second: GroupedTile


def grouped_tiles(
    n_pairs: int, n_experts: int, item_size: int, *, has_room: bool, has_blocks: bool = False
) -> GroupedTiles:
    """Returns the tiles of a mixture's products, chosen by the mean number of rows of an expert.

    - Up to 8 rows: most experts have one row tile. Narrow tiles give many programs that stream the weight.
    - Up to 64 rows: reading the weights still takes longest. A higher tile reads most of them once only.
    - More: tensor cores are the limit, and the largest tile that fits keeps them busy. In FP8 with scales of blocks
      a smaller one does, because the scales take registers. Its first half multiplies each row with two tiles
      of the weight, gate and up; a higher tile uses these bytes for more rows.

    The bounds are half of 16 and of 128 rows, because experts get unequal numbers of rows.
    Each number of tokens has one tile, so a row's bits depend on the number of rows in the step alone.

    Args:
        n_pairs: tokens times active experts.
        n_experts: of the layer.
        item_size: bytes of a value of the matrices: 1 in FP8; 4 is for tests only.
        has_room: whether a thread block may use 163 KB of shared memory, not only 99 KB.
        has_blocks: whether blocks of FP8 matrices have a scale each.
    """
    mean_rows = n_pairs / n_experts
    if item_size == 4:
        return _same(GroupedTile(16 if mean_rows <= 8 else 64, 64, 32, n_warps=4, n_stages=2))
    if item_size == 1:
        return _fp8_tiles(n_pairs, n_experts, has_room=has_room, has_blocks=has_blocks)
    if mean_rows <= 8:
        return _same(GroupedTile(16, 64, 128, n_warps=4, n_stages=5 if has_room else 4))
    if mean_rows <= 64:
        return _same(GroupedTile(64, 128, 64, n_warps=4, n_stages=4 if has_room else 3))
    if has_room:
        return _same(GroupedTile(128, 256, 64, n_warps=8, n_stages=3))
    return _same(GroupedTile(128, 128, 64, n_warps=8, n_stages=2))


def _same(tile: GroupedTile) -> GroupedTiles:
    return GroupedTiles(tile, tile)


def _fp8_tiles(n_pairs: int, n_experts: int, *, has_room: bool, has_blocks: bool) -> GroupedTiles:
    """Returns the fastest tiles on an H200 of those that were tried; steps are as deep as blocks.

    The shapes of Qwen3-30B-A3B and Qwen3.6-35B-A3B were measured, with scales of blocks. Three stages are enough
    for many programs, and two tokens have few. With many rows, scales of blocks are multiplied into each step's
    sums, which leaves too few registers for larger tiles. A program has columns of one block of the matrix then, so
    that each row's sums have one factor. See docs/decisions/0090-experts-of-many-rows-in-fp8.md.
    """
    mean_rows = n_pairs / n_experts
    if n_pairs <= 16:
        return _same(GroupedTile(16, 64, BLOCK, n_warps=4, n_stages=6))
    if mean_rows <= 8:
        return _same(GroupedTile(16, 128, BLOCK, n_warps=4, n_stages=3))
    if mean_rows <= 64:
        return _same(GroupedTile(32, 128, BLOCK, n_warps=4, n_stages=3))
    if has_blocks and has_room:
        second = GroupedTile(64, BLOCK, BLOCK, n_warps=4, n_stages=4)
        return GroupedTiles(GroupedTile(128, BLOCK, BLOCK, n_warps=8, n_stages=3), second)
    if has_blocks:
        return _same(GroupedTile(64, BLOCK, BLOCK, n_warps=4, n_stages=2))
    if has_room:
        return _same(GroupedTile(128, 256, BLOCK, n_warps=8, n_stages=3))
    return _same(GroupedTile(128, 128, BLOCK, n_warps=8, n_stages=2))


def has_row_factors(tile: GroupedTile, scale_unit: int, n_out: int, *, is_gated: bool) -> bool:
    """Returns whether a program's columns are in one block of the matrix, so that each row's sums have one factor.

    This is so for many rows. Gate and up are two products then, which needs whole blocks of each.

    Args:
        tile: from ``grouped_tiles``.
        scale_unit: rows of the matrix that share a scale; 0 without scales.
        n_out: rows of an expert's matrix.
        is_gated: whether the matrix has gate and up.
    """
    return scale_unit > 1 and tile.rows >= 64 and (not is_gated or n_out % (2 * scale_unit) == 0)


def grouped_linear(
    x: Tensor | Fp8Rows,
    weights: LinearWeights,
    routing: Routing,
    tile: GroupedTile,
    out: Tensor,
    activation: ExpertActivation | None = None,
) -> None:
    """Computes a half of each expert's MLP for its tokens: the first with ``activation``, else the second.

    Products and their biases are summed in float32 and rounded, then activated in float32 and rounded. The first
    half reads the rows of tokens.

    Args:
        x: [tokens, in] for the first half, else [pairs, in] in the order of ``routing.order``; contiguous. In FP8
            if the weight is, with a scale for each 128 values if that has blocks.
        weights: [experts, 2 * inner, in], gate first, or [experts, out, in], contiguous, with a bias or without.
            The first half has [experts, inner, in] where the activation has no gate.
        routing: of the tokens, with row tiles of a multiple of ``tile.rows``.
        tile: of this half, from ``grouped_tiles``.
        out: [pairs, inner] in the order of ``routing.order``, or [pairs, out] by the index of the pair; contiguous.
        activation: of the first half.
    """
    weight, bias = weights.weight, weights.bias
    if isinstance(x, Fp8Rows):
        assert isinstance(weight, Fp8Matrix)
        values, x_scales, matrix, scales = x.values, x.scales, weight.values, weight.scales
        scale_unit = BLOCK if weight.has_blocks else 1
    else:
        assert isinstance(weight, Tensor)
        values, x_scales, matrix, scales = x, x, weight, weight
        scale_unit = 0
    _, n_out, n_in = matrix.shape
    is_gated = activation not in (None, "relu2")
    row_factors = has_row_factors(tile, scale_unit, n_out, is_gated=is_gated)
    n_columns = n_out // 2 if row_factors and is_gated else n_out
    assert routing.tile_rows % tile.rows == 0, "a row tile has whole parts"
    n_tiles, n_parts = routing.tiles.shape[1], routing.tile_rows // tile.rows
    _multiply_grouped[(n_tiles * n_parts * -(-n_columns // tile.columns),)](
        values,
        matrix,
        matrix if bias is None else bias,
        x_scales,
        scales,
        out,
        routing.order,
        routing.tiles,
        n_tiles,
        n_out,
        n_in,
        x_scales.stride(1),
        N_ACTIVE=routing.expert_weights.shape[1],
        PARTS=n_parts,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        STAGES=tile.n_stages,
        GROUP=tile.group,
        IS_WHOLE=n_in % tile.depth == 0,
        SCALE_UNIT=scale_unit,
        HAS_BIAS=bias is not None,
        IS_FIRST=activation is not None,
        IS_GATED=is_gated,
        ROW_FACTORS=row_factors,
        CLAMPS=activation == "clamped_silu",
        IS_GELU=activation == "gelu_tanh",
        num_warps=tile.n_warps,
        **overlapping(out),
    )


@CachedKernel
@triton.jit(do_not_specialize=["n_tiles", "x_group_stride"])
def _multiply_grouped(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    x_scales: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    n_tiles: tl.tensor,
    n_out: tl.tensor,
    n_in: tl.tensor,
    x_group_stride: tl.tensor,
    N_ACTIVE: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    SCALE_UNIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_FIRST: tl.constexpr,
    IS_GATED: tl.constexpr,
    ROW_FACTORS: tl.constexpr,
    CLAMPS: tl.constexpr,
    IS_GELU: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """With few rows, the weight's rows are the product's rows: tensor cores take 64 of these and 16 columns.

    A program has one of ``PARTS`` parts of a row tile. ``ROW_FACTORS`` is what ``has_row_factors`` returns; gate
    and up are two products then.
    """
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    SPLITS: tl.constexpr = ROW_FACTORS and IS_GATED
    tl.static_assert(not ROW_FACTORS or SCALE_UNIT % COLUMNS == 0)
    n_columns = n_out // 2 if SPLITS else n_out
    n_group_programs = GROUP * tl.cdiv(n_columns, COLUMNS)
    first_part = tl.program_id(0) // n_group_programs * GROUP
    n_group_parts = tl.minimum(n_tiles * PARTS - first_part, GROUP)
    tile_part = first_part + tl.program_id(0) % n_group_programs % n_group_parts
    column_tile = tl.program_id(0) % n_group_programs // n_group_parts
    tile = tile_part // PARTS
    expert = tl.load(tiles + tile)
    first = tl.load(tiles + n_tiles + tile) + tile_part % PARTS * ROWS
    end = tl.load(tiles + 2 * n_tiles + tile)
    if first >= end:  # both are 0 of tiles that are not needed
        return
    position = first + tl.arange(0, ROWS)
    is_row = position < end
    # Rows and columns beyond the end repeat others and are not stored: loads without masks are faster.
    x_row = tl.where(is_row, position, first)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    weight_row = tl.where(column < n_columns, column, 0)
    if IS_FIRST:
        x_row = tl.load(order + x_row) // N_ACTIVE
    if IS_GATED and not SPLITS:
        weight_row = weight_row // 2 + weight_row % 2 * (n_out // 2)
    if ROW_FACTORS:
        block_row = expert * tl.cdiv(n_out, SCALE_UNIT) + column_tile * COLUMNS // SCALE_UNIT
        block_row = block_row * tl.cdiv(n_in, SCALE_UNIT)
        up_row = block_row + n_columns // SCALE_UNIT * tl.cdiv(n_in, SCALE_UNIT)
    elif SCALE_UNIT > 1:
        block_row = expert * tl.cdiv(n_out, SCALE_UNIT) + weight_row // SCALE_UNIT
        block_row = block_row * tl.cdiv(n_in, SCALE_UNIT)
    weight_row = expert.to(tl.int64) * n_out + weight_row
    depth = tl.arange(0, DEPTH)
    x_source = x + x_row.to(tl.int64)[:, None] * n_in + depth[None, :]
    weight_source = weight + weight_row[:, None] * n_in + depth[None, :]
    up_source = weight_source + n_columns * n_in
    sums = tl.zeros([COLUMNS, ROWS] if ROWS < 64 else [ROWS, COLUMNS], tl.float32)
    up_sums = sums
    for start in tl.range(0, n_in, DEPTH, num_stages=STAGES):
        if IS_WHOLE:
            matrix = tl.load(weight_source + start)
            part = tl.load(x_source + start)
        else:
            is_inside = (start + depth < n_in)[None, :]
            matrix = tl.load(weight_source + start, is_inside, 0.0)
            part = tl.load(x_source + start, is_inside, 0.0)
        if SCALE_UNIT > 1:
            row_scale = tl.load(x_scales + x_row + start // SCALE_UNIT * x_group_stride)
            scale = tl.load(scales + block_row + start // SCALE_UNIT)
            if ROWS < 64:
                sums += tl.dot(matrix, part.T) * scale[:, None] * row_scale[None, :]
            elif ROW_FACTORS:
                sums += tl.dot(part, matrix.T) * (row_scale * scale)[:, None]
            else:
                sums += tl.dot(part, matrix.T) * row_scale[:, None] * scale[None, :]
            if SPLITS:
                is_inside = (start + depth < n_in)[None, :]
                matrix = tl.load(up_source + start) if IS_WHOLE else tl.load(up_source + start, is_inside, 0.0)
                scale = tl.load(scales + up_row + start // SCALE_UNIT)
                up_sums += tl.dot(part, matrix.T) * (row_scale * scale)[:, None]
        elif ROWS < 64:
            sums = tl.dot(matrix, part.T, sums, input_precision="ieee")
        else:
            sums = tl.dot(part, matrix.T, sums, input_precision="ieee")
    if ROWS < 64:
        sums = sums.T
    if SCALE_UNIT == 1:
        sums *= tl.load(x_scales + x_row)[:, None] * tl.load(scales + weight_row)[None, :]
    if HAS_BIAS:
        sums += tl.load(bias + weight_row).to(tl.float32)[None, :]
        if SPLITS:
            up_sums += tl.load(bias + weight_row + n_columns).to(tl.float32)[None, :]
    product = sums.to(out.dtype.element_ty)
    if IS_GATED:
        if SPLITS:
            gate, up = product.to(tl.float32), up_sums.to(product.dtype).to(tl.float32)
        else:
            gate, up = tl.split(tl.reshape(product.to(tl.float32), [ROWS, COLUMNS // 2, 2]))
        if CLAMPS:
            gate = tl.minimum(gate, 7.0, tl.PropagateNan.ALL)
            up = tl.minimum(tl.maximum(up, -7.0, tl.PropagateNan.ALL), 7.0, tl.PropagateNan.ALL)
            activated = gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
        elif IS_GELU:  # tanh as a sigmoid: the slope is 2 * sqrt(2 / pi)
            slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
            activated = gate / (1.0 + tl.exp(-slope)) * up
        else:
            activated = gate / (1.0 + tl.exp(-gate)) * up
        OUT_COLUMNS: tl.constexpr = COLUMNS if SPLITS else COLUMNS // 2
        out_column = column_tile * OUT_COLUMNS + tl.arange(0, OUT_COLUMNS)
        target = out + position.to(tl.int64)[:, None] * (n_out // 2) + out_column[None, :]
        tl.store(target, activated.to(product.dtype), is_row[:, None] & (out_column < n_out // 2)[None, :])
    elif IS_FIRST:
        activated = squared_positive(product.to(tl.float32))
        target = out + position.to(tl.int64)[:, None] * n_out + column[None, :]
        tl.store(target, activated.to(product.dtype), is_row[:, None] & (column < n_out)[None, :])
    else:
        pair = tl.load(order + position, is_row, 0)
        target = out + pair.to(tl.int64)[:, None] * n_out + column[None, :]
        tl.store(target, product, is_row[:, None] & (column < n_out)[None, :])
