"""The kernels of gated delta nets against the rule in float64, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from kernel_support import DEVICE, check_close, integers, normal, on_kernels, poisoned
from torch import Tensor

from radixkv.errors import DeviceError
from radixkv.runtime.device.model_config.config import DeltaNetConfig
from radixkv.runtime.device.ops.base import BlockArrays, DeviceSequences, LayerStates, Linear
from radixkv.runtime.device.ops.cuda.delta_net.gated_norm import gated_norm
from radixkv.runtime.device.ops.cuda.delta_net.layer import DeltaNet
from radixkv.runtime.device.ops.cuda.delta_net.sequences import block_arrays
from radixkv.runtime.device.pack import RowArrays
from radixkv.runtime.device.weights.layer_weights import DeltaNetWeights, LinearWeights
from radixkv.runtime.step.plan import StateSave

pytestmark = on_kernels

N_BATCH_SLOTS, N_TREE_SLOTS = 6, 4
PADDING = N_BATCH_SLOTS
"""The batch slot of padding rows, whose number is that of the first slot of the tree."""


def delta_net(
    n_keys: int = 2, n_values: int = 4, key_dim: int = 32, value_dim: int = 16, n_taps: int = 4
) -> DeltaNetConfig:
    return DeltaNetConfig(frozenset({0}), n_keys, n_values, key_dim, value_dim, n_taps)


SHAPES = [
    delta_net(),
    delta_net(1, 1, 16, 16, n_taps=2),
    delta_net(1, 3, 64, 128),
    pytest.param(delta_net(1, 2, 128, 128), marks=pytest.mark.nightly),
    pytest.param(delta_net(2, 2, 256, 64, n_taps=3), marks=pytest.mark.nightly),
]


HALVES = torch.bfloat16 if DEVICE == "cuda" else torch.float16
"""Triton's interpreter has no products in bfloat16."""


@dataclass(frozen=True)
class Span:
    """A row of a step."""

    batch_slot: int
    start: int
    n_tokens: int
    is_decode: bool = False
    saves: dict[int, int] = field(default_factory=dict)
    """Slot of the tree by position within the row."""


def sequences_of(spans: Sequence[Span]) -> DeviceSequences:
    """Returns the rows as kernels take them, at addresses that are not aligned."""
    n_decode = sum(span.is_decode for span in spans)
    arrays = np.zeros((9, len(spans)), np.int32)
    counts = np.array([span.n_tokens for span in spans], np.int32)
    arrays[:4] = (
        [span.batch_slot for span in spans],
        [span.start for span in spans],
        counts,
        counts.cumsum() - counts,
    )
    saves = [StateSave(span.batch_slot, at, slot) for span in spans for at, slot in span.saves.items()]
    prompts = None
    if n_decode < len(spans):
        rows, blocks = map(integers, block_arrays(RowArrays(*arrays), n_decode, saves, N_BATCH_SLOTS))
        prompts = BlockArrays(rows, blocks)
    slots, starts = integers([[0, *arrays[0, :n_decode]], [0, *arrays[1, :n_decode]]])[:, 1:]
    return DeviceSequences(N_BATCH_SLOTS, slots, starts, prompts)


