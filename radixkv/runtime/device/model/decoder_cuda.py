"""The dense transformer decoder on the GPU, over fused kernels; ``decoder_cpu`` is its CPU counterpart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from radixkv.errors import ConfigError
from radixkv.runtime.device.attention.cuda.base import LayerAttention
from radixkv.runtime.device.kv_pool_cuda import CudaPool
from radixkv.runtime.device.model_config.rope import Rope
from radixkv.runtime.device.ops.cuda.activation import silu_and_multiply
from radixkv.runtime.device.ops.cuda.linear import gated_linear, linear
from radixkv.runtime.device.ops.cuda.linear_add_norm import add_linear_and_norm
from radixkv.runtime.device.ops.cuda.norm import add_rms_norm, rms_norm
from radixkv.runtime.device.ops.cuda.rotary import rotate_and_store
from radixkv.runtime.device.persistent_batch_cuda import TokenInputs
from radixkv.runtime.device.weights.weights import LayerWeights, LinearWeights, MlpWeights, Weights


@dataclass(frozen=True)
class Activations:
    """Activations of a step's tokens between kernels."""

    residual: Tensor
    """[tokens, hidden]: the residual stream."""
    normed: Tensor
    """[tokens, hidden]: the normed residual stream."""
    q: Tensor
    """[tokens, heads, head_dim]: rotated queries of the next attention."""
    attention_out: Tensor
    """[tokens, heads, head_dim]: output of attention."""

    def first(self, n_tokens: int) -> Activations:
        """Returns views of the first ``n_tokens`` tokens."""
        return Activations(
            self.residual[:n_tokens], self.normed[:n_tokens], self.q[:n_tokens], self.attention_out[:n_tokens]
        )


@dataclass(frozen=True)
class OutputTokens:
    """The tokens whose last states are needed: only these go through the last layer's attention and MLP."""

    indices: Tensor
    """[n] int32: indices of the tokens in the step."""
    attention: Callable[[], LayerAttention]
    """Returns attention of these tokens; called after everything before it is enqueued."""


