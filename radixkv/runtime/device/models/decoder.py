"""One transformer decoder for all supported checkpoints."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from radixkv.runtime.device.models.config import DecoderConfig
from radixkv.runtime.device.models.layers import Linear, RMSNorm, Rotary, rotate, swiglu
from radixkv.runtime.device.models.weights import DecoderWeights, LayerWeights

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim]) -> [tokens, heads * head_dim]."""

_MLP_ROWS = 256
"""As many at a time as keeps the wide activations in the processor's cache."""


class Decoder:
    """Token ids to hidden states to logits. Attention, and with it the KV cache, arrives as an argument."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, max_positions: int) -> None:
        self._embedding = weights.embedding
        self._layers = [_Layer(config, layer) for layer in weights.layers]
        self._final_norm = RMSNorm(weights.final_norm, config.norm_eps)
        self._head = Linear(weights.head)
        self._rotary = Rotary(config.head_dim, config.rope_theta, config.rope_scaling, max_positions)

    def __call__(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The last layer's normed states, [tokens, hidden].

        Args:
            ids: [tokens] int64.
            positions: [tokens] int64, each token's place in its own sequence.
            attend: called once a layer, in order.
        """
        angles = self._rotary.angles(positions)
        x = torch.index_select(self._embedding, 0, ids)
        for index, layer in enumerate(self._layers):
            x = layer(index, x, angles, attend)
        return self._final_norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab]."""
        return self._head(hidden)


class _Layer:
    def __init__(self, config: DecoderConfig, weights: LayerWeights) -> None:
        self._heads = [config.n_heads, config.n_kv_heads, config.n_kv_heads]
        self._head_dim = config.head_dim
        self._attention_norm = RMSNorm(weights.attention_norm, config.norm_eps)
        self._query_key_value = Linear(weights.query_key_value)
        self._output = Linear(weights.output)
        self._mlp_norm = RMSNorm(weights.mlp_norm, config.norm_eps)
        self._gate_up = Linear(weights.gate_up)
        self._down = Linear(weights.down)

    def __call__(self, index: int, x: Tensor, angles: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        heads = self._query_key_value(self._attention_norm(x)).view(len(x), -1, self._head_dim)
        turned, v = torch.split(heads, [sum(self._heads[:2]), self._heads[2]], 1)
        q, k = torch.split(rotate(turned, *angles), self._heads[:2], 1)
        x = x + self._output(attend(index, q, k, v))
        for rows in torch.split(x, _MLP_ROWS):
            rows.add_(self._down(swiglu(self._gate_up(self._mlp_norm(rows)))))
        return x
