"""The dense transformer decoder over fused kernels: what ``models.decoder`` is to the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from radixkv.errors import ConfigError
from radixkv.runtime.device.attention.cuda.base import LayerAttention
from radixkv.runtime.device.kv_pool_cuda import CudaPool
from radixkv.runtime.device.ops.cuda.activation import silu_and_multiply
from radixkv.runtime.device.ops.cuda.linear import gated_linear, linear
from radixkv.runtime.device.ops.cuda.linear_add_norm import add_linear_and_norm
from radixkv.runtime.device.ops.cuda.norm import add_rms_norm, rms_norm
from radixkv.runtime.device.ops.cuda.rotary import rotate_and_store
from radixkv.runtime.device.persistent_batch_cuda import Places
from radixkv.runtime.device.spec.config import DecoderConfig
from radixkv.runtime.device.spec.rope import Rope
from radixkv.runtime.device.weights.weights import LayerWeights, LinearWeights, MlpWeights, Weights


@dataclass(frozen=True)
class Batch:
    """A step's tokens on their way through the layers."""

    residual: Tensor
    """[tokens, hidden]"""
    normed: Tensor
    """[tokens, hidden]"""
    q: Tensor
    """[tokens, heads, head_dim], rotated: what the next attention asks."""
    attended: Tensor
    """[tokens, heads, head_dim]: what it answers."""

    def first(self, n_tokens: int) -> Batch:
        """The same without the tokens behind."""
        return Batch(self.residual[:n_tokens], self.normed[:n_tokens], self.q[:n_tokens], self.attended[:n_tokens])


@dataclass(frozen=True)
class Wanted:
    """The tokens whose states are wanted: no more than these go through the last layer's attention and MLP."""

    tokens: Tensor
    """[wanted] int32, places in the batch."""
    attention: Callable[[], LayerAttention]
    """Gives attention of these tokens; called when everything before it is enqueued."""


