"""The recurrence of a gated delta net over the blocks of each prompt."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixkv.runtime.device.model_config.states import RecurrentConfig
from radixkv.runtime.device.ops.base import BLOCK_TOKENS, BlockArrays
from radixkv.runtime.device.ops.cuda.cached_kernel import CachedKernel
from radixkv.runtime.device.ops.cuda.delta_net.blocks import BlockParts
from radixkv.runtime.device.ops.cuda.delta_net.sequences import block_range, read_row
from radixkv.runtime.device.ops.cuda.programmatic_launch import has_much_shared_memory, overlapping


class ScanTile(NamedTuple):
    """What a program has at once."""

    columns: int
    """Values of its head."""
    n_stages: int
    """Blocks in flight."""


def scan_tile(config: RecurrentConfig, *, has_room: bool) -> ScanTile:
    """Returns the fastest of 9 tiles on an H200, for heads of 128.

    Eight prompts of 1,024 tokens take 156 µs (319 with 32 columns and 2 stages, 261 with 32 and 3), and one of
    8,192 takes 245 (273 and 208). On Hopper, one stage is no choice: Triton 3.6 compiles it for 32 columns or fewer
    to a kernel that reads outside of memory.

    Args:
        config: head sizes; larger ones leave less shared memory.
        has_room: whether a thread block may use 163 KB of shared memory, not only 99 KB.
    """
    if max(config.key_dim, config.value_dim) > 128:
        return ScanTile(columns=16, n_stages=2) if has_room else ScanTile(columns=32, n_stages=1)
    return ScanTile(columns=64, n_stages=3 if has_room else 2)


def scan_blocks(
    convolved: Tensor,
    parts: BlockParts,
    memory: Tensor,
    prompts: BlockArrays[Tensor],
    config: RecurrentConfig,
    n_batch_slots: int,
    out: Tensor,
) -> None:
    """Carries each prompt's state over its blocks, and reads it for each token.

    The state is float32. Products read it in the dtype of ``convolved``, and are summed in float32.

    Args:
        convolved: [tokens, channels], contiguous: normed queries and keys, and values.
        parts: of the blocks.
        memory: [slots, heads, key_dim, value_dim] float32, contiguous: changed for the rows' batch slots, and for
            the slots that get copies.
        prompts: rows and blocks.
        config: head sizes are powers of two, from 16 on.
        n_batch_slots: slots from here on are not those of rows.
        out: [tokens, heads, value_dim], contiguous; tokens of the rows are written.
    """
    tile = scan_tile(config, has_room=has_much_shared_memory(convolved))
    columns = min(tile.columns, config.value_dim)
    _scan[len(prompts.rows), config.n_value_heads, config.value_dim // columns](
        convolved,
        *parts,
        memory,
        out,
        *prompts,
        n_batch_slots,
        N_KEYS=config.n_key_heads,
        N_HEADS=config.n_value_heads,
        KEY_DIM=config.key_dim,
        VALUE_DIM=config.value_dim,
        BLOCK=BLOCK_TOKENS,
        COLUMNS=columns,
        num_warps=4,
        num_stages=tile.n_stages,
        **overlapping(convolved),
    )


@CachedKernel
@triton.jit(do_not_specialize_on_alignment=["rows", "blocks"])
def _scan(
    convolved: tl.tensor,
    known: tl.tensor,
    written: tl.tensor,
    scores: tl.tensor,
    decays: tl.tensor,
    memory: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    blocks: tl.tensor,
    n_batch_slots: tl.tensor,
    N_KEYS: tl.constexpr,
    N_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    CHANNELS: tl.constexpr = 2 * N_KEYS * KEY_DIM + N_HEADS * VALUE_DIM
    row, head = tl.program_id(0), tl.program_id(1)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    key = tl.arange(0, KEY_DIM)
    index = tl.arange(0, BLOCK)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    slot, start, n_tokens, first, first_block = read_row(rows, row)
    is_real = slot < n_batch_slots
    cells = key[:, None] * VALUE_DIM + column[None, :]
    of_head = memory + head * (KEY_DIM * VALUE_DIM)
    state_size: tl.constexpr = N_HEADS * KEY_DIM * VALUE_DIM
    state = tl.load(of_head + slot * state_size + cells, is_real & (start > 0), 0.0)
    dtype = convolved.dtype.element_ty
    q_columns = (head // (N_HEADS // N_KEYS)) * KEY_DIM + key[None, :]
    n_blocks = (start + n_tokens - 1) // BLOCK - start // BLOCK + 1
    for number in range(n_blocks):
        block = first_block + number
        offset, n_here = block_range(number, start, n_tokens, BLOCK)
        token = first + offset + index
        is_token = (index < n_here)[:, None]
        place = (block.to(tl.int64) * N_HEADS + head) * BLOCK
        q = tl.load(convolved + token[:, None] * CHANNELS + q_columns, is_token, 0.0)
        k = tl.load(convolved + token[:, None] * CHANNELS + N_KEYS * KEY_DIM + q_columns, is_token, 0.0)
        reads = tl.load(known + (place + index[:, None]) * KEY_DIM + key[None, :])
        writes = tl.load(written + (place + index[:, None]) * VALUE_DIM + column[None, :])
        score = tl.load(scores + (place + index[:, None]) * BLOCK + index[None, :])
        decay = tl.load(decays + place + index)
        last = tl.load(decays + place + BLOCK - 1)
        rounded = state.to(dtype)
        new = writes.to(tl.float32) - tl.dot(reads, rounded, input_precision="ieee")
        read = tl.dot(q, rounded, input_precision="ieee") * tl.exp(decay)[:, None]
        read += tl.dot(score, new.to(dtype), input_precision="ieee")
        target = out + (token[:, None] * N_HEADS + head) * VALUE_DIM + column[None, :]
        tl.store(target, read.to(dtype), is_token)
        kept = (new * tl.exp(last - decay)[:, None]).to(dtype)
        state = state * tl.exp(last) + tl.dot(tl.trans(k), kept, input_precision="ieee")
        saved_to = tl.load(blocks + 2 * block + 1).to(tl.int64)
        if saved_to >= 0:
            tl.store(of_head + saved_to * state_size + cells, state)
    if is_real:
        tl.store(of_head + slot * state_size + cells, state)
