"""A gated delta net with random weights and states, and its rule in float64, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from kernel_support import DEVICE, integers, normal, poisoned
from torch import Tensor

from radixkv.runtime.device.model_config.states import RecurrentConfig
from radixkv.runtime.device.ops.base import BlockArrays, DeviceSequences, LayerStates
from radixkv.runtime.device.ops.cuda.delta_net.layer import GatedDeltaNet
from radixkv.runtime.device.ops.cuda.delta_net.sequences import block_arrays
from radixkv.runtime.device.ops.cuda.layers import Linear
from radixkv.runtime.device.pack import RowArrays
from radixkv.runtime.device.weights.layer_weights import LinearWeights, RecurrentWeights
from radixkv.runtime.step.plan import StateSave

N_BATCH_SLOTS, N_TREE_SLOTS = 6, 4
PADDING = N_BATCH_SLOTS
"""The batch slot of padding rows, whose number is that of the first slot of the tree."""


def delta_net(
    n_keys: int = 2, n_values: int = 4, key_dim: int = 32, value_dim: int = 16, n_taps: int = 4
) -> RecurrentConfig:
    return RecurrentConfig(frozenset({0}), n_keys, n_values, key_dim, value_dim, n_taps)


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
    arrays = np.zeros((10, len(spans)), np.int32)
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
        self, config: RecurrentConfig, spans: Sequence[Span], dtype: torch.dtype, *, alike: bool = False
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
        self.weights = RecurrentWeights(
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
        layer = GatedDeltaNet(self.weights, Linear(self.projected, None), self.config, 1e-6)
        read = poisoned(len(self.projected), self.n_values, dtype=self.projected.dtype)
        layer.scan(self.projected, self.sequences, self.states, read)
        return layer.finish(self.projected, read)

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


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).double()


class LayerWorld(Protocol):
    """A layer with states, and what it reads."""

    @property
    def spans(self) -> Sequence[Span]: ...
    @property
    def projected(self) -> Tensor: ...
    @property
    def states(self) -> LayerStates: ...
    def run(self) -> Tensor: ...
    def expected(self) -> tuple[Tensor, LayerStates]: ...


def check(world: LayerWorld) -> None:
    """Checks outputs and states against the rule, and that other slots keep their states."""
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
