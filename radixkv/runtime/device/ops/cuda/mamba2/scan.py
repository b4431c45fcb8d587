"""The recurrence of a layer of Mamba2 over the blocks of each prompt."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixkv.runtime.device.model_config.states import RecurrentConfig
from radixkv.runtime.device.ops.base import BLOCK_TOKENS, BlockArrays
from radixkv.runtime.device.ops.cuda.cached_kernel import CachedKernel
from radixkv.runtime.device.ops.cuda.delta_net.scan import ScanTile
from radixkv.runtime.device.ops.cuda.delta_net.sequences import block_range, read_row
from radixkv.runtime.device.ops.cuda.mamba2.blocks import BlockParts
from radixkv.runtime.device.ops.cuda.programmatic_launch import has_much_shared_memory, overlapping


def scan_tile(config: RecurrentConfig, *, has_room: bool) -> ScanTile:
    """Returns a tile of few columns, so that one prompt has programs for all processors of a GPU.

    Args:
        config: sizes; larger states leave less shared memory. Then one stage is no choice on Hopper: see
            ``delta_net.scan.scan_tile``.
        has_room: whether a thread block may use 163 KB of shared memory, not only 99 KB.
    """
    if config.key_dim <= 128:
        return ScanTile(columns=32, n_stages=2)
    return ScanTile(columns=16, n_stages=2) if has_room else ScanTile(columns=32, n_stages=1)


def scan_blocks(
    convolved: Tensor,
    parts: BlockParts,
    skip: Tensor,
    memory: Tensor,
    prompts: BlockArrays[Tensor],
    config: RecurrentConfig,
    n_batch_slots: int,
    out: Tensor,
) -> None:
    """Carries each prompt's state over its blocks, and reads it for each token.

    The state is float32. Products read it in the dtype of ``convolved``, and are summed in float32.

    Args:
        convolved: [tokens, channels], contiguous: x, B and C.
        parts: of the blocks.
        skip: [heads] float32: what is added of each token's x.
        memory: [slots, heads, key_dim, value_dim] float32, contiguous: changed for the rows' batch slots, and for
            the slots that get copies.
        prompts: rows and blocks.
        config: state sizes are powers of two, from 16 on.
        n_batch_slots: slots from here on are not those of rows.
        out: [tokens, heads, value_dim], contiguous; tokens of the rows are written.
    """
    tile = scan_tile(config, has_room=has_much_shared_memory(convolved))
    _scan[len(prompts.rows), config.n_value_heads, -(-config.value_dim // tile.columns)](
        convolved,
        *parts,
        skip,
        memory,
        out,
        *prompts,
        n_batch_slots,
        N_GROUPS=config.n_key_heads,
        N_HEADS=config.n_value_heads,
        KEY_DIM=config.key_dim,
        VALUE_DIM=config.value_dim,
        BLOCK=BLOCK_TOKENS,
        COLUMNS=tile.columns,
        num_warps=4,
        num_stages=tile.n_stages,
        **overlapping(convolved),
    )


@CachedKernel
@triton.jit(do_not_specialize_on_alignment=["rows", "blocks"])
def _scan(
    convolved: tl.tensor,
    scores: tl.tensor,
    steps: tl.tensor,
    decays: tl.tensor,
    skip: tl.tensor,
    memory: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    blocks: tl.tensor,
    n_batch_slots: tl.tensor,
    N_GROUPS: tl.constexpr,
    N_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    N_VALUES: tl.constexpr = N_HEADS * VALUE_DIM
    CHANNELS: tl.constexpr = N_VALUES + 2 * N_GROUPS * KEY_DIM
    row, head = tl.program_id(0), tl.program_id(1)
    group = head // (N_HEADS // N_GROUPS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = (column < VALUE_DIM)[None, :]
    key = tl.arange(0, KEY_DIM)
    index = tl.arange(0, BLOCK)
    skipped = tl.load(skip + head)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    slot, start, n_tokens, first, first_block = read_row(rows, row)
    is_real = slot < n_batch_slots
    cells = key[:, None] * VALUE_DIM + column[None, :]
    of_head = memory + head * (KEY_DIM * VALUE_DIM)
    state_size: tl.constexpr = N_HEADS * KEY_DIM * VALUE_DIM
    state = tl.load(of_head + slot * state_size + cells, is_column & is_real & (start > 0), 0.0)
    dtype = convolved.dtype.element_ty
    is_before = index[:, None] >= index[None, :]
    n_blocks = (start + n_tokens - 1) // BLOCK - start // BLOCK + 1
    for number in range(n_blocks):
        block = first_block + number
        offset, n_here = block_range(number, start, n_tokens, BLOCK)
        token = (first + offset + index)[:, None]
        is_token = (index < n_here)[:, None]
        x = tl.load(convolved + token * CHANNELS + head * VALUE_DIM + column[None, :], is_token & is_column, 0.0)
        source = convolved + token * CHANNELS + N_VALUES + group * KEY_DIM + key[None, :]
        b = tl.load(source, is_token, 0.0)
        c = tl.load(source + N_GROUPS * KEY_DIM, is_token, 0.0)
        place = block.to(tl.int64) * N_GROUPS + group
        score = tl.load(scores + (place * BLOCK + index[:, None]) * BLOCK + index[None, :])
        place = (block.to(tl.int64) * N_HEADS + head) * BLOCK
        step = tl.load(steps + place + index)
        decay = tl.load(decays + place + index)
        last = tl.load(decays + place + BLOCK - 1)
        between = tl.exp(tl.where(is_before, decay[:, None] - decay[None, :], 0.0)) * step[None, :]
        weight = tl.where(is_before, score * between, 0.0).to(dtype)
        read = tl.dot(c, state.to(dtype), input_precision="ieee") * tl.exp(decay)[:, None]
        read += tl.dot(weight, x, input_precision="ieee")
        value = x.to(tl.float32)
        target = out + (token * N_HEADS + head) * VALUE_DIM + column[None, :]
        tl.store(target, (read + value * skipped).to(dtype), is_token & is_column)
        kept = (value * (step * tl.exp(last - decay))[:, None]).to(dtype)
        state = state * tl.exp(last) + tl.dot(tl.trans(b), kept, input_precision="ieee")
        saved_to = tl.load(blocks + 2 * block + 1).to(tl.int64)
        if saved_to >= 0:
            tl.store(of_head + saved_to * state_size + cells, state, is_column)
    if is_real:
        tl.store(of_head + slot * state_size + cells, state, is_column)
