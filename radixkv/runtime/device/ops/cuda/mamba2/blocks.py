"""What the blocks of prompts contribute to a layer of Mamba2, all computed beside each other."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixkv.runtime.device.model_config.states import Mamba2Config, RecurrentConfig
from radixkv.runtime.device.ops.base import BLOCK_TOKENS, BlockArrays
from radixkv.runtime.device.ops.cuda.cached_kernel import CachedKernel
from radixkv.runtime.device.ops.cuda.delta_net.sequences import block_range, read_row
from radixkv.runtime.device.ops.cuda.mamba2.time_steps import time_step
from radixkv.runtime.device.ops.cuda.programmatic_launch import overlapping, power_of_two


class BlockParts(NamedTuple):
    """What the recurrence over blocks reads of them, in float32. Tokens that a block lacks have time steps of 0."""

    scores: Tensor
    """[blocks, groups, 64, 64]: products of each token's C with the B of all tokens."""
    steps: Tensor
    """[blocks, heads, 64]: time steps."""
    decays: Tensor
    """[blocks, heads, 64]: logarithm of the decay from the block's begin to each token, with its own."""


def block_bytes(config: RecurrentConfig) -> int:
    """Returns the bytes of the parts of one block."""
    n_values = config.n_key_heads * BLOCK_TOKENS + 2 * config.n_value_heads
    return n_values * BLOCK_TOKENS * torch.float32.itemsize


def block_parts(
    convolved: Tensor,
    projected: Tensor,
    log_decay: Tensor,
    step_bias: Tensor,
    prompts: BlockArrays[Tensor],
    config: RecurrentConfig,
    mamba2: Mamba2Config,
) -> BlockParts:
    """Computes the parts of the blocks of Mamba2's dual form (Dao and Gu, arXiv 2405.21060, section 6).

    Products have operands in the dtype of ``convolved`` and sums in float32. A block's bits depend on its tokens
    alone.

    Args:
        convolved: [tokens, channels], contiguous: x, B and C.
        projected: [tokens, ...], of the same dtype: what ``RecurrentWeights.inputs`` gives; rows may be strided.
        log_decay, step_bias: [heads] float32.
        prompts: rows and blocks.
        config: state sizes are powers of two, from 16 on.
        mamba2: of ``config``.
    """
    n_groups, n_heads, n_blocks = config.n_key_heads, config.n_value_heads, len(prompts.blocks)

    def empty(*shape: int) -> Tensor:
        return convolved.new_empty(n_blocks, *shape, dtype=torch.float32)

    parts = BlockParts(
        empty(n_groups, BLOCK_TOKENS, BLOCK_TOKENS), empty(n_heads, BLOCK_TOKENS), empty(n_heads, BLOCK_TOKENS)
    )
    _compute_blocks[n_blocks, n_groups](
        convolved,
        projected,
        log_decay,
        step_bias,
        *prompts,
        *parts,
        projected.stride(0),
        *mamba2.time_step_limits,
        N_GROUPS=n_groups,
        N_HEADS=n_heads,
        KEY_DIM=config.key_dim,
        VALUE_DIM=config.value_dim,
        HEADS=power_of_two(n_heads // n_groups),
        BLOCK=BLOCK_TOKENS,
        num_warps=4,
        **overlapping(convolved),
    )
    return parts


@CachedKernel
@triton.jit(do_not_specialize_on_alignment=["rows", "blocks"])
def _compute_blocks(
    convolved: tl.tensor,
    projected: tl.tensor,
    log_decay: tl.tensor,
    step_bias: tl.tensor,
    rows: tl.tensor,
    blocks: tl.tensor,
    scores: tl.tensor,
    steps: tl.tensor,
    decays: tl.tensor,
    projected_stride: tl.tensor,
    least_step: tl.tensor,
    most_step: tl.tensor,
    N_GROUPS: tl.constexpr,
    N_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Computes a block for the heads of a group."""
    N_VALUES: tl.constexpr = N_HEADS * VALUE_DIM
    CHANNELS: tl.constexpr = N_VALUES + 2 * N_GROUPS * KEY_DIM
    OWN_HEADS: tl.constexpr = N_HEADS // N_GROUPS
    block, group = tl.program_id(0), tl.program_id(1)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.load(blocks + 2 * block)
    _, start, n_row, first, first_block = read_row(rows, row)
    offset, n_tokens = block_range(block - first_block, start, n_row, BLOCK)
    index = tl.arange(0, BLOCK)
    is_token = (index < n_tokens)[:, None]
    token = (first + offset + index)[:, None]
    source = convolved + token * CHANNELS + N_VALUES + group * KEY_DIM + tl.arange(0, KEY_DIM)[None, :]
    b = tl.load(source, is_token, 0.0)
    c = tl.load(source + N_GROUPS * KEY_DIM, is_token, 0.0)
    place = block.to(tl.int64) * N_GROUPS + group
    target = scores + (place * BLOCK + index[:, None]) * BLOCK + index[None, :]
    tl.store(target, tl.dot(c, tl.trans(b), input_precision="ieee"))
    own = tl.arange(0, HEADS)[None, :]
    is_head = own < OWN_HEADS
    head = group * OWN_HEADS + own
    x = tl.load(projected + token * projected_stride + N_VALUES + CHANNELS + head, is_token & is_head, 0.0)
    step = time_step(x, tl.load(step_bias + head, is_head, 0.0), least_step, most_step)
    step = tl.where(is_token, step, 0.0)
    decay = -tl.exp(tl.load(log_decay + head, is_head, 0.0)) * step
    target = (block.to(tl.int64) * N_HEADS + head) * BLOCK + index[:, None]
    tl.store(steps + target, step, is_head)
    tl.store(decays + target, tl.cumsum(decay, 0), is_head)
