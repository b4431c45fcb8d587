"""What the blocks of prompts contribute to a gated delta net, all computed beside each other."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixkv.runtime.device.model_config.states import RecurrentConfig
from radixkv.runtime.device.ops.base import BLOCK_TOKENS, BlockArrays
from radixkv.runtime.device.ops.cuda.cached_kernel import CachedKernel
from radixkv.runtime.device.ops.cuda.delta_net.gates import read_gates
from radixkv.runtime.device.ops.cuda.delta_net.sequences import block_range, read_row
from radixkv.runtime.device.ops.cuda.delta_net.triangular_inverse import unit_lower_inverse
from radixkv.runtime.device.ops.cuda.programmatic_launch import overlapping


class BlockParts(NamedTuple):
    """What the recurrence over blocks reads of them. Tokens that a block lacks are zero."""

    known: Tensor
    """[blocks, heads, 64, key_dim]: what each token reads of the state before the block, to subtract it."""
    written: Tensor
    """[blocks, heads, 64, value_dim]: what each token would write if that state were empty."""
    scores: Tensor
    """[blocks, heads, 64, 64]: the weight of each token's write in what a token reads."""
    decays: Tensor
    """[blocks, heads, 64] float32: logarithm of the decay from the block's begin to each token, with its own."""


def block_bytes(config: RecurrentConfig, dtype: torch.dtype) -> int:
    """Returns the bytes of the parts of one block."""
    n_values = config.key_dim + config.value_dim + BLOCK_TOKENS
    return config.n_value_heads * BLOCK_TOKENS * (n_values * dtype.itemsize + torch.float32.itemsize)


def inverse_precision(dtype: torch.dtype, config: RecurrentConfig) -> str:
    """Returns the precision of the products of a block's inverse on a GPU, as ``tl.dot`` names it.

    Three products in bfloat16 instead of one in float32 make errors of 2e-5, which vanish when the inverse is
    rounded to 16 bits. Heads below 64 have an inverse in float32: Triton 3.6 compiles the products of such heads
    with an inverse from tensor cores to wrong ones on Hopper.
    """
    is_exact = dtype == torch.float32 or min(config.key_dim, config.value_dim) < 64
    return "ieee" if is_exact else "bf16x3"


def block_parts(
    convolved: Tensor,
    projected: Tensor,
    log_decay: Tensor,
    decay_bias: Tensor,
    prompts: BlockArrays[Tensor],
    config: RecurrentConfig,
) -> BlockParts:
    """Computes the blocks of the gated delta rule (Yang et al., arXiv 2412.06464, section 3.3).

    Products have operands in the dtype of ``convolved`` and sums in float32; those of the
    triangular inverse are nearly of float32.
    A block's bits depend on its tokens alone.

    Args:
        convolved: [tokens, channels], contiguous: normed queries and keys, and values.
        projected: [tokens, ...], of the same dtype: what ``RecurrentWeights.inputs`` gives; rows may be strided.
        log_decay, decay_bias: [heads] float32.
        prompts: rows and blocks.
        config: head sizes are powers of two, from 16 on.
    """
    n_heads, n_blocks = config.n_value_heads, len(prompts.blocks)
    parts = BlockParts(
        convolved.new_empty(n_blocks, n_heads, BLOCK_TOKENS, config.key_dim),
        convolved.new_empty(n_blocks, n_heads, BLOCK_TOKENS, config.value_dim),
        convolved.new_empty(n_blocks, n_heads, BLOCK_TOKENS, BLOCK_TOKENS),
        convolved.new_empty(n_blocks, n_heads, BLOCK_TOKENS, dtype=torch.float32),
    )
    precision = inverse_precision(convolved.dtype, config) if convolved.is_cuda else "ieee"  # Triton's interpreter
    _compute_blocks[(n_blocks * n_heads,)](
        convolved,
        projected,
        log_decay,
        decay_bias,
        *prompts,
        *parts,
        projected.stride(0),
        N_KEYS=config.n_key_heads,
        N_HEADS=n_heads,
        KEY_DIM=config.key_dim,
        VALUE_DIM=config.value_dim,
        BLOCK=BLOCK_TOKENS,
        PRECISION=precision,
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
    decay_bias: tl.tensor,
    rows: tl.tensor,
    blocks: tl.tensor,
    known: tl.tensor,
    written: tl.tensor,
    scores: tl.tensor,
    decays: tl.tensor,
    projected_stride: tl.tensor,
    N_KEYS: tl.constexpr,
    N_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    CHANNELS: tl.constexpr = 2 * N_KEYS * KEY_DIM + N_HEADS * VALUE_DIM
    block, head = tl.program_id(0) // N_HEADS, tl.program_id(0) % N_HEADS  # programs of a block are consecutive
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.load(blocks + 2 * block)
    _, start, n_row, first, first_block = read_row(rows, row)
    offset, n_tokens = block_range(block - first_block, start, n_row, BLOCK)
    index = tl.arange(0, BLOCK)
    is_token = index < n_tokens
    token = first + offset + index
    keys = (head // (N_HEADS // N_KEYS)) * KEY_DIM + tl.arange(0, KEY_DIM)[None, :]
    values = 2 * N_KEYS * KEY_DIM + head * VALUE_DIM + tl.arange(0, VALUE_DIM)[None, :]
    source = convolved + token[:, None] * CHANNELS
    k = tl.load(source + N_KEYS * KEY_DIM + keys, is_token[:, None], 0.0)
    gates = projected + token * projected_stride + CHANNELS + N_HEADS * VALUE_DIM + head
    strength, decay = read_gates(gates, is_token, log_decay + head, decay_bias + head, N_HEADS)
    total = tl.cumsum(decay, 0)
    is_before = index[:, None] >= index[None, :]
    between = tl.where(is_before, tl.exp(tl.where(is_before, total[:, None] - total[None, :], 0.0)), 0.0)
    dtype = convolved.dtype.element_ty
    keys_alike = tl.dot(k, tl.trans(k), input_precision="ieee")
    lower = tl.where(index[:, None] > index[None, :], keys_alike * between * strength[:, None], 0.0)
    inverse = unit_lower_inverse(lower, PRECISION)
    place = block.to(tl.int64) * N_HEADS + head
    columns = tl.arange(0, KEY_DIM)[None, :]
    product = tl.dot((inverse * (strength * tl.exp(total))[None, :]).to(dtype), k, input_precision="ieee")
    tl.store(known + (place * BLOCK + index[:, None]) * KEY_DIM + columns, product.to(dtype))
    q = tl.load(source + keys, is_token[:, None], 0.0)  # here, so that not all inputs take shared memory at once
    scored = tl.dot(q, tl.trans(k), input_precision="ieee") * between
    tl.store(scores + (place * BLOCK + index[:, None]) * BLOCK + index[None, :], scored.to(dtype))
    columns = tl.arange(0, VALUE_DIM)[None, :]
    v = tl.load(source + values, is_token[:, None], 0.0)
    product = tl.dot((inverse * strength[None, :]).to(dtype), v, input_precision="ieee")
    tl.store(written + (place * BLOCK + index[:, None]) * VALUE_DIM + columns, product.to(dtype))
    tl.store(decays + place * BLOCK + index, total)
