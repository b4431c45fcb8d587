"""The gated delta rule for rows of one token, in place in the pool of states."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixkv.runtime.device.model_config.states import RecurrentConfig
from radixkv.runtime.device.ops.base import DeviceSequences
from radixkv.runtime.device.ops.cuda.cached_kernel import CachedKernel
from radixkv.runtime.device.ops.cuda.delta_net.gates import read_gates
from radixkv.runtime.device.ops.cuda.programmatic_launch import overlapping

_CELLS = 128 * 64
"""Numbers of a state per program: 280 µs for 256 rows of 32 heads of 128 on an H200; half as many take 328."""


def step_columns(config: RecurrentConfig) -> int:
    """Returns the values of a head per program."""
    return min(_CELLS // config.key_dim, config.value_dim)


def step_tokens(
    convolved: Tensor,
    projected: Tensor,
    log_decay: Tensor,
    decay_bias: Tensor,
    memory: Tensor,
    sequences: DeviceSequences,
    config: RecurrentConfig,
    out: Tensor,
) -> None:
    """Lets the states of rows of one token decay, writes what each token adds, and reads them.

    All is computed in float32. The states are read and written once: time is that of their bytes. Rows of padding
    read and write none, and get zeros.

    Args:
        convolved: [tokens, channels], contiguous: normed queries and keys, and values.
        projected: [tokens, ...]: what ``RecurrentWeights.inputs`` gives; rows may be strided.
        log_decay, decay_bias: [heads] float32.
        memory: [slots, heads, key_dim, value_dim] float32, contiguous: changed.
        sequences: rows.
        config: head sizes are powers of two.
        out: [tokens, heads, value_dim], contiguous; the leading tokens are written.
    """
    columns = step_columns(config)
    _step[len(sequences.batch_slots), config.n_value_heads, config.value_dim // columns](
        convolved,
        projected,
        log_decay,
        decay_bias,
        memory,
        out,
        sequences.batch_slots,
        sequences.starts,
        projected.stride(0),
        sequences.n_batch_slots,
        N_KEYS=config.n_key_heads,
        N_HEADS=config.n_value_heads,
        KEY_DIM=config.key_dim,
        VALUE_DIM=config.value_dim,
        COLUMNS=columns,
        num_warps=4,
        **overlapping(convolved),
    )


@CachedKernel
@triton.jit(do_not_specialize_on_alignment=["batch_slots", "starts"])
def _step(
    convolved: tl.tensor,
    projected: tl.tensor,
    log_decay: tl.tensor,
    decay_bias: tl.tensor,
    memory: tl.tensor,
    out: tl.tensor,
    batch_slots: tl.tensor,
    starts: tl.tensor,
    projected_stride: tl.tensor,
    n_batch_slots: tl.tensor,
    N_KEYS: tl.constexpr,
    N_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    CHANNELS: tl.constexpr = 2 * N_KEYS * KEY_DIM + N_HEADS * VALUE_DIM
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    key = tl.arange(0, KEY_DIM)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.load(batch_slots + row).to(tl.int64)
    target = out + (row * N_HEADS + head) * VALUE_DIM + column
    if slot >= n_batch_slots:
        tl.store(target, tl.zeros([COLUMNS], out.dtype.element_ty))
        return
    cells = memory + (slot * N_HEADS + head) * (KEY_DIM * VALUE_DIM)
    cells += key[:, None] * VALUE_DIM + column[None, :]
    state = tl.load(cells, tl.load(starts + row) > 0, 0.0)
    source = convolved + row * CHANNELS
    q_columns = (head // (N_HEADS // N_KEYS)) * KEY_DIM + key
    q = tl.load(source + q_columns).to(tl.float32)[:, None]
    k = tl.load(source + N_KEYS * KEY_DIM + q_columns).to(tl.float32)[:, None]
    v = tl.load(source + 2 * N_KEYS * KEY_DIM + head * VALUE_DIM + column).to(tl.float32)
    gates = projected + row * projected_stride + CHANNELS + N_HEADS * VALUE_DIM + head
    strength, decay = read_gates(gates, row >= 0, log_decay + head, decay_bias + head, N_HEADS)
    state *= tl.exp(decay)
    new = (v - tl.sum(state * k, 0)) * strength
    state += k * new[None, :]
    tl.store(target, tl.sum(state * q, 0).to(out.dtype.element_ty))
    tl.store(cells, state)