class CudaDecoder:
    """Token ids to hidden states to logits.

    Each addition to the residual stream is fused with the norm that follows it. A step is
    ``run_before_first_attention``, then the attention of each layer but the last, each followed by
    ``run_between_attentions``, then ``run_from_last_attention``. The first two contain no attention, so they can be
    CUDA graphs for any step with the same number of tokens.

    Args:
        weights: open, and of the dtype to compute in.
        max_positions: most positions of a sequence.
        device: where the weights are.

    Raises:
        CheckpointError: the weights cannot be read.
        ConfigError: a layer has experts.
    """

    def __init__(self, weights: Weights, max_positions: int, device: torch.device) -> None:
        config = weights.config
        self._config = config
        self._cosine_sine = _angles(config.rope, config.head_dim, max_positions).to(device)
        self._embedding = weights.embedding()
        self._layers = [
            _layer(config.architecture, index, weights.layer(index)) for index in range(config.n_layers)
        ]
        self._final_norm = weights.final_norm()
        self._head = self._embedding if config.tied_head else weights.head()

    @property
    def n_layers(self) -> int:
        """Number of layers, and so of attention calls in a step."""
        return self._config.n_layers

    def empty_activations(self, n_tokens: int) -> Activations:
        """Allocates activations of ``n_tokens`` tokens."""
        hidden = (n_tokens, self._config.hidden_size)
        heads = (n_tokens, self._config.n_heads, self._config.head_dim)
        empty = self._embedding.new_empty
        return Activations(empty(hidden), empty(hidden), empty(heads), empty(heads))

    def __call__(
        self,
        inputs: TokenInputs,
        pool: CudaPool,
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
        activations = self.empty_activations(len(inputs.ids))
        self.run_before_first_attention(activations, inputs, pool)
        for index in range(self.n_layers - 1):
            attention.run(index, activations.q, *pool.layer(index), activations.attention_out)
            self.run_between_attentions(index, activations, inputs, pool)
        return self.run_from_last_attention(activations, pool, attention, output_tokens)

    def run_before_first_attention(self, activations: Activations, inputs: TokenInputs, pool: CudaPool) -> None:
        """Runs everything before the first attention."""
        torch.index_select(self._embedding, 0, inputs.ids, out=activations.residual)
        rms_norm(activations.residual, self._layers[0].attention_norm, self._config.norm_eps, activations.normed)
        self._store(0, activations, inputs, pool)

    def run_between_attentions(
        self, index: int, activations: Activations, inputs: TokenInputs, pool: CudaPool
    ) -> None:
        """Runs everything between the attention of layer ``index`` and the next layer's."""
        next_norm = self._layers[index + 1].attention_norm
        self._after_attention(
            self._layers[index], activations.attention_out, activations.residual, next_norm, activations.normed
        )
        self._store(index + 1, activations, inputs, pool)

    def run_from_last_attention(
        self,
        activations: Activations,
        pool: CudaPool,
        attention: LayerAttention,
        output_tokens: OutputTokens | None = None,
    ) -> Tensor:
        """Runs the last layer's attention and everything after it. Returns what ``__call__`` does; for all tokens,
        that is ``activations.normed``."""
        index = self.n_layers - 1
        if output_tokens is not None:
            # Nothing reads this layer's states of other tokens.
            q, residual = (x.index_select(0, output_tokens.indices) for x in (activations.q, activations.residual))
            activations = Activations(residual, torch.empty_like(residual), q, torch.empty_like(q))
            attention = output_tokens.attention()
        attention.run(index, activations.q, *pool.layer(index), activations.attention_out)
        self._after_attention(
            self._layers[index],
            activations.attention_out,
            activations.residual,
            self._final_norm,
            activations.normed,
        )
        return activations.normed

    def _store(self, index: int, activations: Activations, inputs: TokenInputs, pool: CudaPool) -> None:
        """Stores K and V of layer ``index`` in the pool, and its rotated queries in ``activations.q``."""
        layer = self._layers[index]
        rotate_and_store(
            _product(activations.normed, layer.query_key_value),
            inputs.positions,
            inputs.slot_mapping,
            self._cosine_sine,
            *pool.layer(index),
            activations.q,
            query_norm=layer.query_norm,
            key_norm=layer.key_norm,
            eps=self._config.norm_eps,
        )

    def _after_attention(
        self, layer: _Layer, attention_out: Tensor, residual: Tensor, next_norm: Tensor, normed: Tensor
    ) -> None:
        """Runs the rest of a layer after its attention; ``normed`` becomes the next layer's input."""
        self._add_and_norm(
            attention_out.view(len(attention_out), -1), layer.output, residual, layer.mlp_norm, normed
        )
        self._add_and_norm(_gated(normed, layer.gate_up), layer.down, residual, next_norm, normed)

    def _add_and_norm(
        self, x: Tensor, weights: LinearWeights, residual: Tensor, norm: Tensor, normed: Tensor
    ) -> None:
        """Adds ``x @ weight.T``, and the bias if there is one, to the residual stream, and norms the sum."""
        if weights.bias is None:
            add_linear_and_norm(x, weights.weight, residual, norm, self._config.norm_eps, normed)
        else:
            add_rms_norm(_product(x, weights), residual, norm, self._config.norm_eps, normed)

    def empty_logits(self, n_rows: int) -> Tensor:
        """Allocates the output of ``logits``: [n_rows, vocab]."""
        return self._head.new_empty(n_rows, len(self._head))

    def logits(self, hidden: Tensor, out: Tensor) -> None:
        """Computes [rows, hidden] -> ``out`` [rows, vocab], in the weights' dtype."""
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


def _layer(architecture: str, index: int, weights: LayerWeights) -> _Layer:
    if not isinstance(weights.mlp, MlpWeights):
        raise ConfigError(
            f"layer {index} of this {architecture} has experts, which this release does not run on CUDA; "
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
    """Returns [max_positions, head_dim] float32: cosines, then sines, each of half the head's dimensions."""
    angles = torch.arange(max_positions).float()[:, None] * rope.frequencies(head_dim)
    return torch.cat([angles.cos() * rope.amplitude, angles.sin() * rope.amplitude], -1)
