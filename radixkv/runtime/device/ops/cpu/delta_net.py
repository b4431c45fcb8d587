"""Gated delta nets in plain torch, token by token, so that chunks of a prompt change no bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from radixkv.runtime.device.model_config.states import RecurrentConfig
from radixkv.runtime.device.ops import base
from radixkv.runtime.device.ops.base import LayerStates, Rows, Sequences, as_tensor
from radixkv.runtime.device.ops.cpu.layers import Linear, RowTiles
from radixkv.runtime.device.weights.layer_weights import RecurrentWeights

_LINEAR_ABOVE = 20.0
"""Above it ``log(1 + exp(x))`` is ``x`` in float32."""
_MIN_NORM = 1e-6
"""Is added to the squared length of queries and keys before they are divided by it, as in Transformers."""


class GatedDeltaNet(base.RecurrentLayer):
    """A gated delta net (Yang et al., arXiv 2412.06464), up to the projection of its output.

    Each value head has a matrix of keys and values. A token lets it decay, reads what it has for the token's key,
    writes the difference to the token's value, and reads it with its query. Cost: O(tokens) small operations, which
    take 0.1 ms a token; states and sums are float32.

    Args:
        weights: of the layer.
        config: of the model's delta nets.
        tiles: of the device's products.
        eps: of the norm of its output.
    """

    def __init__(self, weights: RecurrentWeights, config: RecurrentConfig, tiles: RowTiles, eps: float) -> None:
        assert weights.gates is None, "the CPU has no quantized matrices"
        self._config = config
        self._inputs = Linear(weights.inputs, tiles)
        self._taps = weights.convolution.float().unbind(1)
        self._decay = -weights.log_decay.exp()
        self._decay_bias = weights.decay_bias
        self._norm = weights.norm
        self._eps = eps

    def project(self, normed: Rows, out: Tensor) -> None:
        """See ``ops.base.RecurrentLayer``."""
        normed = as_tensor(normed)
        self._inputs(normed, out[: len(normed)])

    def scan(self, projected: Tensor, sequences: Sequences, states: LayerStates, out: Tensor) -> None:
        """See ``ops.base.RecurrentLayer``."""
        assert isinstance(sequences, tuple), "on the CPU rows are spans"
        config = self._config
        mixed, _, strength, decay = projected.split(
            [config.n_channels, config.n_values, config.n_value_heads, config.n_value_heads], -1
        )
        strength = sigmoid(strength.float())
        decay = (softplus(decay.float() + self._decay_bias) * self._decay).exp_()
        out = out.unflatten(1, (config.n_value_heads, config.value_dim))
        for span in sequences:
            rows = slice(span.first, span.first + span.n_tokens)
            if span.start == 0:
                states.inputs[span.batch_slot] = 0
                states.memory[span.batch_slot] = 0
            convolved = convolve(mixed[rows], states.inputs[span.batch_slot], self._taps)
            self._scan(convolved, strength[rows], decay[rows], states.memory[span.batch_slot], out[rows])
            if span.saved_to is not None:
                states.inputs[span.saved_to] = states.inputs[span.batch_slot]
                states.memory[span.saved_to] = states.memory[span.batch_slot]

    def finish(self, projected: Tensor, read: Tensor) -> Tensor:
        """See ``ops.base.RecurrentLayer``."""
        config = self._config
        heads = config.n_value_heads, config.value_dim
        gate = projected[:, config.n_channels : config.n_channels + config.n_values]
        return self._normed(read.unflatten(1, heads), gate.unflatten(1, heads)).flatten(1)

    def _scan(self, convolved: Tensor, strength: Tensor, decay: Tensor, memory: Tensor, out: Tensor) -> None:
        """Reads and writes a sequence's memory, [value heads, key_dim, value_dim], token by token."""
        config = self._config
        n_keys = config.n_key_heads * config.key_dim
        query, key, value = convolved.float().split([n_keys, n_keys, convolved.shape[1] - 2 * n_keys], -1)
        heads_a_key = config.n_value_heads // config.n_key_heads
        query, key = (
            _normalized(one.reshape(len(one), config.n_key_heads, config.key_dim)).repeat_interleave(heads_a_key, 1)
            for one in (query, key)
        )
        query = query * config.key_dim**-0.5
        value = value.reshape(len(value), config.n_value_heads, config.value_dim)
        for token in range(len(value)):
            memory *= decay[token, :, None, None]
            row = key[token, :, :, None]
            known = (memory * row).sum(1)
            memory += row * ((value[token] - known) * strength[token, :, None])[:, None]
            out[token] = (memory * query[token, :, :, None]).sum(1)

    def _normed(self, x: Tensor, gate: Tensor) -> Tensor:
        """Norms each head of [tokens, value heads, value_dim], and multiplies it by the activated gate."""
        full = x.float()
        scale = full.square().mean(-1, keepdim=True).add_(self._eps).rsqrt_()
        gate = gate.float()
        return ((full * scale).to(x.dtype) * self._norm * (gate * sigmoid(gate))).to(x.dtype)


def convolve(mixed: Tensor, last: Tensor, taps: Sequence[Tensor], bias: Tensor | None = None) -> Tensor:
    """Convolves tokens over time, and activates the result.

    Args:
        mixed: [tokens, channels].
        last: [taps - 1, channels], what came before them; overwritten by the last of both.
        taps: [channels] float32 each; the last one is the token's own.
        bias: [channels] float32.
    """
    seen = torch.cat([last, mixed])
    last.copy_(seen[len(mixed) :])
    total = seen[: len(mixed)].float() * taps[0]
    for tap, weight in enumerate(taps[1:], 1):
        total += seen[tap : tap + len(mixed)].float() * weight
    if bias is not None:
        total += bias
    total = total.to(mixed.dtype).float()
    return (total * sigmoid(total)).to(mixed.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """Written out because torch's rounds differently by an element's place."""
    return x.neg().exp_().add_(1.0).reciprocal_()


def softplus(x: Tensor) -> Tensor:
    """``log(1 + exp(x))``, in float64 because the logarithm's last bits depend on an element's place."""
    full = x.double()
    return torch.where(full > _LINEAR_ABOVE, full, full.exp().log1p()).float()


def _normalized(x: Tensor) -> Tensor:
    """Divides each head by its length."""
    return x * (x.square().sum(-1, keepdim=True) + _MIN_NORM).rsqrt()
