"""The kernels that draw tokens, with random numbers that depend only on a request's seed and the token's index."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from radixkv.runtime.device.ops.cuda.programmatic_launch import power_of_two
from radixkv.runtime.device.sampling.cuda.draw_settings import MAX_LISTED, DrawSettings
from radixkv.runtime.device.sampling.cuda.softmax_parts import (
    PART,
    load_values,
    parts_width,
    weigh_parts,
    weights_of,
)
from radixkv.runtime.device.sampling.cuda.top_tokens import list_largest

SETTINGS = ("targets", "scales", "floors", "shares", "top_ks", "seeds", "indexes")
"""Kernel arguments that are slices of one buffer, at any alignment."""
_MAX_ROUNDS: tl.constexpr = tl.constexpr(1000)
"""Most rounds of a draw, which would not end if weights are NaN."""
_ZERO_KEY: tl.constexpr = tl.constexpr(0x80000000)
"""Key of positive zero, see ``_float_of``."""
_MIN_KEY: tl.constexpr = tl.constexpr(0x00800000)
"""Key of the lowest finite number."""
_N_BITS = {torch.bfloat16: 16, torch.float16: 20, torch.float32: 32}
"""Leading bits of a float32 that distinguish the values of a dtype, rounded up to an even number."""


def draw_listed(values: Tensor, settings: DrawSettings, width: int, tokens: Tensor) -> None:
    """Draws from the ``top_k`` likeliest tokens of each row; three launches.

    ``min_p`` keeps tokens of at least that weight, then ``top_p`` the fewest tokens that reach that share.

    Args:
        values: [any, vocab], any float dtype.
        settings: [n], with ``top_k`` of at least 1.
        width: at least the largest ``top_k``, at most ``MAX_LISTED``.
        tokens: [any] int32; tokens at ``settings.targets`` are written.
    """
    ids, largest = list_largest(values, settings.sources, settings.top_ks, width)
    # Equally wide for all rows, so that sums have the same bits whatever else is in the batch.
    _draw_listed[(settings.n_rows,)](
        ids,
        largest,
        *settings[1:],
        tokens,
        width,
        BLOCK=power_of_two(MAX_LISTED),
        num_warps=1,
    )


def draw_unlisted(values: Tensor, settings: DrawSettings, tokens: Tensor) -> None:
    """Draws from all tokens of each row, or from more than ``MAX_LISTED``; two launches.

    Nothing is sorted. Tokens of equal weight are kept or dropped together. ``top_p`` keeps tokens for which the sum
    of all heavier ones is below the share; ``top_k`` keeps tokens with fewer than ``top_k`` heavier ones. A drawn
    token outside ``top_p`` is rejected, and another is drawn from the heavier ones; mostly the first is accepted.
    ``top_k`` reads a row of bfloat16 8 times, of float16 10 times and of float32 16 times.

    Args:
        values: [any, vocab], bfloat16, float16 or float32.
        settings: [n]; ``top_k`` 0 keeps all tokens.
        tokens: [any] int32; tokens at ``settings.targets`` are written.
    """
    parts = weigh_parts(values, settings.sources, settings.scales)
    size = values.shape[1]
    width = parts_width(size)
    _draw_unlisted[(settings.n_rows,)](
        values,
        parts,
        *settings,
        tokens,
        values.stride(0),
        parts.shape[2],
        size,
        N_PARTS=width,
        SIZE=PART.value,
        STEP=max(PART.value // width, 16),
        N_BITS=_N_BITS[values.dtype],
        num_warps=8,
    )


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=SETTINGS)
def _draw_listed(
    ids: tl.tensor,
    values: tl.tensor,
    targets: tl.tensor,
    scales: tl.tensor,
    floors: tl.tensor,
    shares: tl.tensor,
    top_ks: tl.tensor,
    seeds: tl.tensor,
    indexes: tl.tensor,
    tokens: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    indices = tl.arange(0, BLOCK)
    listed = tl.load(values + row * width + indices, indices < tl.load(top_ks + row), float("-inf"))
    weights = weights_of(listed, tl.load(values + row * width), tl.load(scales + row))
    weights = tl.where(weights > tl.load(floors + row), weights, 0.0)
    cumulative = tl.cumsum(weights, 0)
    share = tl.load(shares + row)
    if share < 1.0:
        n_kept = 1 + tl.sum((cumulative < share * tl.sum(weights, 0)).to(tl.int32), 0)
        weights = tl.where(indices < n_kept, weights, 0.0)
    uniform, _ = _uniforms(tl.load(seeds + row), tl.load(indexes + row), 0)
    index = _draw_index(weights, uniform)
    tl.store(tokens + tl.load(targets + row), tl.load(ids + row * width + index))


@triton.jit(do_not_specialize_on_alignment=["sources", *SETTINGS])
def _draw_unlisted(
    values: tl.tensor,
    parts: tl.tensor,
    sources: tl.tensor,
    targets: tl.tensor,
    scales: tl.tensor,
    floors: tl.tensor,
    shares: tl.tensor,
    top_ks: tl.tensor,
    seeds: tl.tensor,
    indexes: tl.tensor,
    tokens: tl.tensor,
    stride: tl.tensor,
    n_parts: tl.tensor,
    size: tl.tensor,
    N_PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    STEP: tl.constexpr,
    N_BITS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    values += tl.load(sources + row).to(tl.int64) * stride
    scale = tl.load(scales + row)
    part_ids = tl.arange(0, N_PARTS)
    maxima = tl.load(parts + 2 * row * n_parts + part_ids, part_ids < n_parts, float("-inf"))
    sums = tl.load(parts + (2 * row + 1) * n_parts + part_ids, part_ids < n_parts, 0.0)
    top = tl.max(maxima, 0)
    sums *= weights_of(maxima, top, scale)
    bound = tl.load(floors + row)
    top_k = tl.load(top_ks + row)
    if top_k > 0:
        bound = tl.maximum(bound, _bound_of(values, top, scale, top_k, size, N_PARTS, SIZE, STEP, N_BITS))
    if bound > 0.0:
        sums = _above(values, top, scale, bound, size, N_PARTS, SIZE, STEP)
    seed = tl.load(seeds + row)
    index = tl.load(indexes + row)
    token, weight = _draw(values, top, scale, bound, sums, seed, index, 0, size, SIZE)
    share = tl.load(shares + row)
    if share < 1.0:
        share_sum = share * tl.sum(sums, 0)
        sums = _above(values, top, scale, weight, size, N_PARTS, SIZE, STEP)
        n_rounds = 1
        heavier = tl.sum(sums, 0)
        while (heavier >= share_sum) & (heavier > 0.0) & (n_rounds < _MAX_ROUNDS):
            token, weight = _draw(values, top, scale, weight, sums, seed, index, n_rounds, size, SIZE)
            sums = _above(values, top, scale, weight, size, N_PARTS, SIZE, STEP)
            heavier = tl.sum(sums, 0)
            n_rounds += 1
    tl.store(tokens + tl.load(targets + row), token)


@triton.jit
def _bound_of(
    values: tl.tensor,
    top: tl.tensor,
    scale: tl.tensor,
    top_k: tl.tensor,
    size: tl.tensor,
    N_PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    STEP: tl.constexpr,
    N_BITS: tl.constexpr,
) -> tl.tensor:
    """Returns the largest number that at least ``top_k`` weights exceed; 0 if fewer weights are above 0.

    It is the float just below the weight of the ``top_k``-th largest value. A search finds that value's key: each
    pass over the row determines two bits, the highest first. All values agree in the bits after ``N_BITS``.
    """
    one = (top_k * 0 + 1).to(tl.uint32)
    key = one - one
    for step in range(N_BITS // 2):
        unit = one << tl.cast(30 - 2 * step, tl.uint32)
        n_1, n_2, n_3 = _counts_from(values, key, unit, size, N_PARTS, SIZE, STEP)
        key += unit * ((n_1 >= top_k).to(tl.uint32) + (n_2 >= top_k).to(tl.uint32) + (n_3 >= top_k).to(tl.uint32))
    is_negative = key < _ZERO_KEY
    key = tl.where(is_negative, key | (0xFFFFFFFF >> N_BITS), key)
    weight = weights_of(_float_of(key), top, scale).to(tl.int32, bitcast=True)
    bound = tl.maximum(weight - 1, 0).to(tl.float32, bitcast=True)
    return tl.where(key < _MIN_KEY, 0.0, bound)


@triton.jit
def _counts_from(
    values: tl.tensor,
    key: tl.tensor,
    unit: tl.tensor,
    size: tl.tensor,
    N_PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    STEP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Counts the values whose key is at least ``key`` plus one, two or three units; reads the row once."""
    counts_1 = tl.zeros((N_PARTS, STEP), tl.int32)
    counts_2 = tl.zeros((N_PARTS, STEP), tl.int32)
    counts_3 = tl.zeros((N_PARTS, STEP), tl.int32)
    minimum_1 = _float_of(key + unit)
    minimum_2 = _float_of(key + unit + unit)
    minimum_3 = _float_of(key + unit + unit + unit)
    first_ids = tl.arange(0, N_PARTS)[:, None] * SIZE + tl.arange(0, STEP)[None, :]
    for first in range(0, SIZE, STEP):
        part_values = load_values(values, first_ids + first, size)
        counts_1 += (part_values >= minimum_1).to(tl.int32)
        counts_2 += (part_values >= minimum_2).to(tl.int32)
        counts_3 += (part_values >= minimum_3).to(tl.int32)
    return tl.sum(tl.sum(counts_1, 1), 0), tl.sum(tl.sum(counts_2, 1), 0), tl.sum(tl.sum(counts_3, 1), 0)


