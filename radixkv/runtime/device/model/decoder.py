"""The transformer decoder of all supported checkpoints, over the operations of a device."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from radixkv.runtime.device.attention.base import LayerAttention
from radixkv.runtime.device.kv_dtype import UNSCALED, LayerScales
from radixkv.runtime.device.model.layer_inputs import LayerInputs, rounded
from radixkv.runtime.device.model_config.config import DecoderConfig
from radixkv.runtime.device.ops.base import (
    DeltaNet,
    ExpertsBeside,
    LayerInput,
    LayerStates,
    Linear,
    Mlp,
    Norm,
    Operations,
    RotateAndStore,
    Rows,
    TokenInputs,
    as_tensor,
)
from radixkv.runtime.device.weights.layer_weights import (
    DeltaNetWeights,
    ExpertsWeights,
    LayerWeights,
    LinearWeights,
)
from radixkv.runtime.device.weights.weights import Weights


class LayerCaches(Protocol):
    """The KV pool, as the decoder uses it."""

    @property
    def layers(self) -> Sequence[tuple[Tensor, Tensor]]:
        """K and V that each layer with attention reads."""
        ...

    @property
    def states(self) -> Sequence[LayerStates]:
        """States of each gated delta net."""
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
    gate: Tensor | None
    """[tokens, heads * head_dim]: what the output is multiplied by, before a sigmoid; None: there is no gate."""
    layer_inputs: Tensor | None = None
    """[tokens, layers, size]: what each layer has beside the residual stream; None: there is nothing."""

    def first(self, n_tokens: int) -> Activations:
        """Returns views of the first ``n_tokens`` tokens."""
        gate, inputs = (None if x is None else x[:n_tokens] for x in (self.gate, self.layer_inputs))
        return Activations(self.residual[:n_tokens], self.q[:n_tokens], self.attention_out[:n_tokens], gate, inputs)

    def of_tokens(self, indices: Tensor) -> Activations:
        """Returns copies of the residual stream, queries, gates and layers' inputs of some tokens, [n] int32."""
        residual, q = (x.index_select(0, indices) for x in (self.residual, self.q))
        gate, inputs = (None if x is None else x.index_select(0, indices) for x in (self.gate, self.layer_inputs))
        return Activations(residual, q, torch.zeros_like(q), gate, inputs)

    def with_heads(self, head_dim: int) -> Activations:
        """Returns views whose queries and outputs have heads of a size, at most that of these."""
        n_tokens, n_heads, size = self.q.shape
        if head_dim == size:
            return self
        shape = (n_tokens, n_heads, head_dim)
        q, out = (x.flatten()[: math.prod(shape)].view(shape) for x in (self.q, self.attention_out))
        return replace(self, q=q, attention_out=out)


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
    fuse them. A step is ``run_before_first_attention``, then each attention but the last, each followed by
    ``run_between_attentions``, then ``run_from_last_attention``. The first two contain no attention, so they can be
    CUDA graphs for any step with the same number of tokens. Attentions are counted from 0: where layers are gated
    delta nets, there are fewer than layers, and the delta nets belong to what runs between attentions.

    Args:
        weights: open, and of the dtype to compute in.
        operations: of the device that has the weights.
        kv_scales: [attentions], of a pool with a quantized dtype; None: all are 1.

    Raises:
        CheckpointError: the weights cannot be read.
        ConfigError: the device has no operation for a layer.
    """

    def __init__(
        self, weights: Weights, operations: Operations, kv_scales: Sequence[LayerScales] | None = None
    ) -> None:
        config = weights.config
        self._attention_layers = config.attention_layers
        scales = {} if kv_scales is None else dict(zip(self._attention_layers, kv_scales, strict=True))
        self._config = config
        self._embedding = weights.embedding()
        self._position_embedding = weights.position_embedding()
        self._embedding_scale: float | None = None
        if config.embedding_scale is not None:
            self._embedding_scale = rounded(config.embedding_scale, weights.dtype)
        self._layer_inputs: LayerInputs | None = None
        if (parts := weights.layer_inputs()) is not None:
            self._layer_inputs = LayerInputs(parts, operations, n_layers=config.n_layers)
        self._layers = [
            _Layer.build(config, index, weights.layer(index), operations, scales.get(index, UNSCALED))
            for index in range(config.n_layers)
        ]
        self._final_norm = operations.norm(weights.final_norm())
        head = self._embedding if config.tied_head else weights.head()
        self._head = operations.head(LinearWeights(head))
        self._gated = operations.gated
        self._capped = operations.capped

        kinds = [
            tuple(layer.kind for layer in self._layers[first : last + 1])
            for first, last in pairwise(self._attention_layers)
        ]
        self.distinct_attentions = [index for index, kind in enumerate(kinds) if kinds.index(kind) == index]
        """Attentions before the last which, with ``run_between_attentions``, launch all kernels that any do."""

    @property
    def sinks(self) -> list[Tensor | None]:
        """[attentions]: sinks, [heads] each; None for those without."""
        return [layer.mixer.sinks for layer in self._layers if isinstance(layer.mixer, _Attention)]

    @cached_property
    def head_sizes(self) -> list[int]:
        """[attentions]: size of each one's heads."""
        return [self._config.heads[layer].head_dim for layer in self._attention_layers]

    @property
    def n_attentions(self) -> int:
        """Number of attention calls in a step."""
        return len(self._attention_layers)

    def empty_activations(self, n_tokens: int) -> Activations:
        """Allocates activations of ``n_tokens`` tokens."""
        config, empty = self._config, self._embedding.new_empty
        heads = (n_tokens, config.n_heads, max(config.heads[layer].head_dim for layer in self._attention_layers))
        gate = empty(n_tokens, heads[1] * heads[2]) if config.has_output_gate else None
        inputs = None
        if config.layer_inputs is not None:
            inputs = empty(n_tokens, config.n_layers, config.layer_inputs.size)
        return Activations(empty(n_tokens, config.hidden_size), empty(heads), empty(heads), gate, inputs)

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
        return self._run(range(self.n_attentions - 1), inputs, pool, attention, output_tokens)

    def run_distinct(self, inputs: TokenInputs, pool: LayerCaches, attention: LayerAttention) -> Tensor:
        """Runs ``distinct_attentions`` and the last one, so that all kernels of a step are compiled and loaded.

        Takes what ``__call__`` takes. The states that it returns, and K and V that it stores, have no meaning.
        """
        return self._run(self.distinct_attentions, inputs, pool, attention, None)

    def _run(
        self,
        attentions: Iterable[int],
        inputs: TokenInputs,
        pool: LayerCaches,
        attention: LayerAttention,
        output_tokens: OutputTokens | None,
    ) -> Tensor:
        activations = self.empty_activations(len(inputs.ids))
        self.run_before_first_attention(activations, inputs, pool)
        for index in attentions:
            heads = activations.with_heads(self.head_sizes[index])
            attention.run(index, heads.q, *pool.layers[index], heads.attention_out)
            self.run_between_attentions(index, activations, inputs, pool)
        return self.run_from_last_attention(activations, pool, attention, output_tokens, inputs)

    def run_before_first_attention(self, activations: Activations, inputs: TokenInputs, pool: LayerCaches) -> None:
        """Runs everything before the first attention."""
        torch.index_select(self._embedding, 0, inputs.ids, out=activations.residual)
        if self._embedding_scale is not None:
            activations.residual.mul_(self._embedding_scale)
        if self._position_embedding is not None:
            activations.residual.add_(self._position_embedding.index_select(0, inputs.positions))
        if self._layer_inputs is not None:
            assert activations.layer_inputs is not None, "empty_activations allocates them"
            self._layer_inputs(inputs.ids, activations.residual, activations.layer_inputs)
        self._advance(0, self._layers[0].norm(activations.residual), activations, inputs, pool)

    def run_between_attentions(
        self, index: int, activations: Activations, inputs: TokenInputs, pool: LayerCaches
    ) -> None:
        """Runs everything between attention ``index`` and the next one."""
        layer = self._attention_layers[index]
        self._advance(layer + 1, self._after_attention(layer, activations), activations, inputs, pool)

    def run_from_last_attention(
        self,
        activations: Activations,
        pool: LayerCaches,
        attention: LayerAttention,
        output_tokens: OutputTokens | None = None,
        inputs: TokenInputs | None = None,
    ) -> Tensor:
        """Runs the last attention and everything after it. Returns what ``__call__`` does.

        Takes what ``__call__`` takes; ``inputs`` only where layers follow the one with the last attention.
        """
        index = self.n_attentions - 1
        activations = activations.with_heads(self.head_sizes[index])
        if output_tokens is not None:
            # Nothing reads this layer's states of other tokens.
            activations = activations.of_tokens(output_tokens.indices)
            attention = output_tokens.attention()
        attention.run(index, activations.q, *pool.layers[index], activations.attention_out)
        last = self._attention_layers[index]
        normed = self._after_attention(last, activations)
        if last + 1 < len(self._layers):
            assert inputs is not None, "layers follow the one with the last attention"
            assert output_tokens is None, "layers with states read all tokens"
            normed = self._advance(last + 1, normed, activations, inputs, pool)
        return as_tensor(normed)

    def _advance(
        self, index: int, normed: Rows, activations: Activations, inputs: TokenInputs, pool: LayerCaches
    ) -> Rows:
        """Runs layers without attention from layer ``index`` on, and stores what the next attention reads.

        That is K and V in the pool, and rotated queries and gates in ``activations``. Returns the residual stream
        after the norm of the layer with attention, or after the final one if there is none.

        Args:
            index: of the layer.
            normed: [tokens, hidden]: the residual stream after the layer's norm.
            activations: changed.
            inputs: the tokens.
            pool: KV pool and states.
        """
        for layer in self._layers[index:]:
            match layer.mixer:
                case _Attention() as attention:
                    attention.store(normed, activations, inputs, pool)
                    return normed
                case _DeltaNetLayer() as mixer:
                    mixed = mixer.delta_net(normed, inputs.sequences, pool.states[mixer.index])
                    normed = self._after_mixer(index, mixed, activations)
                case None:
                    assert layer.mlp is not None, "a layer has at least one half"
                    normed = layer.mlp.add_and_norm(normed, activations.residual, self._norm_after(index))
            index += 1
        return normed

    def _after_attention(self, index: int, activations: Activations) -> Rows:
        """Runs the rest of layer ``index`` after its attention. Returns the residual stream after the next norm."""
        attended = activations.with_heads(self._config.heads[index].head_dim).attention_out.flatten(1)
        if activations.gate is not None:
            attended = self._gated(attended, activations.gate)
        return self._after_mixer(index, attended, activations)

    def _after_mixer(self, index: int, mixed: Tensor, activations: Activations) -> Rows:
        """Runs the rest of a layer after what mixes tokens. Returns the residual stream after the next norm.

        Args:
            index: of the layer.
            mixed: [tokens, size], output of attention or of the delta net.
            activations: of which the residual stream is changed.
        """
        layer, residual = self._layers[index], activations.residual
        next_norm = self._norm_after(index)
        assert layer.output is not None, "a layer with a mixer has the projection of its output"
        if layer.mlp is None:
            return layer.output.add_and_norm(mixed, residual, next_norm)
        assert layer.mlp_norm is not None, "a layer with both halves has a norm of each"
        if layer.norms_after is None:
            normed = layer.output.add_and_norm(mixed, residual, layer.mlp_norm)
            return layer.mlp.add_and_norm(normed, residual, next_norm)
        after_mixer, after_mlp = layer.norms_after
        normed = layer.mlp_norm.add(as_tensor(after_mixer(layer.output(mixed))), residual)
        computed = layer.mlp(normed)
        if layer.experts_beside is not None:
            computed = layer.experts_beside(computed, residual)
        added = as_tensor(after_mlp(computed))
        if layer.layer_input is None and layer.scale is None:
            return next_norm.add(added, residual)
        residual.add_(added)
        if layer.layer_input is not None:
            assert activations.layer_inputs is not None, "all layers have inputs, or none"
            residual.add_(layer.layer_input(residual, activations.layer_inputs[:, index]))
        if layer.scale is not None:
            residual.mul_(layer.scale)
        return next_norm(residual)

    def _norm_after(self, index: int) -> Norm:
        """Returns the norm that follows a layer."""
        return self._final_norm if index + 1 == len(self._layers) else self._layers[index + 1].norm

    def empty_logits(self, n_rows: int) -> Tensor:
        """Allocates the output of ``logits``: [n_rows, vocab]."""
        return self._embedding.new_empty(n_rows, self._config.vocab_size)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Computes [rows, hidden] -> [rows, vocab], in the weights' dtype, in ``out`` if it is given.

        Where ranks divide the vocabulary, all must do this, and rank 0 alone gets logits.
        """
        logits = self._head(hidden, out)
        return logits if self._config.logit_cap is None else self._capped(logits, self._config.logit_cap)


@dataclass(frozen=True)
class _Attention:
    """What comes before a layer's attention."""

    index: int
    """Of the attention."""
    head_dim: int
    query_key_value: Linear
    rotate_and_store: RotateAndStore
    output_gate: Linear | None
    sinks: Tensor | None
    has_window: bool

    def store(self, normed: Rows, activations: Activations, inputs: TokenInputs, pool: LayerCaches) -> None:
        """Stores K and V in the pool, and rotated queries and gates in ``activations``."""
        if self.has_window and inputs.in_windows is not None:
            inputs = inputs.in_windows
        q = activations.with_heads(self.head_dim).q
        self.rotate_and_store(self.query_key_value(normed), inputs, *pool.layers[self.index], q)
        if self.output_gate is not None:
            self.output_gate(normed, activations.gate)


