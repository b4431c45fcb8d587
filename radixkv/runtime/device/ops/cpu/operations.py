"""The decoder's operations on the CPU, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from radixkv.runtime.device.model_config.config import DecoderConfig, ExpertConfig
from radixkv.runtime.device.ops.base import TokenInputs
from radixkv.runtime.device.ops.cpu.layers import Linear, RMSNorm, Rotary, RowTiles, rms_norm, rotate
from radixkv.runtime.device.ops.cpu.mlp import Experts, Mlp
from radixkv.runtime.device.weights.weights import ExpertsWeights, LinearWeights, MlpWeights


class CpuOperations:
    """``Operations`` on the CPU. In float32 a row's result depends on that row alone, bit for bit.

    Args:
        config: of the model.
        max_positions: most positions of a sequence.

    Raises:
        ConfigError: the rotary angles of ``max_positions`` do not fit into memory.
    """

    def __init__(self, config: DecoderConfig, max_positions: int) -> None:
        self._config = config
        self._tiles = RowTiles()
        self._rotary = Rotary(config.head_dim, config.rope, max_positions)

    def linear(self, weights: LinearWeights) -> Linear:
        """See ``Operations.linear``."""
        return Linear(weights, self._tiles)

    def norm(self, weight: Tensor) -> RMSNorm:
        """See ``Operations.norm``."""
        return RMSNorm(weight, self._config.norm_eps)

    def mlp(self, weights: MlpWeights) -> Mlp:
        """See ``Operations.mlp``."""
        return Mlp(weights, self._tiles)

    def experts(self, weights: ExpertsWeights, config: ExpertConfig) -> Experts:
        """See ``Operations.experts``."""
        return Experts(weights, self._tiles, n_active=config.n_active, normalizes=config.normalizes)

    def rotate_and_store(self, query_norm: Tensor | None, key_norm: Tensor | None) -> RotateAndStore:
        """See ``Operations.rotate_and_store``."""
        return RotateAndStore(self._config, self._rotary, query_norm, key_norm)


class RotateAndStore:
    """Norms and rotates heads, and writes K and V into the pool."""

    def __init__(
        self, config: DecoderConfig, rotary: Rotary, query_norm: Tensor | None, key_norm: Tensor | None
    ) -> None:
        self._n_heads, self._n_kv_heads = config.n_heads, config.n_kv_heads
        self._eps = config.norm_eps
        self._rotary = rotary
        self._norm: Tensor | None = None
        """[heads + kv_heads, head_dim]: weight of each head's norm."""
        if query_norm is not None and key_norm is not None:
            parts = [query_norm.expand(config.n_heads, -1), key_norm.expand(config.n_kv_heads, -1)]
            self._norm = torch.cat(parts)

    def __call__(self, qkv: Tensor, inputs: TokenInputs, k_cache: Tensor, v_cache: Tensor, q_out: Tensor) -> None:
        """See ``ops.base.RotateAndStore``. The caches are [pages, kv_heads, page_size, head_dim]."""
        head_dim = q_out.shape[-1]
        heads = qkv.view(len(qkv), -1, head_dim)
        qk, v = torch.split(heads, [self._n_heads + self._n_kv_heads, self._n_kv_heads], 1)
        if self._norm is not None:
            qk = rms_norm(qk, self._norm, self._eps)
        q, k = torch.split(rotate(qk, *self._rotary.angles(inputs.positions)), [self._n_heads, self._n_kv_heads], 1)
        q_out.copy_(q)
        for cache, values in ((k_cache, k), (v_cache, v)):
            stored = values if inputs.stored is None else values[inputs.stored]
            cache.view(-1, head_dim).index_copy_(0, inputs.slot_mapping, stored.reshape(-1, head_dim))