class CudaDecoder:
    """Token ids to hidden states to logits.

    The residual stream is kept apart from what the layers add to it, so that each addition is one kernel with the
    norm that follows it. A step is ``enter``, then each layer's attention, with ``advance`` between two of them and
    ``leave`` around the last: what has no attention in it can be a CUDA graph for any step of so many tokens.

    Raises:
        CheckpointError: the weights cannot be read.
        ConfigError: a layer has experts.
    """

    def __init__(self, weights: Weights, max_positions: int, device: torch.device) -> None:
        config = weights.config
        self._config = config
        self._cosine_sine = _angles(config.rope, config.head_dim, max_positions).to(device)
        self._embedding = weights.embedding()
        self._layers = [_layer(config, index, weights.layer(index)) for index in range(config.n_layers)]
        self._final_norm = weights.final_norm()
        self._head = self._embedding if config.tied_head else weights.head()

    @property
    def n_layers(self) -> int:
        """Calls of attention in a step."""
        return self._config.n_layers

    def empty_batch(self, n_tokens: int) -> Batch:
        """Room for so many tokens."""
        hidden = (n_tokens, self._config.hidden_size)
        heads = (n_tokens, self._config.n_heads, self._config.head_dim)
        empty = self._embedding.new_empty
        return Batch(empty(hidden), empty(hidden), empty(heads), empty(heads))

    def __call__(
        self, places: Places, pool: CudaPool, attention: LayerAttention, wanted: Wanted | None = None
    ) -> Tensor:
        """The last layer's normed states, [tokens, hidden]; K and V of all tokens are stored on the way.

        Args:
            wanted: the tokens whose states are returned, [wanted, hidden]; None for all.
        """
        batch = self.empty_batch(len(places.ids))
        self.enter(batch, places, pool)
        for index in range(self.n_layers - 1):
            attention.run(index, batch.q, *pool.layer(index), batch.attended)
            self.advance(index, batch, places, pool)
        return self.leave(batch, pool, attention, wanted)

    def enter(self, batch: Batch, places: Places, pool: CudaPool) -> None:
        """All before the first attention."""
        torch.index_select(self._embedding, 0, places.ids, out=batch.residual)
        rms_norm(batch.residual, self._layers[0].attention_norm, self._config.norm_eps, batch.normed)
        self._store(0, batch, places, pool)

    def advance(self, index: int, batch: Batch, places: Places, pool: CudaPool) -> None:
        """All between the attention of layer ``index`` and that of the next one."""
        next_norm = self._layers[index + 1].attention_norm
        self._finish(self._layers[index], batch.attended, batch.residual, next_norm, batch.normed)
        self._store(index + 1, batch, places, pool)

    def leave(
        self, batch: Batch, pool: CudaPool, attention: LayerAttention, wanted: Wanted | None = None
    ) -> Tensor:
        """The last layer's attention and all behind it, as in ``__call__``; into memory of the batch for all."""
        index = self.n_layers - 1
        if wanted is not None:
            # Nothing reads what this layer would compute of other tokens.
            q, residual = (x.index_select(0, wanted.tokens) for x in (batch.q, batch.residual))
            batch = Batch(residual, torch.empty_like(residual), q, torch.empty_like(q))
            attention = wanted.attention()
        attention.run(index, batch.q, *pool.layer(index), batch.attended)
        self._finish(self._layers[index], batch.attended, batch.residual, self._final_norm, batch.normed)
        return batch.normed

    def _store(self, index: int, batch: Batch, places: Places, pool: CudaPool) -> None:
        """Puts K and V of layer ``index`` into the pool, and its rotated queries into the batch."""
        layer = self._layers[index]
        rotate_and_store(
            _product(batch.normed, layer.query_key_value),
            places.positions,
            places.slot_mapping,
            self._cosine_sine,
            *pool.layer(index),
            batch.q,
            query_norm=layer.query_norm,
            key_norm=layer.key_norm,
            eps=self._config.norm_eps,
        )

    def _finish(self, layer: _Layer, attended: Tensor, residual: Tensor, next_norm: Tensor, normed: Tensor) -> None:
        """A layer behind its attention; ``normed`` is what the next one begins with."""
        self._add(attended.view(len(attended), -1), layer.output, residual, layer.mlp_norm, normed)
        self._add(_gated(normed, layer.gate_up), layer.down, residual, next_norm, normed)

    def _add(self, x: Tensor, weights: LinearWeights, residual: Tensor, norm: Tensor, normed: Tensor) -> None:
        """Adds a product to the residual stream, and norms the sum."""
        if weights.bias is None:
            add_linear_and_norm(x, weights.weight, residual, norm, self._config.norm_eps, normed)
        else:
            add_rms_norm(_product(x, weights), residual, norm, self._config.norm_eps, normed)

    def empty_logits(self, n_rows: int) -> Tensor:
        """Room for ``logits``: [n_rows, vocab]."""
        return self._head.new_empty(n_rows, len(self._head))

    def logits(self, hidden: Tensor, out: Tensor) -> None:
        """[rows, hidden] -> ``out`` [rows, vocab], in the weights' dtype."""
        linear(hidden, self._head, out)


@dataclass(frozen=True)
class _Layer:
    attention_norm: Tensor
    query_key_value: LinearWeights
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: LinearWeights
    mlp_norm: Tensor
    gate_up: LinearWeights
    down: LinearWeights


def _layer(config: DecoderConfig, index: int, weights: LayerWeights) -> _Layer:
    if not isinstance(weights.mlp, MlpWeights):
        raise ConfigError(
            f"layer {index} of this {config.architecture} has experts, which this release does not run on CUDA; "
            "use --device cpu"
        )
    return _Layer(
        attention_norm=weights.attention_norm,
        query_key_value=weights.query_key_value,
        query_norm=weights.query_norm,
        key_norm=weights.key_norm,
        output=weights.output,
        mlp_norm=weights.mlp_norm,
        gate_up=weights.mlp.gate_up,
        down=weights.mlp.down,
    )


def _gated(x: Tensor, weights: LinearWeights) -> Tensor:
    out = x.new_empty(len(x), len(weights.weight) // 2)
    if weights.bias is None:
        gated_linear(x, weights.weight, out)
    else:
        silu_and_multiply(_product(x, weights), out)
    return out


def _product(x: Tensor, weights: LinearWeights) -> Tensor:
    out = x.new_empty(len(x), len(weights.weight))
    if weights.bias is None:
        linear(x, weights.weight, out)
    else:
        torch.addmm(weights.bias, x, weights.weight.t(), out=out)
    return out


def _angles(rope: Rope, head_dim: int, max_positions: int) -> Tensor:
    """[max_positions, head_dim] float32: cosines, then sines, each of half the head's dimensions."""
    angles = torch.arange(max_positions).float()[:, None] * rope.frequencies(head_dim)
    return torch.cat([angles.cos() * rope.amplitude, angles.sin() * rope.amplitude], -1)
