"""The kernels of gated delta nets against the rule in float64, token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from delta_net_world import HALVES, N_BATCH_SLOTS, PADDING, Span, World, check, delta_net
from kernel_support import DEVICE, check_close, normal, on_kernels, poisoned

from radixkv.errors import DeviceError
from radixkv.runtime.device.model_config.states import RecurrentConfig
from radixkv.runtime.device.ops.cuda.delta_net.gated_norm import gated_norm
from radixkv.runtime.device.ops.cuda.delta_net.sequences import block_arrays
from radixkv.runtime.device.pack import RowArrays
from radixkv.runtime.step.plan import StateSave

pytestmark = on_kernels

SHAPES = [
    delta_net(),
    delta_net(1, 1, 16, 16, n_taps=2),
    delta_net(1, 3, 64, 128),
    pytest.param(delta_net(1, 2, 128, 128), marks=pytest.mark.nightly),
    pytest.param(delta_net(2, 2, 256, 64, n_taps=3), marks=pytest.mark.nightly),
]


RAGGED = [
    Span(3, 5, 1, is_decode=True),
    Span(0, 0, 1, is_decode=True),
    Span(1, 0, 64),
    Span(4, 64, 1),
    Span(2, 40, 150, saves={64: 2, 128: 0}),
    Span(5, 0, 63),
]
"""Rows of one token and of prompts, whose lengths are around 64, and which start within blocks."""


@pytest.mark.parametrize("dtype", [torch.float32, HALVES])
@pytest.mark.parametrize("config", SHAPES)
def test_a_layer_follows_the_rule(config: RecurrentConfig, dtype: torch.dtype) -> None:
    if DEVICE == "cuda" and dtype == torch.float32 and config.key_dim > 32:
        pytest.skip("products of large tiles in float32, which no model has on a GPU, compile for a minute")
    check(World(config, RAGGED, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, HALVES])
def test_keys_that_are_all_alike(dtype: torch.dtype) -> None:
    """Then a block's matrix has ones below its diagonal, whose powers grow beyond float32."""
    check(World(delta_net(), [Span(1, 0, 140), Span(2, 64, 64)], dtype, alike=True))


def test_padding_changes_no_state_and_gets_zeros() -> None:
    """Rows of padding have a batch slot of their own, as in graphs and in the step that is measured."""
    spans = [Span(PADDING, 0, 1, is_decode=True), Span(PADDING, 7, 1, is_decode=True), Span(PADDING, 0, 70)]
    world = World(delta_net(), spans, torch.float32)
    before = [each.clone() for each in world.states]
    found = world.run()
    assert all(torch.equal(*pair) for pair in zip(world.states, before, strict=True))
    assert not found[:2].any()
    assert found.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, HALVES])
def test_rows_that_end_at_multiples_of_64_change_no_bit(dtype: torch.dtype) -> None:
    """Neither do other rows, nor a start from a state that was saved within a row."""
    config, saves = delta_net(), {64: 0, 128: 1, 192: 2}
    whole = World(config, [Span(2, 0, 300, saves=saves)], dtype)
    out = whole.run()
    other = World(config, [Span(1, 0, 50), Span(2, 0, 300)], dtype)
    for first, last, n_others in ((0, 64, 1), (64, 192, 0), (192, 300, 1)):
        before = [Span(4, 0, 9)] * n_others
        part = World(config, [*before, Span(2, first, last - first)], dtype)
        part.weights = whole.weights
        part.projected[9 * n_others :] = whole.projected[first:last]
        for mine, saved in zip(part.states, other.states if first else whole.states, strict=True):
            mine[2] = saved[2]
        assert torch.equal(part.run()[9 * n_others :], out[first:last])
        for mine, kept in zip(part.states, other.states, strict=True):
            kept[2] = mine[2]
        if last < 300:
            slot = N_BATCH_SLOTS + {64: 0, 192: 2}[last]
            assert all(torch.equal(mine[2], one[slot]) for mine, one in zip(part.states, whole.states, strict=True))
    assert all(torch.equal(mine[2], one[2]) for mine, one in zip(other.states, whole.states, strict=True))


def test_blocks_end_at_multiples_of_64_positions() -> None:
    rows = np.zeros((10, 3), np.int32)
    rows[:4] = [7, 3, 5], [9, 60, 128], [1, 70, 64], [0, 1, 71]
    saves = [StateSave(3, 64, 1), StateSave(3, 128, 2)]
    records, blocks = block_arrays(RowArrays(*rows), 1, saves, 10)
    assert records[:, :5].tolist() == [[3, 60, 70, 1, 0], [5, 128, 64, 71, 3]]
    assert blocks.tolist() == [[0, 11], [0, 12], [0, -1], [1, -1]]
    for save in (StateSave(3, 100, 0), StateSave(7, 64, 0)):
        with pytest.raises(DeviceError, match="at multiples of 64 only"):
            block_arrays(RowArrays(*rows), 1, [save], 10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("n_heads", "size"), [(3, 16), (32, 128), (5, 256)])
def test_the_norm_of_outputs(n_heads: int, size: int, dtype: torch.dtype) -> None:
    x, weight = normal(7, n_heads, size, dtype=dtype), normal(size, dtype=dtype)
    gate = normal(7, n_heads * size + 8, dtype=dtype)[:, 8:]
    out = poisoned(7, n_heads * size, dtype=dtype)
    gated_norm(x, gate, weight, 1e-6, out)
    full = x.double()
    normed = full / (full.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    check_close(out, normed.flatten(1) * torch.nn.functional.silu(gate.double()), n_roundings=3)
    gated_norm(x, gate, weight, 1e-6, x.flatten(1))
    assert torch.equal(x.flatten(1), out)