@triton.jit
def _float_of(key: tl.tensor) -> tl.tensor:
    """Returns the float of a key.

    Keys have the order of their floats: a key is the float's bits, with the sign bit flipped for a positive float
    and all bits flipped for a negative one.
    """
    return tl.where(key < _ZERO_KEY, key ^ 0xFFFFFFFF, key ^ _ZERO_KEY).to(tl.float32, bitcast=True)


@triton.jit
def _above(
    values: tl.tensor,
    top: tl.tensor,
    scale: tl.tensor,
    bound: tl.tensor,
    size: tl.tensor,
    N_PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    STEP: tl.constexpr,
) -> tl.tensor:
    """Returns each part's sum of weights above ``bound``; reads the row once."""
    sums = tl.zeros((N_PARTS, STEP), tl.float32)
    first_ids = tl.arange(0, N_PARTS)[:, None] * SIZE + tl.arange(0, STEP)[None, :]
    for first in range(0, SIZE, STEP):
        weights = weights_of(load_values(values, first_ids + first, size), top, scale)
        sums += tl.where(weights > bound, weights, 0.0)
    return tl.sum(sums, 1)


@triton.jit
def _draw(
    values: tl.tensor,
    top: tl.tensor,
    scale: tl.tensor,
    bound: tl.tensor,
    sums: tl.tensor,
    seed: tl.tensor,
    index: tl.tensor,
    n_rounds: tl.tensor,
    size: tl.tensor,
    SIZE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Draws a token of weight above ``bound``, first its part, then its index there. Returns token and weight."""
    for_part, for_index = _uniforms(seed, index, n_rounds)
    part = _draw_index(sums, for_part)
    indices = tl.arange(0, SIZE)
    weights = weights_of(load_values(values, part * SIZE + indices, size), top, scale)
    index_in_part = _draw_index(tl.where(weights > bound, weights, 0.0), for_index)
    return part * SIZE + index_in_part, tl.sum(tl.where(indices == index_in_part, weights, 0.0), 0)


@triton.jit
def _draw_index(weights: tl.tensor, uniform: tl.tensor) -> tl.tensor:
    """Returns the index where the cumulative weight exceeds a share in [0, 1) of the total.

    The weight there is never 0. Rounding of tree sums can leave no such index; then it is the last one with a
    weight.
    """
    indices = tl.arange(0, weights.shape[0])
    is_above = (tl.cumsum(weights, 0) > uniform * tl.sum(weights, 0)) & (weights > 0.0)
    last = tl.max(tl.where(weights > 0.0, indices, 0), 0)
    return tl.min(tl.where(is_above, indices, last), 0)


@triton.jit
def _uniforms(seed: tl.tensor, index: tl.tensor, n_rounds: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Returns the two random numbers of ``settings.uniforms``."""
    zero = index * 0
    first, second, _, _ = tl.philox(seed, index, zero + n_rounds, zero, zero)
    return tl.uint_to_uniform_float(first), tl.uint_to_uniform_float(second)
