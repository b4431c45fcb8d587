"""A layer of Mamba2 with random weights and states, and its rule in float64, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
from delta_net_world import N_BATCH_SLOTS, N_TREE_SLOTS, PADDING, Span, rounded, sequences_of
from kernel_support import DEVICE, normal, poisoned
from torch import Tensor

from radixkv.runtime.device.model_config.states import Mamba2Config, RecurrentConfig
from radixkv.runtime.device.ops.base import LayerStates
from radixkv.runtime.device.ops.cuda.layers import Linear
from radixkv.runtime.device.ops.cuda.mamba2.layer import Mamba2
from radixkv.runtime.device.weights.layer_weights import LinearWeights, RecurrentWeights


def mamba2(
    n_groups: int = 2,
    n_heads: int = 6,
    state_size: int = 32,
    head_size: int = 16,
    n_taps: int = 4,
    *,
    limits: tuple[float, float] = (0.0, inf),
    has_bias: bool = True,
) -> RecurrentConfig:
    rule = Mamba2Config(has_bias, limits)
    return RecurrentConfig(frozenset({0}), n_groups, n_heads, state_size, head_size, n_taps, mamba2=rule)


class Mamba2World:
    """A layer with random weights, random states of all slots, and what a step reads.

    Args:
        config: of the layer.
        spans: rows of the step, decode rows first.
        dtype: of activations.
        step_bias: mean bias of the time steps; negative ones make these small.
    """

    def __init__(
        self, config: RecurrentConfig, spans: Sequence[Span], dtype: torch.dtype, *, step_bias: float = 0.0
    ) -> None:
        torch.manual_seed(len(spans))
        self.config, self.spans = config, spans
        n_tokens, n_slots = sum(span.n_tokens for span in spans), N_BATCH_SLOTS + N_TREE_SLOTS
        n_heads, self.n_values = config.n_value_heads, config.n_value_heads * config.value_dim
        assert config.mamba2 is not None
        self.rule = config.mamba2
        self.projected = normal(n_tokens, self.n_values + config.n_channels + n_heads, dtype=dtype)
        self.weights = RecurrentWeights(
            inputs=LinearWeights(self.projected),
            convolution=normal(config.n_channels, config.n_taps, dtype=dtype, scale=0.5),
            log_decay=torch.linspace(-3.0, 2.5, n_heads, device=DEVICE),
            decay_bias=step_bias + normal(n_heads, dtype=torch.float32),
            norm=1.0 + normal(self.n_values, dtype=dtype, scale=0.1),
            convolution_bias=normal(config.n_channels, dtype=dtype) if self.rule.has_convolution_bias else None,
            skip=normal(n_heads, dtype=torch.float32),
        )
        self.states = LayerStates(
            normal(n_slots, config.n_taps - 1, config.n_channels, dtype=dtype),
            normal(n_slots, n_heads, config.key_dim, config.value_dim, dtype=torch.float32, scale=0.3),
        )
        self.sequences = sequences_of(spans)

    def run(self) -> Tensor:
        layer = Mamba2(self.weights, Linear(self.projected, None), self.config, self.rule, 1e-6)
        read = poisoned(len(self.projected), self.n_values, dtype=self.projected.dtype)
        layer.scan(self.projected, self.sequences, self.states, read)
        return layer.finish(self.projected, read)

    def expected(self) -> tuple[Tensor, LayerStates]:
        """Returns the output and all states in float64, of activations that are rounded where the kernels do it."""
        config, dtype, weights = self.config, self.projected.dtype, self.weights
        inputs, memory = (each.double().clone() for each in self.states)
        n_heads, n_keys = config.n_value_heads, config.n_key_heads * config.key_dim
        gate, mixed, step = self.projected.double().split([self.n_values, config.n_channels, n_heads], -1)
        step = torch.nn.functional.softplus(step + weights.decay_bias).clamp(*self.rule.time_step_limits)
        decay = (-weights.log_decay.double().exp() * step).exp()
        bias = 0.0 if weights.convolution_bias is None else weights.convolution_bias.double()
        assert weights.skip is not None
        out, first = [], 0
        for span in self.spans:
            slot = span.batch_slot
            is_empty = span.start == 0 or slot == PADDING
            last = torch.zeros_like(inputs[slot]) if is_empty else inputs[slot].clone()
            state = torch.zeros_like(memory[slot]) if is_empty else memory[slot].clone()
            for offset in range(span.n_tokens):
                token = first + offset
                seen = torch.cat([last, mixed[token : token + 1]])
                last = seen[1:]
                total = rounded((seen * weights.convolution.double().t()).sum(0) + bias, dtype)
                x, b, c = rounded(total * total.sigmoid(), dtype).split([self.n_values, n_keys, n_keys])
                x = x.view(n_heads, config.value_dim)
                b, c = (
                    each.view(-1, config.key_dim).repeat_interleave(n_heads // config.n_key_heads, 0)
                    for each in (b, c)
                )
                state = state * decay[token][:, None, None]
                state = state + b[:, :, None] * (x * step[token][:, None])[:, None]
                read = rounded((state * c[:, :, None]).sum(1) + x * weights.skip.double()[:, None], dtype)
                if slot == PADDING and span.is_decode:
                    read = torch.zeros_like(read)
                groups = (read.flatten() * gate[token] * gate[token].sigmoid()).view(config.n_key_heads, -1)
                normed = groups / (groups.square().mean(-1, keepdim=True) + 1e-6).sqrt()
                out.append(normed.flatten() * weights.norm.double())
                if (position := span.start + offset + 1) in span.saves:
                    saved_to = N_BATCH_SLOTS + span.saves[position]
                    inputs[saved_to], memory[saved_to] = last, state
            if slot != PADDING:
                inputs[slot], memory[slot] = last, state
            first += span.n_tokens
        return torch.stack(out), LayerStates(inputs, memory)
