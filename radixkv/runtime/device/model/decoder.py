"""The transformer decoder of all supported checkpoints, over the operations of a device."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, is_dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from radixkv.runtime.device.attention.base import LayerAttention
from radixkv.runtime.device.kv_dtype import UNSCALED, LayerScales
from radixkv.runtime.device.model_config.config import DecoderConfig
from radixkv.runtime.device.ops.base import (
    Linear,
    Mlp,
    Norm,
    Operations,
    RotateAndStore,
    Rows,
    TokenInputs,
    as_tensor,
)
from radixkv.runtime.device.weights.layer_weights import ExpertsWeights, LayerWeights, LinearWeights
from radixkv.runtime.device.weights.weights import Weights


class LayerCaches(Protocol):
    """The KV pool, as the decoder uses it."""

    @property
    def layers(self) -> Sequence[tuple[Tensor, Tensor]]:
        """K and V of each layer."""
        ...


@dataclass(frozen=True)
class Activations:
    """Activations of a step's tokens between kernels."""

    residual: Tensor
    """[tokens, hidden]: the residual stream."""
    q: Tensor
    """[tokens, heads, head_dim]: rotated queries of the next attention."""
    attention_out: Tensor
    """[tokens, heads, head_dim]: output of attention."""

    def first(self, n_tokens: int) -> Activations:
        """Returns views of the first ``n_tokens`` tokens."""
        return Activations(self.residual[:n_tokens], self.q[:n_tokens], self.attention_out[:n_tokens])


@dataclass(frozen=True)
class OutputTokens:
    """The tokens whose last states are needed: only these go through the last layer's attention and MLP."""

    indices: Tensor
    """[n] int32: indices of the tokens in the step. The last ones may be padding."""
    attention: Callable[[], LayerAttention]
    """Returns attention of these tokens, without padding; called after everything before it is enqueued."""


