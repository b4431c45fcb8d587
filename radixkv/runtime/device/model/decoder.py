"""The transformer decoder of all supported checkpoints, over the operations of a device."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, is_dataclass
from itertools import pairwise

import torch
from torch import Tensor

from radixkv.runtime.device.attention.base import LayerAttention
from radixkv.runtime.device.kv_dtype import UNSCALED, LayerScales
from radixkv.runtime.device.model.activations import Activations
from radixkv.runtime.device.model.layer_inputs import LayerInputs, rounded
from radixkv.runtime.device.model.mixers import AttentionMixer, LayerCaches, Mixer, StateMixer
from radixkv.runtime.device.model_config.config import DecoderConfig
from radixkv.runtime.device.ops.base import (
    ExpertsBeside,
    LayerInput,
    Linear,
    Mlp,
    Norm,
    Operations,
    RowReader,
    Rows,
    Sequences,
    TokenInputs,
    as_tensor,
    padded_rows,
)
from radixkv.runtime.device.weights.layer_weights import (
    ExpertsWeights,
    LayerWeights,
    LinearWeights,
    RecurrentWeights,
)
from radixkv.runtime.device.weights.weights import Weights


@dataclass(frozen=True)
class OutputTokens:
    """The tokens whose last states are needed: only these go through the last layer's attention and MLP."""

    indices: Tensor
    """[n] int32: indices of the tokens in the step. The last ones may be padding."""
    attention: Callable[[], LayerAttention]
    """Returns attention of these tokens, without padding; called after everything before it is enqueued."""
    select: Callable[[], None] = lambda: None
    """Called when all layers after this have these tokens alone."""


