"""Routing of tokens to experts: which compute each token, and in which order their products are computed.

Everything stays on the GPU, and launches depend on the number of tokens only, so that CUDA graphs can capture them.
There are no atomics: the same logits always give the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixkv.runtime.device.ops.cuda.cached_kernel import CachedKernel
from radixkv.runtime.device.ops.cuda.programmatic_launch import overlapping, power_of_two, warps_for

_BLOCK_VALUES, _MANY_BLOCK_VALUES = 4096, 16384
"""Logits per program, of few tokens and of many: a program reads the counts of all others.

With 256 experts both kernels take 132 and 65 µs for 8,192 tokens on an H200, and 17 and 51 for 256."""
_MANY_VALUES = 1 << 19
"""Logits from which on they are many."""
_TILES, _BLOCKS = 32, 32
"""Row tiles, and counts of other blocks of tokens, that a program handles at a time."""


_LEAST_SUM = tl.constexpr(1e-20)
"""Is added to the sum of a token's sigmoids before they are divided by it, as in Transformers."""


@dataclass(frozen=True)
class SigmoidScores:
    """How a router chooses experts by sigmoids of its logits."""

    correction: Tensor
    """[experts] float32: what is added to the sigmoids to choose experts."""
    scale: float
    """Multiplier of the experts' weights."""


@dataclass(frozen=True)
class Routing:
    """The experts of each token, and the order of pairs of a token and one of its experts.

    Pair ``token * n_active + rank`` is a token with the ``rank``-th of its experts in the order of their indices.
    """

    expert_weights: Tensor
    """[tokens, active]: by which each expert's output is multiplied."""
    order: Tensor
    """[pairs] int32: the pairs, by expert and then by token."""
    tiles: Tensor
    """[3, tiles] int32: the expert of each row tile, or -1 if the tile is not needed; the position of its first
    pair in ``order``; and the position behind the expert's last pair, which may be beyond the tile. Both are 0 of a
    tile that is not needed."""
    tile_rows: int
    """Most pairs of a tile."""


def most_tiles(n_pairs: int, n_experts: int, tile_rows: int) -> int:
    """Returns how many row tiles ``n_pairs`` need at most, whichever experts are chosen."""
    return (n_pairs + min(n_pairs, n_experts) * (tile_rows - 1)) // tile_rows


