"""The decoder's operations on the CPU, in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from radixkv.runtime.device.kv_dtype import LayerScales, quantize
from radixkv.runtime.device.model_config.config import DecoderConfig
from radixkv.runtime.device.model_config.experts import ExpertConfig
from radixkv.runtime.device.model_config.heads import LayerHeads
from radixkv.runtime.device.model_config.rope import Rope
from radixkv.runtime.device.model_config.states import RecurrentConfig
from radixkv.runtime.device.ops import base
from radixkv.runtime.device.ops.base import TokenInputs, gated
from radixkv.runtime.device.ops.cpu.delta_net import GatedDeltaNet
from radixkv.runtime.device.ops.cpu.layer_additions import ExpertsBeside, LayerInput
from radixkv.runtime.device.ops.cpu.layers import (
    Experts,
    LayerNorm,
    Linear,
    Mlp,
    RMSNorm,
    Rotary,
    RowTiles,
    activate,
    rotate,
)
from radixkv.runtime.device.ops.cpu.mamba2 import Mamba2
from radixkv.runtime.device.ops.cpu.page_rows import rows_of
from radixkv.runtime.device.weights.layer_weights import (
    ExpertsBesideWeights,
    ExpertsWeights,
    LayerInputWeights,
    LinearWeights,
    MlpWeights,
    NormWeights,
    RecurrentWeights,
)


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
        self._stored_rows = StoredRows()
        self._rotary = {
            (rope, size): Rotary(size, rope, max_positions)
            for rope, size in {
                (config.rope_of(layer), config.heads[layer].rotary_dim) for layer in config.attention_layers
            }
            if rope is not None
        }

    def linear(self, weights: LinearWeights) -> Linear:
        """See ``Operations.linear``."""
        return Linear(weights, self._tiles)

    def output(self, weights: LinearWeights) -> Linear:
        """See ``Operations.output``."""
        return self.linear(weights)

    def head(self, weights: LinearWeights) -> Linear:
        """See ``Operations.head``."""
        return self.linear(weights)

    def norm(self, weights: NormWeights, reader: base.RowReader | None = None) -> RMSNorm | LayerNorm:
        """See ``Operations.norm``."""
        if weights.bias is not None:
            return LayerNorm(weights.weight, weights.bias, self._config.norm_eps)
        return RMSNorm(self._norm_weight(weights.weight), self._config.norm_eps)

    def mlp(self, weights: MlpWeights) -> Mlp:
        """See ``Operations.mlp``."""
        return Mlp(weights, self._tiles, self._config.activation)

    def activated(self, x: Tensor) -> Tensor:
        """See ``adapters.operations.ActivatedOperations``."""
        return activate(self._config.activation, x)

    def recurrent_layer(self, weights: RecurrentWeights, config: RecurrentConfig) -> base.RecurrentLayer:
        """See ``Operations.recurrent_layer``."""
        if config.mamba2 is not None:
            return Mamba2(weights, config, self._tiles, self._config.norm_eps)
        return GatedDeltaNet(weights, config, self._tiles, self._config.norm_eps)

    def gated(self, x: Tensor, gate: Tensor) -> Tensor:
        """See ``Operations.gated``."""
        return gated(x, gate)

    def capped(self, logits: Tensor, cap: float) -> Tensor:
        """See ``Operations.capped``. An element's place changes no bit."""
        full = logits.float()
        decay = full.abs().mul_(-2.0 / cap).exp_()
        limited = (1.0 - decay).div_(decay.add_(1.0)).mul_(cap)
        return logits.copy_(limited.copysign_(full))

    def experts(self, weights: ExpertsWeights, config: ExpertConfig) -> Experts:
        """See ``Operations.experts``."""
        return Experts(weights, self._tiles, self._config.activation, config)

    def routed_experts(self, weights: ExpertsWeights, config: ExpertConfig) -> base.RoutedExperts:
        """See ``Operations.routed_experts``."""
        return self.experts(weights, config)

    def experts_beside(self, weights: ExpertsBesideWeights, experts: base.RoutedExperts) -> ExpertsBeside:
        """See ``Operations.experts_beside``."""
        return ExpertsBeside(
            experts,
            weights.router_scale,
            self._config.norm_eps,
            self.norm(weights.norm),
            self.norm(weights.after_mlp),
            self.norm(weights.after_experts),
        )

    def layer_input(self, weights: LayerInputWeights) -> LayerInput:
        """See ``Operations.layer_input``."""
        return LayerInput(
            self.linear(weights.gate),
            self.linear(weights.output),
            self.norm(weights.norm),
            self._config.activation,
        )

    def rotate_and_store(
        self,
        heads: LayerHeads,
        rope: Rope | None,
        query_norm: Tensor | None,
        key_norm: Tensor | None,
        scales: LayerScales,
    ) -> RotateAndStore:
        """See ``Operations.rotate_and_store``."""
        config, norm = self._config, None
        if query_norm is not None:
            weights = query_norm.expand(config.n_heads, -1)
            if key_norm is not None:
                weights = torch.cat([weights, key_norm.expand(heads.n_kv_heads, -1)])
            norm = RMSNorm(self._norm_weight(weights), config.norm_eps)
        return RotateAndStore(
            config.n_heads,
            heads,
            None if rope is None else self._rotary[rope, heads.rotary_dim],
            norm,
            RMSNorm(torch.ones(heads.head_dim), config.norm_eps) if config.has_value_norm else None,
            self._stored_rows,
            scales,
        )

    def _norm_weight(self, weight: Tensor) -> Tensor:
        """Returns what an RMS norm multiplies by."""
        if self._config.norm == "rms":
            return weight
        return weight.float() + 1.0 if self._config.norm == "rms_plus_one" else weight.float()


