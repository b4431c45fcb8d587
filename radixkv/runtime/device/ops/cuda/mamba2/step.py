"""The recurrence of Mamba2 for rows of one token, in place in the pool of states."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixkv.runtime.device.model_config.states import Mamba2Config, RecurrentConfig
from radixkv.runtime.device.ops.base import DeviceSequences
from radixkv.runtime.device.ops.cuda.cached_kernel import CachedKernel
from radixkv.runtime.device.ops.cuda.mamba2.time_steps import time_step
from radixkv.runtime.device.ops.cuda.programmatic_launch import overlapping

COLUMNS = 32
"""Values of a head per program."""


def step_tokens(
    convolved: Tensor,
    projected: Tensor,
    log_decay: Tensor,
    step_bias: Tensor,
    skip: Tensor,
    memory: Tensor,
    sequences: DeviceSequences,
    config: RecurrentConfig,
    mamba2: Mamba2Config,
    out: Tensor,
) -> None:
    """Lets the states of rows of one token decay, writes what each token adds, and reads them.

    All is computed in float32. The states are read and written once: time is that of their bytes. Rows of padding
    read and write none, and get zeros.

    Args:
        convolved: [tokens, channels], contiguous: x, B and C.
        projected: [tokens, ...]: what ``RecurrentWeights.inputs`` gives; rows may be strided.
        log_decay, step_bias: [heads] float32.
        skip: [heads] float32: what is added of each token's x.
        memory: [slots, heads, key_dim, value_dim] float32, contiguous: changed.
        sequences: rows.
        config: state sizes are powers of two.
        mamba2: of ``config``.
        out: [tokens, heads, value_dim], contiguous; the leading tokens are written.
    """
    _step[len(sequences.batch_slots), config.n_value_heads, -(-config.value_dim // COLUMNS)](
        convolved,
        projected,
        log_decay,
        step_bias,
        skip,
        memory,
        out,
        sequences.batch_slots,
        sequences.starts,
        projected.stride(0),
        sequences.n_batch_slots,
        *mamba2.time_step_limits,
        N_GROUPS=config.n_key_heads,
        N_HEADS=config.n_value_heads,
        KEY_DIM=config.key_dim,
        VALUE_DIM=config.value_dim,
        COLUMNS=COLUMNS,
        num_warps=4,
        **overlapping(convolved),
    )


@CachedKernel
@triton.jit(do_not_specialize_on_alignment=["batch_slots", "starts"])
def _step(
    convolved: tl.tensor,
    projected: tl.tensor,
    log_decay: tl.tensor,
    step_bias: tl.tensor,
    skip: tl.tensor,
    memory: tl.tensor,
    out: tl.tensor,
    batch_slots: tl.tensor,
    starts: tl.tensor,
    projected_stride: tl.tensor,
    n_batch_slots: tl.tensor,
    least_step: tl.tensor,
    most_step: tl.tensor,
    N_GROUPS: tl.constexpr,
    N_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    N_VALUES: tl.constexpr = N_HEADS * VALUE_DIM
    CHANNELS: tl.constexpr = N_VALUES + 2 * N_GROUPS * KEY_DIM
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group = head // (N_HEADS // N_GROUPS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < VALUE_DIM
    key = tl.arange(0, KEY_DIM)
    scale, bias, skipped = tl.load(log_decay + head), tl.load(step_bias + head), tl.load(skip + head)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.load(batch_slots + row).to(tl.int64)
    target = out + (row * N_HEADS + head) * VALUE_DIM + column
    if slot >= n_batch_slots:
        tl.store(target, tl.zeros([COLUMNS], out.dtype.element_ty), is_column)
        return
    cells = memory + (slot * N_HEADS + head) * (KEY_DIM * VALUE_DIM)
    cells += key[:, None] * VALUE_DIM + column[None, :]
    state = tl.load(cells, is_column[None, :] & (tl.load(starts + row) > 0), 0.0)
    source = convolved + row * CHANNELS
    x = tl.load(source + head * VALUE_DIM + column, is_column, 0.0).to(tl.float32)
    source += N_VALUES + group * KEY_DIM + key
    b = tl.load(source).to(tl.float32)[:, None]
    c = tl.load(source + N_GROUPS * KEY_DIM).to(tl.float32)[:, None]
    before = tl.load(projected + row * projected_stride + N_VALUES + CHANNELS + head)
    step = time_step(before, bias, least_step, most_step)
    state = state * tl.exp(-tl.exp(scale) * step) + b * (x * step)[None, :]
    tl.store(target, (tl.sum(state * c, 0) + x * skipped).to(out.dtype.element_ty), is_column)
    tl.store(cells, state, is_column[None, :])