class Decoder:
    """Token ids to hidden states to logits.

    Each addition to the residual stream is followed by the norm of the next half of a layer, so that a device may
    fuse them. What mixes tokens, a mixer, is attention or the scan of a layer with states. A step is
    ``run_before_first_mixer``, then ``mix`` for each mixer but the last, each followed by ``run_between_mixers``,
    then ``run_from_last_mixer``. Before and between mixers nothing depends on the rows of a step, so that can be
    CUDA graphs for any step with the same number of tokens.

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
        self._capped = operations.capped

        mixers = [(index, layer.mixer) for index, layer in enumerate(self._layers) if layer.mixer is not None]
        self._mixers = [mixer for _, mixer in mixers]
        self._mixer_layers = [index for index, _ in mixers]
        kinds = [
            tuple(layer.kind for layer in self._layers[first : last + 1])
            for first, last in pairwise(self._mixer_layers)
        ]
        self.distinct_mixers = [index for index, kind in enumerate(kinds) if kinds.index(kind) == index]
        """Mixers before the last which, with ``run_between_mixers``, launch all kernels that any do."""

    @property
    def sinks(self) -> list[Tensor | None]:
        """[attentions]: sinks, [heads] each; None for those without."""
        return [mixer.sinks for mixer in self._mixers if isinstance(mixer, AttentionMixer)]

    @property
    def n_mixers(self) -> int:
        """Number of mixers in a step."""
        return len(self._mixers)

    def empty_activations(self, n_tokens: int) -> Activations:
        """Allocates activations of ``n_tokens`` tokens."""
        config, empty = self._config, self._embedding.new_empty
        heads = (n_tokens, config.n_heads, max(config.heads[layer].head_dim for layer in self._attention_layers))
        gate = empty(n_tokens, heads[1] * heads[2]) if config.has_output_gate else None
        inputs = None
        if config.layer_inputs is not None:
            inputs = empty(n_tokens, config.n_layers, config.layer_inputs.size)
        projected = read = None
        if (recurrent := config.recurrent) is not None:
            projected = empty(padded_rows(n_tokens), recurrent.n_inputs)
            read = empty(n_tokens, recurrent.n_values)
        residual = empty(n_tokens, config.hidden_size)
        return Activations(residual, empty(heads), empty(heads), gate, inputs, projected, read)

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
        return self._run(range(self.n_mixers - 1), inputs, pool, attention, output_tokens)

    def run_distinct(self, inputs: TokenInputs, pool: LayerCaches, attention: LayerAttention) -> Tensor:
        """Runs ``distinct_mixers`` and the last one, so that all kernels of a step are compiled and loaded.

        Takes what ``__call__`` takes. The states that it returns, and K and V that it stores, have no meaning.
        """
        return self._run(self.distinct_mixers, inputs, pool, attention, None)

    def _run(
        self,
        mixers: Iterable[int],
        inputs: TokenInputs,
        pool: LayerCaches,
        attention: LayerAttention,
        output_tokens: OutputTokens | None,
    ) -> Tensor:
        activations = self.empty_activations(len(inputs.ids))
        self.run_before_first_mixer(activations, inputs, pool)
        for index in mixers:
            self.mix(index, activations, pool, attention, inputs.sequences)
            self.run_between_mixers(index, activations, inputs, pool)
        return self.run_from_last_mixer(activations, pool, attention, inputs.sequences, output_tokens)

    def run_before_first_mixer(self, activations: Activations, inputs: TokenInputs, pool: LayerCaches) -> None:
        """Runs everything before the first mixer."""
        torch.index_select(self._embedding, 0, inputs.ids, out=activations.residual)
        if self._embedding_scale is not None:
            activations.residual.mul_(self._embedding_scale)
        if self._position_embedding is not None:
            activations.residual.add_(self._position_embedding.index_select(0, inputs.positions))
        if self._layer_inputs is not None:
            assert activations.layer_inputs is not None, "empty_activations allocates them"
            self._layer_inputs(inputs.ids, activations.residual, activations.layer_inputs)
        normed = self._run_mlps(0, self._layers[0].norm(activations.residual), activations)
        self._mixers[0].prepare(normed, activations, inputs, pool)

    def mix(
        self,
        index: int,
        activations: Activations,
        pool: LayerCaches,
        attention: LayerAttention,
        sequences: Sequences,
    ) -> None:
        """Runs mixer ``index``, which reads and writes ``activations``.

        Args:
            index: of the mixer.
            activations: of the step's tokens.
            pool: KV pool and states.
            attention: of the step.
            sequences: the rows of the step, for layers with states.
        """
        self._mixers[index].run(activations, pool, attention, sequences)

    def run_between_mixers(
        self, index: int, activations: Activations, inputs: TokenInputs, pool: LayerCaches
    ) -> None:
        """Runs everything between mixer ``index`` and the next one."""
        normed = self._run_after_mixer(index, activations)
        self._mixers[index + 1].prepare(normed, activations, inputs, pool)

    def run_from_last_mixer(
        self,
        activations: Activations,
        pool: LayerCaches,
        attention: LayerAttention,
        sequences: Sequences,
        output_tokens: OutputTokens | None = None,
    ) -> Tensor:
        """Runs the last mixer and everything after it. Takes what ``mix`` does, and returns what ``__call__`` does.

        Nothing reads what comes after the last mixer of tokens that are no output. Attention is left out for them,
        too, while states go through all tokens.
        """
        index, last = self.n_mixers - 1, self._mixers[-1]
        is_attention = isinstance(last, AttentionMixer)
        if output_tokens is not None and isinstance(last, AttentionMixer):
            activations = activations.with_heads(last.head_dim).of_tokens(output_tokens.indices)
            attention = output_tokens.attention()
            output_tokens.select()
        self.mix(index, activations, pool, attention, sequences)
        if output_tokens is not None and not is_attention:
            activations = activations.of_tokens(output_tokens.indices)
            output_tokens.select()
        return as_tensor(self._run_after_mixer(index, activations))

    def _run_after_mixer(self, index: int, activations: Activations) -> Rows:
        """Runs what follows mixer ``index`` up to the next one, or to the end. Returns what ``_run_mlps`` does."""
        layer = self._mixer_layers[index]
        normed = self._finish_layer(layer, self._mixers[index].output(activations), activations)
        return self._run_mlps(layer + 1, normed, activations)

    def _run_mlps(self, index: int, normed: Rows, activations: Activations) -> Rows:
        """Runs the layers that are MLPs alone, from layer ``index`` up to the next one with a mixer.

        Takes and returns the residual stream after the norm of the next layer, or after the final one,
        [tokens, hidden].
        """
        for layer in self._layers[index:]:
            if layer.mixer is not None:
                break
            assert layer.mlp is not None, "a layer has at least one half"
            normed = layer.mlp.add_and_norm(normed, activations.residual, self._norm_after(index))
            index += 1
        return normed

    def _finish_layer(self, index: int, mixed: Tensor, activations: Activations) -> Rows:
        """Runs the rest of a layer after its mixer. Returns the residual stream after the next norm.

        Args:
            index: of the layer.
            mixed: [tokens, size], output of the mixer.
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
class _Layer:
    norm: Norm
    """Of the layer's input."""
    mixer: Mixer | None
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
        parts = weights.mixer
        mixer: Mixer | None = None
        reader: RowReader | None = None
        if isinstance(parts, RecurrentWeights):
            assert config.recurrent is not None, "other models have none"
            reader = layer = operations.recurrent_layer(parts, config.recurrent)
            mixer = StateMixer(sorted(config.recurrent.layers).index(index), layer)
        elif parts is not None:
            linear = operations.linear(parts.query_key_value)
            reader = linear if parts.output_gate is None else None
            mixer = AttentionMixer(
                index=config.attention_layers.index(index),
                head_dim=heads.head_dim,
                query_key_value=linear,
                rotate_and_store=operations.rotate_and_store(
                    heads, config.rope_of(index), parts.query_norm, parts.key_norm, scales
                ),
                output_gate=None if parts.output_gate is None else operations.linear(parts.output_gate),
                sinks=parts.sinks,
                has_window=config.windows[index] is not None,
                gated=operations.gated,
            )
        # In the order in which they compute; see ``Operations``.
        output = None if weights.output is None else operations.output(weights.output)
        mlp = _mlp(config, index, weights, operations)
        experts_beside = None
        if beside is not None and config.experts is not None:
            experts_beside = operations.experts_beside(
                beside, operations.routed_experts(beside.experts, config.experts)
            )
        return cls(
            norm=operations.norm(weights.attention_norm, reader),
            mixer=mixer,
            output=output,
            mlp_norm=None if weights.mlp_norm is None else operations.norm(weights.mlp_norm, mlp),
            mlp=mlp,
            norms_after=None
            if after[0] is None or after[1] is None
            else (operations.norm(after[0]), operations.norm(after[1])),
            experts_beside=experts_beside,
            layer_input=None if weights.layer_input is None else operations.layer_input(weights.layer_input),
            scale=weights.scale,
            kind=(config.windows[index], heads, scales.k == 1, scales.v == 1, _kind(weights)),
        )


def _kind(weights: object) -> Hashable:
    """Returns types, shapes, dtypes and alignments of all that ``weights`` consists of: kernels depend on these."""
    if isinstance(weights, Tensor):
        return weights.shape, weights.dtype, weights.data_ptr() % 16
    if isinstance(weights, LinearWeights):  # kernels do not depend on names
        return LinearWeights, _kind(weights.weight), _kind(weights.bias)
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
