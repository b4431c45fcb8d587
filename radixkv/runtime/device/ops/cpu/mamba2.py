"""Layers of Mamba2 in plain torch, token by token, so that chunks of a prompt change no bit."""

from __future__ import annotations

from torch import Tensor

from radixkv.runtime.device.model_config.states import Mamba2Config, RecurrentConfig
from radixkv.runtime.device.ops import base
from radixkv.runtime.device.ops.base import LayerStates, Rows, Sequences, as_tensor
from radixkv.runtime.device.ops.cpu.delta_net import convolve, sigmoid, softplus
from radixkv.runtime.device.ops.cpu.layers import Linear, RowTiles
from radixkv.runtime.device.weights.layer_weights import RecurrentWeights


class Mamba2(base.RecurrentLayer):
    """A layer of Mamba2 (Dao and Gu, arXiv 2405.21060), up to the projection of its output.

    Each head has a matrix of the state's size and its own. A token lets it decay by its time step, adds the product
    of its B and x, and reads it with its C. Heads of a group have one B and one C. Cost: O(tokens) small
    operations; states and sums are float32.

    Args:
        weights: of the layer.
        config: of the model's layers of Mamba2.
        tiles: of the device's products.
        eps: of the norm of its output.
    """

    def __init__(self, weights: RecurrentWeights, config: RecurrentConfig, tiles: RowTiles, eps: float) -> None:
        assert config.mamba2 is not None, "other layers have another rule"
        assert weights.skip is not None, "layers of Mamba2 have it"
        self._config = config
        self._mamba2: Mamba2Config = config.mamba2
        self._inputs = Linear(weights.inputs, tiles)
        self._taps = weights.convolution.float().unbind(1)
        self._bias = None if weights.convolution_bias is None else weights.convolution_bias.float()
        self._decay = -weights.log_decay.exp()
        self._step_bias = weights.decay_bias
        self._skip = weights.skip[:, None]
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
        _, mixed, step = projected.split([config.n_values, config.n_channels, config.n_value_heads], -1)
        step = softplus(step.float() + self._step_bias).clamp_(*self._mamba2.time_step_limits)
        decay = (step * self._decay).exp_()
        out = out.unflatten(1, (config.n_value_heads, config.value_dim))
        for span in sequences:
            rows = slice(span.first, span.first + span.n_tokens)
            if span.start == 0:
                states.inputs[span.batch_slot] = 0
                states.memory[span.batch_slot] = 0
            convolved = convolve(mixed[rows], states.inputs[span.batch_slot], self._taps, self._bias)
            self._scan(convolved, step[rows], decay[rows], states.memory[span.batch_slot], out[rows])
            if span.saved_to is not None:
                states.inputs[span.saved_to] = states.inputs[span.batch_slot]
                states.memory[span.saved_to] = states.memory[span.batch_slot]

    def finish(self, projected: Tensor, read: Tensor) -> Tensor:
        """See ``ops.base.RecurrentLayer``."""
        return self._normed(read.float(), projected[:, : self._config.n_values])

    def _scan(self, convolved: Tensor, step: Tensor, decay: Tensor, memory: Tensor, out: Tensor) -> None:
        """Reads and writes a sequence's memory, [heads, state size, head size], token by token."""
        config = self._config
        n_keys = config.n_key_heads * config.key_dim
        x, b, c = convolved.float().split([convolved.shape[1] - 2 * n_keys, n_keys, n_keys], -1)
        x = x.reshape(len(x), config.n_value_heads, config.value_dim)
        heads_a_group = config.n_value_heads // config.n_key_heads
        b, c = (
            one.reshape(len(one), config.n_key_heads, config.key_dim).repeat_interleave(heads_a_group, 1)
            for one in (b, c)
        )
        for token in range(len(x)):
            memory *= decay[token, :, None, None]
            memory += b[token, :, :, None] * (x[token] * step[token, :, None])[:, None]
            out[token] = (memory * c[token, :, :, None]).sum(1) + x[token] * self._skip

    def _normed(self, x: Tensor, gate: Tensor) -> Tensor:
        """Multiplies [tokens, size] by the activated gate, and norms each group of it."""
        gate = gate.float()
        groups: Tensor = (x * (gate * sigmoid(gate))).unflatten(1, (self._config.n_key_heads, -1))
        scale = groups.square().mean(-1, keepdim=True).add_(self._eps).rsqrt_()
        return (groups * scale).flatten(1).to(self._norm.dtype) * self._norm