class World:
    """A layer with random weights, random states of all slots, and what a step reads.

    Args:
        config: of the layer.
        spans: rows of the step, decode rows first.
        dtype: of activations.
        alike: whether all keys of a head are nearly the same, which is the worst case for the inverse.
    """

    def __init__(
        self, config: DeltaNetConfig, spans: Sequence[Span], dtype: torch.dtype, *, alike: bool = False
    ) -> None:
        torch.manual_seed(len(spans))
        self.config, self.spans = config, spans
        n_tokens, n_slots = sum(span.n_tokens for span in spans), N_BATCH_SLOTS + N_TREE_SLOTS
        n_heads, self.n_values = config.n_value_heads, config.n_value_heads * config.value_dim
        x = normal(n_tokens, config.n_channels, dtype=dtype)
        if alike:
            n_keys = config.n_key_heads * config.key_dim
            x[:, n_keys : 2 * n_keys] = 2.0 + 0.05 * x[:, n_keys : 2 * n_keys]
        gates = normal(n_tokens, self.n_values + 2 * n_heads, dtype=dtype)
        if alike:
            gates[:, self.n_values : self.n_values + n_heads] = 3.0
            gates[:, self.n_values + n_heads :] = -4.0
        self.projected = torch.cat([x, gates], 1)
        self.weights = DeltaNetWeights(
            inputs=LinearWeights(self.projected),
            convolution=normal(config.n_channels, config.n_taps, dtype=dtype, scale=0.5),
            log_decay=torch.linspace(-3.0, 2.5, n_heads, device=DEVICE),
            decay_bias=normal(n_heads, dtype=torch.float32),
            norm=1.0 + normal(config.value_dim, dtype=dtype, scale=0.1),
        )
        if alike:
            self.weights.convolution[:] = 0.25
        self.states = LayerStates(
            normal(n_slots, config.n_taps - 1, config.n_channels, dtype=dtype),
            normal(n_slots, n_heads, config.key_dim, config.value_dim, dtype=torch.float32, scale=0.3),
        )
        self.sequences = sequences_of(spans)

    def run(self) -> Tensor:
        layer = DeltaNet(self.weights, FixedLinear(self.projected), self.config, 1e-6)
        return layer(self.projected, self.sequences, self.states)

    def expected(self) -> tuple[Tensor, LayerStates]:
        """Returns the output and all states in float64, of activations that are rounded where the kernels do it."""
        config, dtype = self.config, self.projected.dtype
        inputs, memory = (each.double().clone() for each in self.states)
        taps, n_heads = self.weights.convolution.double(), config.n_value_heads
        x, gate, strength, decay = (
            each.double() for each in self.projected.split([config.n_channels, self.n_values, n_heads, n_heads], -1)
        )
        decay = (
            torch.nn.functional.softplus(decay + self.weights.decay_bias) * -self.weights.log_decay.double().exp()
        ).exp()
        strength, out = strength.sigmoid(), []
        n_keys = config.n_key_heads * config.key_dim

        first = 0
        for span in self.spans:
            slot = span.batch_slot
            is_empty = span.start == 0 or slot == PADDING
            last = torch.zeros_like(inputs[slot]) if is_empty else inputs[slot].clone()
            state = torch.zeros_like(memory[slot]) if is_empty else memory[slot].clone()
            for offset in range(span.n_tokens):
                token = first + offset
                seen = torch.cat([last, x[token : token + 1]])
                last = seen[1:]
                total = rounded((seen * taps.t()).sum(0), dtype)
                mixed = rounded(total * total.sigmoid(), dtype)
                q, k, v = mixed.split([n_keys, n_keys, self.n_values])
                q, k = (
                    each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt()
                    for each in (q.view(-1, config.key_dim), k.view(-1, config.key_dim))
                )
                q = rounded(q * config.key_dim**-0.5, dtype)
                q, k = (each.repeat_interleave(n_heads // config.n_key_heads, 0) for each in (q, rounded(k, dtype)))
                state = state * decay[token][:, None, None]
                known = (state * k[:, :, None]).sum(1)
                new = (v.view(n_heads, -1) - known) * strength[token][:, None]
                state = state + k[:, :, None] * new[:, None]
                read = rounded((state * q[:, :, None]).sum(1), dtype)
                if slot == PADDING and span.is_decode:
                    read = torch.zeros_like(read)
                normed = read / (read.square().mean(-1, keepdim=True) + 1e-6).sqrt()
                activated = gate[token] * gate[token].sigmoid()
                out.append((normed * self.weights.norm.double()).flatten() * activated)
                if (position := span.start + offset + 1) in span.saves:
                    saved_to = N_BATCH_SLOTS + span.saves[position]
                    inputs[saved_to], memory[saved_to] = last, state
            if slot != PADDING:
                inputs[slot], memory[slot] = last, state
            first += span.n_tokens
        return torch.stack(out), LayerStates(inputs, memory)


class FixedLinear(Linear):
    """A product whose output is given."""

    def __init__(self, out: Tensor) -> None:
        self._out = out

    def __call__(self, x: object, out: Tensor | None = None) -> Tensor:
        return self._out


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).double()


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
def test_a_layer_follows_the_rule(config: DeltaNetConfig, dtype: torch.dtype) -> None:
    check(World(config, RAGGED, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, HALVES])
def test_keys_that_are_all_alike(dtype: torch.dtype) -> None:
    """Then a block's matrix has ones below its diagonal, whose powers grow beyond float32."""
    check(World(delta_net(), [Span(1, 0, 140), Span(2, 64, 64)], dtype, alike=True))


def check(world: World) -> None:
    out, states = world.expected()
    untouched = sorted(
        {*range(N_BATCH_SLOTS + N_TREE_SLOTS)}
        - {span.batch_slot for span in world.spans if span.batch_slot != PADDING}
        - {N_BATCH_SLOTS + slot for span in world.spans for slot in span.saves.values()}
    )
    before = [each[untouched].clone() for each in world.states]
    found = world.run()
    assert torch.equal(world.states.inputs.double(), states.inputs), "the last inputs are copies"
    for each, copy in zip(world.states, before, strict=True):
        assert torch.equal(each[untouched], copy), "states of slots without a row were changed"
    dtype = world.projected.dtype
    # A state sums products of rounded values, and outputs are divided by their own size.
    relative = {torch.float32: 2e-5, torch.float16: 0.003, torch.bfloat16: 0.02}[dtype]
    memory = world.states.memory.double()
    assert (memory - states.memory).abs().max() < 4 * relative * states.memory.abs().max()
    assert (memory - states.memory).square().mean().sqrt() < relative * states.memory.square().mean().sqrt()
    found, typical = found.double(), out.square().mean().sqrt()
    assert (found - out).square().mean().sqrt() < 2 * relative * typical
    assert (found - out).abs().max() < 40 * relative * typical


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
    rows = np.zeros((9, 3), np.int32)
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
