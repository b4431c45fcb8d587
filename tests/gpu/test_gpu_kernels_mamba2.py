"""The kernels of Mamba2 against the rule in float64, token by token."""

from __future__ import annotations

import pytest
import torch
from delta_net_world import HALVES, N_BATCH_SLOTS, PADDING, Span, check
from kernel_support import DEVICE, check_close, normal, on_kernels, poisoned, triton
from mamba2_world import Mamba2World, mamba2

from radixkv.runtime.device.model_config.states import RecurrentConfig
from radixkv.runtime.device.ops.cuda.activation import square_positive
from radixkv.runtime.device.ops.cuda.delta_net.gates import softplus
from radixkv.runtime.device.ops.cuda.mamba2.gated_norm import gated_group_norm

pytestmark = on_kernels
tl = triton.language

SHAPES = [
    mamba2(),
    mamba2(1, 1, 16, 16, n_taps=2, has_bias=False),
    mamba2(2, 10, 16, 80),
    mamba2(1, 3, 64, 12, limits=(0.5, 1.5)),
    pytest.param(mamba2(1, 2, 128, 64), marks=pytest.mark.nightly),
    pytest.param(mamba2(2, 2, 256, 64, n_taps=3), marks=pytest.mark.nightly),
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
    check(Mamba2World(config, RAGGED, dtype))


def test_small_time_steps_as_models_have_them() -> None:
    """Then ``1 + exp(x)`` has lost most digits of the time step, which is near ``exp(x)``."""
    world = Mamba2World(mamba2(), RAGGED, torch.float32, step_bias=-12.0)
    for values in world.states:
        values.zero_()
    check(world)


@triton.jit
def _softplus(x: tl.tensor, out: tl.tensor, SIZE: tl.constexpr) -> None:  # noqa: N803
    index = tl.arange(0, SIZE)
    tl.store(out + index, softplus(tl.load(x + index)))


def test_time_steps_are_exact_over_their_whole_range() -> None:
    x = torch.linspace(-90.0, 40.0, 1024, device=DEVICE)
    out = torch.empty_like(x)
    _softplus[(1,)](x, out, SIZE=1024)
    expected = torch.log1p(x.double().exp())
    smallest = torch.finfo(torch.float32).tiny  # below it, float32 has fewer bits
    errors = (out.double() - expected).abs() / expected.clamp_min(smallest)
    rounding = x.abs() * 2.0**-24  # of x * log2(e), from which a GPU computes exp(x)
    assert (errors < 1e-6 + rounding).all()


def test_padding_changes_no_state_and_gets_zeros() -> None:
    """Rows of padding have a batch slot of their own, as in graphs and in the step that is measured."""
    spans = [Span(PADDING, 0, 1, is_decode=True), Span(PADDING, 7, 1, is_decode=True), Span(PADDING, 0, 70)]
    world = Mamba2World(mamba2(), spans, torch.float32)
    before = [each.clone() for each in world.states]
    found = world.run()
    assert all(torch.equal(*pair) for pair in zip(world.states, before, strict=True))
    assert not found[:2].any()
    assert found.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, HALVES])
def test_rows_that_end_at_multiples_of_64_change_no_bit(dtype: torch.dtype) -> None:
    """Neither do other rows, nor a start from a state that was saved within a row."""
    config, saves = mamba2(), {64: 0, 128: 1, 192: 2}
    whole = Mamba2World(config, [Span(2, 0, 300, saves=saves)], dtype)
    out = whole.run()
    other = Mamba2World(config, [Span(1, 0, 50), Span(2, 0, 300)], dtype)
    for first, last, n_others in ((0, 64, 1), (64, 192, 0), (192, 300, 1)):
        part = Mamba2World(config, [*[Span(4, 0, 9)] * n_others, Span(2, first, last - first)], dtype)
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("n_groups", "size"), [(3, 16), (8, 1280), (1, 40)])
def test_the_norm_of_groups(n_groups: int, size: int, dtype: torch.dtype) -> None:
    x, weight = normal(7, n_groups * size, dtype=dtype), normal(n_groups * size, dtype=dtype)
    gate = normal(7, n_groups * size + 8, dtype=dtype)[:, 8:]
    out = poisoned(7, n_groups * size, dtype=dtype)
    gated_group_norm(x, gate, weight, 1e-6, n_groups, out)
    gated = (x.double() * torch.nn.functional.silu(gate.double())).view(7, n_groups, size)
    normed = gated / (gated.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    check_close(out, normed.flatten(1) * weight.double(), n_roundings=2)
    gated_group_norm(x, gate, weight, 1e-6, n_groups, x)
    assert torch.equal(x, out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [8, 2048, 2100])
def test_squares_of_what_is_positive(size: int, dtype: torch.dtype) -> None:
    x = normal(5, size, dtype=dtype)
    x[1, 2] = float("nan")
    expected = x.double().relu().square()
    square_positive(x)
    assert x[1, 2].isnan()
    x[1, 2] = expected[1, 2] = 0.0
    check_close(x, expected)