class StoredRows:
    """Where the K and V of a step are stored; computed once for all layers with as many KV heads."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], tuple[Tensor, Tensor, Tensor]] = {}
        """The newest slot mapping with what ``of`` returned, by the distance of two pages and the shape of one."""

    def of(self, slot_mapping: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the indices of the tokens that are stored, and the rows that they take.

        Args:
            slot_mapping: [tokens], the same object for all layers of a step with the same pages.
            cache: [pages, kv_heads, page_size, head_dim]; rows are those of ``rows_of(cache, head_dim)``.

        Returns:
            [n], and [n * kv_heads].
        """
        kind = (cache.stride(0), *cache.shape[1:])
        known = self._known.get(kind)
        if known is not None and known[0] is slot_mapping:
            return known[1:]
        n_kv_heads, page_size, head_dim = cache.shape[1:]
        tokens = (slot_mapping >= 0).nonzero()[:, 0]
        slots = slot_mapping[tokens][:, None]
        heads = torch.arange(n_kv_heads)
        pages, offsets = slots // page_size, slots % page_size
        rows = (pages * (cache.stride(0) // head_dim) + heads * page_size + offsets).flatten()
        self._known[kind] = slot_mapping, tokens, rows
        return tokens, rows


@dataclass(frozen=True)
class RotateAndStore:
    """Norms and rotates heads, and writes K and V into the pool."""

    n_heads: int
    heads: LayerHeads
    rotary: Rotary | None
    norm: RMSNorm | None
    """Its weight is [heads + kv_heads, head_dim]: each head has its own row. Of queries alone without own K."""
    value_norm: RMSNorm | None
    stored_rows: StoredRows
    scales: LayerScales

    def __call__(self, qkv: Tensor, inputs: TokenInputs, k_cache: Tensor, v_cache: Tensor, q_out: Tensor) -> None:
        """See ``ops.base.RotateAndStore``. The caches are [pages, kv_heads, page_size, head_dim]."""
        n_heads, head_dim, rotary_dim = self.n_heads, self.heads.head_dim, self.heads.rotary_dim
        n_keys = 0 if self.heads.source is not None else self.heads.n_kv_heads
        heads = qkv.view(len(qkv), -1, head_dim)
        qk = heads[:, : n_heads + n_keys]
        v = heads[:, -n_keys:]  # those of the keys without own values
        if self.norm is not None:
            qk = self.norm(qk)
        if self.rotary is not None:
            rotated = rotate(qk[..., :rotary_dim], *self.rotary.angles(inputs.positions))
            qk = rotated if rotary_dim == head_dim else torch.cat([rotated, qk[..., rotary_dim:]], -1)
        q_out.copy_(qk[:, :n_heads])
        if not n_keys:
            return
        k = qk[:, n_heads:]
        if self.value_norm is not None:
            v = self.value_norm(v)
        tokens, rows = self.stored_rows.of(inputs.slot_mapping, k_cache)
        for cache, values, scale in zip((k_cache, v_cache), (k, v), self.scales, strict=True):
            stored = values[tokens].reshape(-1, head_dim)
            cache = rows_of(cache, head_dim)
            if cache.dtype == stored.dtype:
                cache.index_copy_(0, rows, stored)
            else:  # as bytes: torch has no index_copy_ of 8-bit floats on the CPU
                cache.view(torch.uint8).index_copy_(0, rows, quantize(stored, scale).view(torch.uint8))