@dataclass(frozen=True)
class _DeltaNetLayer:
    """A gated delta net among a layer's parts."""

    index: int
    """Of the delta net, counted from 0."""
    delta_net: DeltaNet


@dataclass(frozen=True)
class _Layer:
    norm: Norm
    """Of the layer's input."""
    mixer: _Attention | _DeltaNetLayer | None
    """What mixes tokens; None: the layer is an MLP."""
    output: Linear | None
    mlp_norm: Norm | None
    mlp: Mlp | None
    norms_after: tuple[Norm, Norm] | None
    """Norms of the outputs of mixer and MLP, before these are added to the residual stream."""
    experts_beside: ExpertsBeside | None
    layer_input: LayerInput | None
    """What the layer's own input adds after the MLP."""
    scale: Tensor | None
    """[1]: what the residual stream is multiplied by at the end."""
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
        heads, beside = config.heads[index], weights.experts_beside
        mlp, parts = _mlp(config, index, weights, operations), weights.mixer
        mixer: _Attention | _DeltaNetLayer | None = None
        reader: Linear | None = None
        if isinstance(parts, DeltaNetWeights):
            assert config.delta_nets is not None, "other models have none"
            mixer = _DeltaNetLayer(
                sorted(config.delta_nets.layers).index(index), operations.delta_net(parts, config.delta_nets)
            )
        elif parts is not None:
            linear = operations.linear(parts.query_key_value)
            reader = linear if parts.output_gate is None else None
            mixer = _Attention(
                index=config.attention_layers.index(index),
                head_dim=heads.head_dim,
                query_key_value=linear,
                rotate_and_store=operations.rotate_and_store(
                    heads, config.rope_of(index), parts.query_norm, parts.key_norm, scales
                ),
                output_gate=None if parts.output_gate is None else operations.linear(parts.output_gate),
                sinks=parts.sinks,
                has_window=config.windows[index] is not None,
            )
        return cls(
            norm=operations.norm(weights.attention_norm, reader),
            mixer=mixer,
            output=None if weights.output is None else operations.output(weights.output),
            mlp_norm=None if weights.mlp_norm is None else operations.norm(weights.mlp_norm, mlp),
            mlp=mlp,
            norms_after=None
            if after[0] is None or after[1] is None
            else (operations.norm(after[0]), operations.norm(after[1])),
            experts_beside=None
            if beside is None or config.experts is None
            else operations.experts_beside(beside, config.experts),
            layer_input=None if weights.layer_input is None else operations.layer_input(weights.layer_input),
            scale=weights.scale,
            kind=(config.windows[index], heads, scales.k == 1, scales.v == 1, _kind(weights)),
        )


def _kind(weights: object) -> Hashable:
    """Returns types, shapes, dtypes and alignments of all that ``weights`` consists of: kernels depend on these."""
    if isinstance(weights, Tensor):
        return weights.shape, weights.dtype, weights.data_ptr() % 16
    if is_dataclass(weights):
        return type(weights), *map(_kind, vars(weights).values())
    assert weights is None or isinstance(weights, int), "weights have tensors, sizes and optional parts"
    return weights


def _mlp(config: DecoderConfig, index: int, weights: LayerWeights, operations: Operations) -> Mlp | None:
    if weights.mlp is None:
        return None
    if not isinstance(weights.mlp, ExpertsWeights):
        return operations.mlp(weights.mlp)
    experts = config.experts_of(index)
    assert experts is not None
    return operations.experts(weights.mlp, experts)
