"""The transformer decoder of all supported checkpoints on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from radixkv.runtime.device.model.mlp_cpu import Experts, Mlp
from radixkv.runtime.device.model_config.config import DecoderConfig
from radixkv.runtime.device.ops.cpu.layers import Linear, RMSNorm, Rotary, RowTiles, rotate
from radixkv.runtime.device.weights.weights import ExpertsWeights, LayerWeights, LinearWeights, Weights

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attention of one layer.

Maps (layer, q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim]) to [tokens, heads * head_dim].
"""


class Decoder:
    """Computes hidden states and logits. The caller passes attention, and with it the KV cache, as a function."""

    def __init__(self, weights: Weights, max_positions: int) -> None:
        """Reads the weights.

        Raises:
            CheckpointError: a tensor cannot be read.
            ConfigError: the rotary angles of ``max_positions`` do not fit into memory.
        """
        config = weights.config
        tiles = RowTiles()
        self._rotary = Rotary(config.head_dim, config.rope, max_positions)
        self._embedding = weights.embedding()
        self._layers = [_Layer(config, index, weights.layer(index), tiles) for index in range(config.n_layers)]
        self._final_norm = RMSNorm(weights.final_norm(), config.norm_eps)
        self._head = Linear(LinearWeights(self._embedding if config.tied_head else weights.head()), tiles)

    def __call__(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Returns the final hidden states after the last norm, [tokens, hidden].

        Args:
            ids: [tokens] int64.
            positions: [tokens] int64, position of each token in its own sequence.
            attend: called once per layer, in order.
        """
        angles = self._rotary.angles(positions)
        x = torch.index_select(self._embedding, 0, ids)
        for index, layer in enumerate(self._layers):
            x = layer(index, x, angles, attend)
        return self._final_norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Maps hidden states [rows, hidden] to logits [rows, vocab] float32."""
        return self._head(hidden).float()


class _Layer:
    def __init__(self, config: DecoderConfig, index: int, weights: LayerWeights, tiles: RowTiles) -> None:
        self._heads = [config.n_heads, config.n_kv_heads]
        self._head_dim = config.head_dim
        self._attention_norm = RMSNorm(weights.attention_norm, config.norm_eps)
        self._query_key_value = Linear(weights.query_key_value, tiles)
        self._query_key_norm = _query_key_norm(config, weights)
        self._output = Linear(weights.output, tiles)
        self._mlp_norm = RMSNorm(weights.mlp_norm, config.norm_eps)
        self._mlp = _mlp(config, index, weights, tiles)

    def __call__(self, index: int, x: Tensor, angles: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        heads = self._query_key_value(self._attention_norm(x)).view(len(x), -1, self._head_dim)
        qk, v = torch.split(heads, [sum(self._heads), self._heads[1]], 1)
        if self._query_key_norm is not None:
            qk = self._query_key_norm(qk)
        q, k = torch.split(rotate(qk, *angles), self._heads, 1)
        x = x + self._output(attend(index, q, k, v))
        for rows in torch.split(x, self._mlp.chunk_rows):
            rows.add_(self._mlp(self._mlp_norm(rows)))
        return x


def _query_key_norm(config: DecoderConfig, weights: LayerWeights) -> RMSNorm | None:
    """Returns the norm over each head's values, with one weight for all query heads and one for all key heads."""
    if weights.query_norm is None or weights.key_norm is None:
        return None
    parts = [weights.query_norm.expand(config.n_heads, -1), weights.key_norm.expand(config.n_kv_heads, -1)]
    return RMSNorm(torch.cat(parts), config.norm_eps)


def _mlp(config: DecoderConfig, index: int, weights: LayerWeights, tiles: RowTiles) -> Mlp | Experts:
    if not isinstance(weights.mlp, ExpertsWeights):
        return Mlp(weights.mlp, tiles)
    experts = config.experts_of(index)
    assert experts is not None
    return Experts(weights.mlp, tiles, n_active=experts.n_active, normalizes=experts.normalizes)