class Decoder:
    """Token ids to hidden states to logits.

    Each addition to the residual stream is followed by the norm of the next half of a layer, so that a device may
    fuse them. A step is ``run_before_first_attention``, then the attention of each layer but the last, each
    followed by ``run_between_attentions``, then ``run_from_last_attention``. The first two contain no attention, so
    they can be CUDA graphs for any step with the same number of tokens.

    Args:
        weights: open, and of the dtype to compute in.
        operations: of the device that has the weights.
        kv_scales: [layers], of a pool with a quantized dtype; None: all are 1.

    Raises:
        CheckpointError: the weights cannot be read.
        ConfigError: the device has no operation for a layer.
    """

    def __init__(
        self, weights: Weights, operations: Operations, kv_scales: Sequence[LayerScales] | None = None
    ) -> None:
        config = weights.config
        scales = kv_scales or [UNSCALED] * config.n_layers
        self._config = config
        self._embedding = weights.embedding()
        self._position_embedding = weights.position_embedding()
        self._embedding_scale: float | None = None
        if config.embedding_scale is not None:  # rounded as Transformers does
            self._embedding_scale = torch.tensor(config.embedding_scale).to(weights.dtype).item()
        self._layers = [
            _Layer.build(config, index, weights.layer(index), operations, scales[index])
            for index in range(config.n_layers)
        ]
        self._final_norm = operations.norm(weights.final_norm())
        head = self._embedding if config.tied_head else weights.head()
        self._head = operations.head(LinearWeights(head))

        kinds = list(pairwise(layer.kind for layer in self._layers))
        self.distinct_layers = [index for index, kind in enumerate(kinds) if kinds.index(kind) == index]
        """Layers before the last whose attention and ``run_between_attentions`` launch all kernels that those of
        any layer do."""

    @property
    def sinks(self) -> list[Tensor | None]:
        """[layers]: attention's sinks, [heads] each; None for layers without."""
        return [layer.sinks for layer in self._layers]

    @property
    def n_layers(self) -> int:
        """Number of layers, and so of attention calls in a step."""
        return self._config.n_layers

    def empty_activations(self, n_tokens: int) -> Activations:
        """Allocates activations of ``n_tokens`` tokens."""
        heads = (n_tokens, self._config.n_heads, self._config.head_dim)
        empty = self._embedding.new_empty
        return Activations(empty(n_tokens, self._config.hidden_size), empty(heads), empty(heads))

    def __call__(
        self,
        inputs: TokenInputs,
        pool: LayerCaches,
        attention: LayerAttention,
        output_tokens: OutputTokens | None = None,
    ) -> Tensor:
        """Runs all layers. Returns normed states, [tokens, hidden], and stores K and V of the tokens in the pool.

        Args:
            inputs: ids, positions and slot mapping of the tokens.
            pool: the KV pool.
            attention: of the step.
            output_tokens: the tokens whose states are returned, [n, hidden]; None for all.
        """
        return self._run(range(self.n_layers - 1), inputs, pool, attention, output_tokens)

    def run_distinct(self, inputs: TokenInputs, pool: LayerCaches, attention: LayerAttention) -> Tensor:
        """Runs ``distinct_layers`` and the last layer, so that all kernels of a step are compiled and loaded.

        Takes what ``__call__`` takes. The states that it returns, and K and V that it stores, have no meaning.
        """
        return self._run(self.distinct_layers, inputs, pool, attention, None)

    def _run(
        self,
        layers: Iterable[int],
        inputs: TokenInputs,
        pool: LayerCaches,
        attention: LayerAttention,
        output_tokens: OutputTokens | None,
    ) -> Tensor:
        activations = self.empty_activations(len(inputs.ids))
        self.run_before_first_attention(activations, inputs, pool)
        for index in layers:
            attention.run(index, activations.q, *pool.layers[index], activations.attention_out)
            self.run_between_attentions(index, activations, inputs, pool)
        return self.run_from_last_attention(activations, pool, attention, output_tokens)

    def run_before_first_attention(self, activations: Activations, inputs: TokenInputs, pool: LayerCaches) -> None:
        """Runs everything before the first attention."""
        torch.index_select(self._embedding, 0, inputs.ids, out=activations.residual)
        if self._embedding_scale is not None:
            activations.residual.mul_(self._embedding_scale)
        if self._position_embedding is not None:
            activations.residual.add_(self._position_embedding.index_select(0, inputs.positions))
        self._store(0, self._layers[0].attention_norm(activations.residual), activations, inputs, pool)

    def run_between_attentions(
        self, index: int, activations: Activations, inputs: TokenInputs, pool: LayerCaches
    ) -> None:
        """Runs everything between the attention of layer ``index`` and the next layer's."""
        normed = self._after_attention(index, activations, self._layers[index + 1].attention_norm)
        self._store(index + 1, normed, activations, inputs, pool)

    def run_from_last_attention(
        self,
        activations: Activations,
        pool: LayerCaches,
        attention: LayerAttention,
        output_tokens: OutputTokens | None = None,
    ) -> Tensor:
        """Runs the last layer's attention and everything after it. Returns what ``__call__`` does."""
        index = self.n_layers - 1
        if output_tokens is not None:
            # Nothing reads this layer's states of other tokens.
            q, residual = (x.index_select(0, output_tokens.indices) for x in (activations.q, activations.residual))
            activations = Activations(residual, q, torch.zeros_like(q))
            attention = output_tokens.attention()
        attention.run(index, activations.q, *pool.layers[index], activations.attention_out)
        return as_tensor(self._after_attention(index, activations, self._final_norm))

    def _store(
        self, index: int, normed: Rows, activations: Activations, inputs: TokenInputs, pool: LayerCaches
    ) -> None:
        """Stores K and V of layer ``index`` in the pool, and its rotated queries in ``activations.q``."""
        layer = self._layers[index]
        layer.rotate_and_store(layer.query_key_value(normed), inputs, *pool.layers[index], activations.q)

    def _after_attention(self, index: int, activations: Activations, next_norm: Norm) -> Rows:
        """Runs the rest of a layer after its attention. Returns the residual stream after ``next_norm``."""
        layer, residual = self._layers[index], activations.residual
        attended = activations.attention_out.flatten(1)
        if layer.norms_after is None:
            normed = layer.output.add_and_norm(attended, residual, layer.mlp_norm)
            return layer.mlp.add_and_norm(normed, residual, next_norm)
        after_attention, after_mlp = layer.norms_after
        normed = layer.mlp_norm.add(as_tensor(after_attention(layer.output(attended))), residual)
        return next_norm.add(as_tensor(after_mlp(layer.mlp(normed))), residual)

    def empty_logits(self, n_rows: int) -> Tensor:
        """Allocates the output of ``logits``: [n_rows, vocab]."""
        return self._embedding.new_empty(n_rows, self._config.vocab_size)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Computes [rows, hidden] -> [rows, vocab], in the weights' dtype, in ``out`` if it is given.

        Where ranks divide the vocabulary, all must do this, and rank 0 alone gets logits.
        """
        return self._head(hidden, out)


@dataclass(frozen=True)
class _Layer:
    attention_norm: Norm
    query_key_value: Linear
    rotate_and_store: RotateAndStore
    sinks: Tensor | None
    output: Linear
    mlp_norm: Norm
    mlp: Mlp
    norms_after: tuple[Norm, Norm] | None
    """Norms of the outputs of attention and MLP, before these are added to the residual stream."""
    kind: Hashable
    """Equal for layers that launch the same kernels."""

    @classmethod
    def build(
        cls,
        config: DecoderConfig,
        index: int,
        weights: LayerWeights,
        operations: Operations,
        scales: LayerScales,
    ) -> _Layer:
        after = weights.after_attention_norm, weights.after_mlp_norm
        query_key_value, mlp = operations.linear(weights.query_key_value), _mlp(config, index, weights, operations)
        return cls(
            attention_norm=operations.norm(weights.attention_norm, query_key_value),
            query_key_value=query_key_value,
            rotate_and_store=operations.rotate_and_store(
                config.rope_of(index), weights.query_norm, weights.key_norm, scales
            ),
            sinks=weights.sinks,
            output=operations.output(weights.output),
            mlp_norm=operations.norm(weights.mlp_norm, mlp),
            mlp=mlp,
            norms_after=None
            if after[0] is None or after[1] is None
            else (operations.norm(after[0]), operations.norm(after[1])),
            kind=(config.windows[index], scales.k == 1, scales.v == 1, _kind(weights)),
        )


def _kind(weights: object) -> Hashable:
    """Returns types, shapes, dtypes and alignments of all that ``weights`` consists of: kernels depend on these."""
    if isinstance(weights, Tensor):
        return weights.shape, weights.dtype, weights.data_ptr() % 16
    if is_dataclass(weights):
        return type(weights), *map(_kind, vars(weights).values())
    assert weights is None or isinstance(weights, int), "weights have tensors, sizes and optional parts"
    return weights


def _mlp(config: DecoderConfig, index: int, weights: LayerWeights, operations: Operations) -> Mlp:
    if not isinstance(weights.mlp, ExpertsWeights):
        return operations.mlp(weights.mlp)
    experts = config.experts_of(index)
    assert experts is not None
    return operations.experts(weights.mlp, experts)
