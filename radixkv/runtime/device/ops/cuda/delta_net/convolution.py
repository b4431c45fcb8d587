"""The causal convolution of layers with states, its activation, and the norm of a delta net's queries and keys."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from radixkv.runtime.device.model_config.states import RecurrentConfig
from radixkv.runtime.device.ops.base import BLOCK_TOKENS, DeviceSequences
from radixkv.runtime.device.ops.cuda.cached_kernel import CachedKernel
from radixkv.runtime.device.ops.cuda.delta_net.sequences import block_range, read_row
from radixkv.runtime.device.ops.cuda.programmatic_launch import overlapping

_CHANNELS = 512
"""Channels per program that keeps the last inputs of a row."""
_PLAIN_CHANNELS = 128
"""Channels per program that convolves them and norms nothing."""
_MIN_NORM = tl.constexpr(1e-6)
"""Is added to the squared length of queries and keys before they are divided by it, as in Transformers."""


def convolve(
    x: Tensor,
    inputs: Tensor,
    weight: Tensor,
    sequences: DeviceSequences,
    config: RecurrentConfig,
    out: Tensor,
    bias: Tensor | None = None,
) -> None:
    """Convolves each row's channels over its tokens, activates them (silu), and norms queries and keys.

    Each value is a sum over ``n_taps`` tokens in float32, rounded before and after the activation. Heads of queries
    and keys of a delta net are divided by their length, queries also by the root of the head size, and rounded
    again; Mamba2 norms nothing. Then ``inputs`` has the last inputs of each row.

    Args:
        x: [tokens, channels, or more] bfloat16, float16 or float32; rows may be strided. Channels are queries, keys
            and values.
        inputs: [slots, taps - 1, channels], contiguous, of the dtype of ``x``: changed.
        weight: [channels, taps], contiguous.
        sequences: which tokens belong together.
        config: head sizes are powers of two.
        out: [tokens, channels], contiguous.
        bias: [channels], of Mamba2.
    """
    if config.mamba2 is None:
        n_groups = 2 * config.n_key_heads + config.n_value_heads
        head_dim = max(config.key_dim, config.value_dim)
        sizes = {"N_KEYS": config.n_key_heads, "KEY_DIM": config.key_dim, "VALUE_DIM": config.value_dim}
    else:  # nothing is normed: channels are cut in any parts
        n_groups, head_dim = -(-config.n_channels // _PLAIN_CHANNELS), _PLAIN_CHANNELS
        sizes = {"N_KEYS": 0, "KEY_DIM": _PLAIN_CHANNELS, "VALUE_DIM": _PLAIN_CHANNELS}
    strides = (x.stride(0), sequences.n_batch_slots)
    sizes |= {"CHANNELS": config.n_channels, "TAPS": config.n_taps, "HAS_BIAS": bias is not None}
    tensors = x, inputs, weight, weight if bias is None else bias, out
    if n_decode := len(sequences.batch_slots):
        _convolve_tokens[n_decode, n_groups](
            *tensors,
            sequences.batch_slots,
            sequences.starts,
            *strides,
            **sizes,
            DIM=head_dim,
            num_warps=1,
            **overlapping(x),
        )
    if sequences.prompts is not None:
        rows, blocks = sequences.prompts
        _convolve_blocks[(len(blocks) * n_groups,)](
            *tensors,
            rows,
            blocks,
            *strides,
            **sizes,
            GROUPS=n_groups,
            BLOCK=BLOCK_TOKENS,
            DIM=head_dim,
            num_warps=8 if head_dim >= 128 else 4,
            **overlapping(x),
        )
        _keep_inputs[len(rows), -(-config.n_channels // _CHANNELS)](
            x,
            inputs,
            rows,
            *strides,
            CHANNELS=config.n_channels,
            TAPS=config.n_taps,
            BLOCK=_CHANNELS,
            num_warps=4,
            **overlapping(x),
        )


@triton.jit
def _channels_of(
    group: tl.tensor,
    N_KEYS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    DIM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Returns the channels of a head, [DIM], and which of them it has. Without keys the last one may be shorter."""
    columns = tl.arange(0, DIM)
    is_value = group >= 2 * N_KEYS
    first = tl.where(is_value, 2 * N_KEYS * KEY_DIM + (group - 2 * N_KEYS) * VALUE_DIM, group * KEY_DIM)
    return first + columns, (columns < tl.where(is_value, VALUE_DIM, KEY_DIM)) & (first + columns < CHANNELS)