def route(
    logits: Tensor,
    n_active: int,
    tile_rows: int,
    *,
    normalizes: bool,
    dtype: torch.dtype | None = None,
    sigmoid: SigmoidScores | None = None,
    scales: Tensor | None = None,
) -> Routing:
    """Chooses the experts of each token by their logits, and orders the pairs by expert.

    The weights are the softmax over all experts in float32, or sigmoids, rounded once. Of equal logits the one with
    the lower index is chosen. A token with a logit that is NaN, or positive infinity with a softmax, gets weights
    that are NaN.

    Launches one kernel for up to 4,096 logits (32 tokens of 128 experts), and two for more.

    Args:
        logits: [tokens, experts] bfloat16, float16 or float32, contiguous.
        n_active: experts of each token.
        tile_rows: most pairs of a tile.
        normalizes: whether a token's weights are divided by their sum.
        dtype: of the weights; None: that of ``logits``.
        sigmoid: how experts are chosen by sigmoids; None: by a softmax.
        scales: [experts], by which weights are multiplied after that.
    """
    n_tokens, n_experts = logits.shape
    block_experts = power_of_two(max(n_experts, 16))
    block_tokens = _block_tokens(n_tokens, block_experts)
    n_blocks = -(-n_tokens // block_tokens)
    n_pairs = n_tokens * n_active
    n_tiles = most_tiles(n_pairs, n_experts, tile_rows)
    expert_weights = logits.new_empty(n_tokens, n_active, dtype=dtype)
    order, tiles = _integers(logits, n_pairs), _integers(logits, 3, n_tiles)
    is_alone = n_blocks == 1
    chosen = order if is_alone else _integers(logits, n_pairs)
    counts = order if is_alone else _integers(logits, n_blocks, block_experts)
    sizes = {"N_ACTIVE": n_active, "ROWS": tile_rows, "TOKENS": block_tokens, "EXPERTS": block_experts}
    options = {"TILES": _TILES, "num_warps": max(warps_for(block_tokens * block_experts), 4), **overlapping(logits)}
    _choose_experts[(n_blocks,)](
        logits,
        logits if sigmoid is None else sigmoid.correction,
        expert_weights,
        chosen,
        counts,
        order,
        tiles,
        logits if scales is None else scales,
        n_tokens,
        n_experts,
        n_tiles,
        1.0 if sigmoid is None else sigmoid.scale,
        IS_SIGMOID=sigmoid is not None,
        NORMALIZES=normalizes,
        HAS_SCALES=scales is not None,
        IS_ALONE=is_alone,
        **sizes,
        **options,
    )
    if not is_alone:
        _order_pairs[(n_blocks,)](
            chosen, counts, order, tiles, n_tokens, n_tiles, **sizes, BLOCKS=_BLOCKS, **options
        )
    return Routing(expert_weights, order, tiles, tile_rows)


def _block_tokens(n_tokens: int, block_experts: int) -> int:
    """Returns one of four numbers of tokens per program: each other one would compile other kernels."""
    values = _MANY_BLOCK_VALUES if n_tokens * block_experts >= _MANY_VALUES else _BLOCK_VALUES
    most = max(values // block_experts, 1)
    return next((n for n in (1, 16) if n_tokens <= n <= most), most)


def _integers(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.int32)


@CachedKernel
@triton.jit(do_not_specialize=["n_tokens", "n_tiles"])
def _choose_experts(
    logits: tl.tensor,
    correction: tl.tensor,
    expert_weights: tl.tensor,
    chosen: tl.tensor,
    counts: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    scales: tl.tensor,
    n_tokens: tl.tensor,
    n_experts: tl.tensor,
    n_tiles: tl.tensor,
    scale: tl.tensor,
    N_ACTIVE: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    NORMALIZES: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TILES: tl.constexpr,
    IS_ALONE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Chooses the experts of a block of tokens, and counts the tokens of each. A block alone orders them, too."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, EXPERTS)
    is_token, is_expert = (token < n_tokens)[:, None], (expert < n_experts)[None, :]
    source = logits + token.to(tl.int64)[:, None] * n_experts + expert[None, :]
    logit = tl.load(source, is_token & is_expert, 0.0).to(tl.float32)
    # Every key that can be taken is finite, so that exactly N_ACTIVE are. The maximum of NaN and a number is the
    # number.
    key = logit
    if IS_SIGMOID:
        value = 1.0 / (1.0 + tl.exp(-logit))
        key = value + tl.load(correction + expert, expert < n_experts, 0.0)[None, :]
    key = tl.minimum(tl.maximum(key, -3e38), 3e38)
    key = tl.where(is_expert, key, float("-inf"))
    for _ in range(N_ACTIVE):
        best = tl.argmax(key, 1)
        key = tl.where(expert[None, :] == best[:, None], float("-inf"), key)
    is_chosen = (key == float("-inf")) & is_expert & is_token
    least_sum = 0.0
    if IS_SIGMOID:
        least_sum = _LEAST_SUM
    else:
        logit = tl.where(is_expert, logit, float("-inf"))
        value = tl.exp(logit - tl.max(logit, 1)[:, None])
        value = value / tl.sum(value, 1)[:, None]
    if NORMALIZES:
        value = value / (tl.sum(tl.where(is_chosen, value, 0.0), 1) + least_sum)[:, None]
    if IS_SIGMOID:
        value = value * scale
    if HAS_SCALES:
        value *= tl.load(scales + expert, expert < n_experts, 0.0).to(tl.float32)[None, :]
    pair = token[:, None] * N_ACTIVE + tl.cumsum(is_chosen.to(tl.int32), 1) - 1
    tl.store(expert_weights + pair, value.to(expert_weights.dtype.element_ty), is_chosen)
    count = tl.sum(is_chosen.to(tl.int32), 0)
    if IS_ALONE:
        _place(is_chosen, pair, tl.zeros_like(count), count, order, tiles, n_tiles, ROWS, EXPERTS, TILES)
    else:
        tl.store(chosen + pair, tl.broadcast_to(expert[None, :], [TOKENS, EXPERTS]), is_chosen)
        tl.store(counts + tl.program_id(0) * EXPERTS + expert, count)


@CachedKernel
@triton.jit(do_not_specialize=["n_tokens", "n_tiles"])
def _order_pairs(
    chosen: tl.tensor,
    counts: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    n_tokens: tl.tensor,
    n_tiles: tl.tensor,
    N_ACTIVE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCKS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Orders the pairs of a block of tokens behind those of the blocks before it."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, EXPERTS)
    is_chosen = tl.zeros([TOKENS, EXPERTS], tl.int1)
    for rank in range(N_ACTIVE):
        one = tl.load(chosen + token * N_ACTIVE + rank, token < n_tokens, -1)
        is_chosen = is_chosen | (one[:, None] == expert[None, :])
    before, total = tl.zeros([EXPERTS], tl.int32), tl.zeros([EXPERTS], tl.int32)
    for first in range(0, tl.num_programs(0), BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        source = counts + block[:, None] * EXPERTS + expert[None, :]
        count = tl.load(source, (block < tl.num_programs(0))[:, None], 0)
        before += tl.sum(tl.where((block < tl.program_id(0))[:, None], count, 0), 0)
        total += tl.sum(count, 0)
    pair = token[:, None] * N_ACTIVE + tl.cumsum(is_chosen.to(tl.int32), 1) - 1
    _place(is_chosen, pair, before, total, order, tiles, n_tiles, ROWS, EXPERTS, TILES)


@triton.jit
def _place(
    is_chosen: tl.tensor,
    pair: tl.tensor,
    before: tl.tensor,
    total: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    n_tiles: tl.tensor,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    """Stores the order of a block's pairs, and a share of the tiles.

    Args:
        is_chosen: [TOKENS, EXPERTS]: whether a token chose an expert.
        pair: [TOKENS, EXPERTS]: the pair's index, where it did.
        before: [EXPERTS]: pairs of each expert in the blocks before this one.
        total: [EXPERTS]: pairs of each expert in all blocks.
        order, tiles, n_tiles: see ``Routing``.
    """
    end = tl.cumsum(total, 0)
    first = end - total
    position = (first + before)[None, :] + tl.cumsum(is_chosen.to(tl.int32), 0) - 1
    tl.store(order + position, pair, is_chosen)
    n_expert_tiles = (total + ROWS - 1) // ROWS
    tile_end = tl.cumsum(n_expert_tiles, 0)
    tile_start = tile_end - n_expert_tiles
    expert = tl.arange(0, EXPERTS)
    for first_tile in range(tl.program_id(0) * TILES, n_tiles, tl.num_programs(0) * TILES):
        tile = first_tile + tl.arange(0, TILES)
        is_own = (tile[:, None] >= tile_start[None, :]) & (tile[:, None] < tile_end[None, :])
        own_first = first[None, :] + (tile[:, None] - tile_start[None, :]) * ROWS
        is_tile = tile < n_tiles
        tl.store(tiles + tile, tl.sum(tl.where(is_own, expert[None, :] + 1, 0), 1) - 1, is_tile)
        tl.store(tiles + n_tiles + tile, tl.sum(tl.where(is_own, own_first, 0), 1), is_tile)
        tl.store(tiles + 2 * n_tiles + tile, tl.sum(tl.where(is_own, end[None, :], 0), 1), is_tile)