@triton.jit
def _activated(total: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Returns silu of sums, rounded before and after it, in float32."""
    total = total.to(dtype).to(tl.float32)
    return (total / (1.0 + tl.exp(-total))).to(dtype).to(tl.float32)


@triton.jit
def _scale_of(squared: tl.tensor, group: tl.tensor, N_KEYS: tl.constexpr, KEY_DIM: tl.constexpr) -> tl.tensor:
    """Returns what heads of a squared length are multiplied by: values by 1."""
    scale = tl.rsqrt(squared + _MIN_NORM)
    # The root is a constant, so that it is as exact as float64 makes it.
    scale = tl.where(group < N_KEYS, scale * (KEY_DIM**-0.5), scale)
    return tl.where(group < 2 * N_KEYS, scale, 1.0)


@CachedKernel
@triton.jit(do_not_specialize_on_alignment=["batch_slots", "starts"])
def _convolve_tokens(
    x: tl.tensor,
    inputs: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    batch_slots: tl.tensor,
    starts: tl.tensor,
    x_stride: tl.tensor,
    n_batch_slots: tl.tensor,
    N_KEYS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DIM: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel, is_channel = _channels_of(group, N_KEYS, KEY_DIM, VALUE_DIM, CHANNELS, DIM)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.load(batch_slots + row).to(tl.int64)
    is_real = slot < n_batch_slots
    is_kept = is_channel & is_real
    has_past = is_kept & (tl.load(starts + row) > 0)
    seen = inputs + slot * ((TAPS - 1) * CHANNELS) + channel
    value = tl.load(x + row * x_stride + channel, is_channel, 0.0)
    total = tl.zeros([DIM], tl.float32)
    for tap in tl.static_range(TAPS - 1):
        last = tl.load(seen + tap * CHANNELS, has_past, 0.0)
        total += last.to(tl.float32) * tl.load(weight + channel * TAPS + tap, is_channel, 0.0).to(tl.float32)
        if tap > 0:
            tl.store(seen + (tap - 1) * CHANNELS, last, is_kept)
    total += value.to(tl.float32) * tl.load(weight + channel * TAPS + TAPS - 1, is_channel, 0.0).to(tl.float32)
    tl.store(seen + (TAPS - 2) * CHANNELS, value, is_kept)
    if HAS_BIAS:
        total += tl.load(bias + channel, is_channel, 0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    activated = _activated(total, dtype)
    if N_KEYS > 0:
        activated *= _scale_of(tl.sum(activated * activated, 0), group, N_KEYS, KEY_DIM)
    tl.store(out + row * CHANNELS + channel, activated.to(dtype), is_channel)


@CachedKernel
@triton.jit(do_not_specialize_on_alignment=["rows", "blocks"])
def _convolve_blocks(
    x: tl.tensor,
    inputs: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    blocks: tl.tensor,
    x_stride: tl.tensor,
    n_batch_slots: tl.tensor,
    N_KEYS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Also saves the last inputs of blocks whose states are saved: no program reads them where they go.

    Programs of a block are consecutive, so that those that run at once read whole rows of ``x``.
    """
    block, group = tl.program_id(0) // GROUPS, tl.program_id(0) % GROUPS
    channel, is_channel = _channels_of(group, N_KEYS, KEY_DIM, VALUE_DIM, CHANNELS, DIM)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.load(blocks + 2 * block)
    saved_to = tl.load(blocks + 2 * block + 1).to(tl.int64)
    slot, start, n_row, first, first_block = read_row(rows, row)
    offset, n_tokens = block_range(block - first_block, start, n_row, BLOCK)
    has_past = (start > 0) & (slot < n_batch_slots)
    source = x + first * x_stride
    seen = inputs + (slot * (TAPS - 1) + TAPS - 1) * CHANNELS
    token = tl.arange(0, BLOCK)
    is_token = token < n_tokens
    token += offset
    total = tl.zeros([BLOCK, DIM], tl.float32)
    for tap in tl.static_range(TAPS):
        value = _input_of(
            token - (TAPS - 1 - tap), is_token, channel, is_channel, source, x_stride, seen, has_past, CHANNELS
        )
        total += value.to(tl.float32) * tl.load(weight + channel * TAPS + tap, is_channel, 0.0).to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + channel, is_channel, 0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    activated = _activated(total, dtype)
    if N_KEYS > 0:
        activated *= _scale_of(tl.sum(activated * activated, 1), group, N_KEYS, KEY_DIM)[:, None]
    target = out + (first + token)[:, None] * CHANNELS + channel[None, :]
    tl.store(target, activated.to(dtype), is_token[:, None] & is_channel[None, :])
    if saved_to >= 0:
        kept = inputs + saved_to * ((TAPS - 1) * CHANNELS) + channel
        _keep_last(kept, offset + n_tokens, channel, is_channel, source, x_stride, seen, has_past, CHANNELS, TAPS)


@triton.jit
def _input_of(
    token: tl.tensor,
    is_token: tl.tensor,
    channel: tl.tensor,
    is_channel: tl.tensor,
    source: tl.tensor,
    x_stride: tl.tensor,
    seen: tl.tensor,
    has_past: tl.tensor,
    CHANNELS: tl.constexpr,
) -> tl.tensor:
    """Returns channels of tokens of a row, [tokens, channels]; tokens before the row are below 0."""
    is_wanted = is_token[:, None] & is_channel[None, :]
    is_past = (token < 0)[:, None]
    token = token.to(tl.int64)[:, None]
    now = tl.load(source + token * x_stride + channel[None, :], is_wanted & (token >= 0), 0.0)
    before = tl.load(seen + token * CHANNELS + channel[None, :], is_wanted & is_past & has_past, 0.0)
    return tl.where(is_past, before, now)


@CachedKernel
@triton.jit(do_not_specialize_on_alignment=["rows"])
def _keep_inputs(
    x: tl.tensor,
    inputs: tl.tensor,
    rows: tl.tensor,
    x_stride: tl.tensor,
    n_batch_slots: tl.tensor,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Keeps the last inputs of rows of prompts, once no program reads the ones before."""
    row = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel = channel < CHANNELS
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    slot, start, n_tokens, first, _ = read_row(rows, row)
    if slot < n_batch_slots:
        kept = inputs + slot * ((TAPS - 1) * CHANNELS) + channel
        seen = inputs + (slot * (TAPS - 1) + TAPS - 1) * CHANNELS
        source = x + first * x_stride
        _keep_last(kept, n_tokens, channel, is_channel, source, x_stride, seen, start > 0, CHANNELS, TAPS)


@triton.jit
def _keep_last(
    kept: tl.tensor,
    n_tokens: tl.tensor,
    channel: tl.tensor,
    is_channel: tl.tensor,
    source: tl.tensor,
    x_stride: tl.tensor,
    seen: tl.tensor,
    has_past: tl.tensor,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
) -> None:
    """Stores the last inputs of a row's first ``n_tokens`` tokens, for one position of ``channel`` each.

    They may replace those before the row: an entry is read before it is written, as entries move to lower places.
    """
    for tap in tl.static_range(TAPS - 1):
        token = (n_tokens - (TAPS - 1) + tap).to(tl.int64)
        now = tl.load(source + token * x_stride + channel, is_channel & (token >= 0), 0.0)
        before = tl.load(seen + token * CHANNELS + channel, is_channel & (token < 0) & has_past, 0.0)
        tl.store(kept + tap * CHANNELS, tl.where(token < 0, before, now), is_channel)
