"""The weights of a decoder's layers, as its operations take them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from radixkv.runtime.device.weights.fp8_matrix import Fp8Matrix
from radixkv.runtime.device.weights.int4_matrix import Int4Matrix

Matrix = Tensor | Fp8Matrix | Int4Matrix


@dataclass(frozen=True)
class Part:
    """One of the checkpoint's matrices in a stack of them, or some of its rows."""

    name: str
    """Of the matrix, without the suffix ``.weight``."""
    n_out: int
    """Rows of the stack."""
    rows: Tensor | None = None
    """[n_out] int64: which rows of the matrix these are; None: all, in their order."""


@dataclass(frozen=True)
class LinearWeights:
    """A matrix [out, in] and an optional bias [out]. Matrices that share an input are stacked along ``out``."""

    weight: Matrix
    bias: Tensor | None = None
    parts: tuple[Part, ...] = ()
    """The checkpoint's matrices of the stack, in their order; none where no adapter can change them."""


@dataclass(frozen=True)
class NormWeights:
    """A norm's weight [size], and the bias [size] of a layer norm."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class MlpWeights:
    """Weights of one MLP."""

    gate_up: LinearWeights
    """Gate and up projection, stacked in this order; the up projection alone if there is no gate."""
    down: LinearWeights


@dataclass(frozen=True)
class SharedExpertWeights:
    """Weights of the expert that computes every token, beside those that a router selects."""

    mlp: MlpWeights
    weight: LinearWeights | None
    """[1, hidden]: what its output is multiplied by, before a sigmoid; None: by nothing."""


@dataclass(frozen=True)
class ExpertsWeights:
    """The router, and the MLPs of all experts stacked along a new first dimension."""

    router: LinearWeights
    gate_up: LinearWeights
    """[experts, 2 * inner, hidden], gate first, with an optional bias [experts, 2 * inner]. Without gates it is
    [experts, inner, hidden]."""
    down: LinearWeights
    """[experts, hidden, inner], with an optional bias [experts, hidden]."""
    shared: SharedExpertWeights | None = None
    """The expert that computes every token."""
    correction: Tensor | None = None
    """[experts] float32: what is added to scores by sigmoid to choose experts. The router is float32 then."""
    scales: Tensor | None = None
    """[experts]: what the weights of the experts are multiplied by, after they are normalised."""

    def experts(self) -> Iterator[MlpWeights]:
        """Yields views of the weights of each expert."""
        for index in range(len(self.down.weight)):
            yield MlpWeights(*(_expert(stacked, index) for stacked in (self.gate_up, self.down)))


@dataclass(frozen=True)
class ExpertsBesideWeights:
    """Weights of a mixture of experts that computes a layer's input beside its MLP."""

    router_scale: Tensor
    """[hidden]: weight of the norm of the router's input."""
    norm: NormWeights
    """Norm of the experts' input."""
    experts: ExpertsWeights
    after_mlp: NormWeights
    """Norm of the MLP's output, to which that of the experts is added."""
    after_experts: NormWeights


@dataclass(frozen=True)
class LayerInputWeights:
    """Weights through which a layer's own input is added to the residual stream."""

    gate: LinearWeights
    """[size, hidden]."""
    output: LinearWeights
    """[hidden, size]."""
    norm: NormWeights
    """Norm of what is added."""


@dataclass(frozen=True)
class LayerInputsWeights:
    """Weights that make the inputs of all layers."""

    embedding: Tensor
    """[tokens, layers * size]."""
    projection: LinearWeights
    """[layers * size, hidden]."""
    norm: NormWeights
    """[size]: of what the projection gives for a layer."""
    hidden_size: int


@dataclass(frozen=True)
class AttentionWeights:
    """Weights of a layer's attention."""

    query_key_value: LinearWeights
    """Without values where these are the keys, and queries alone where K and V are another layer's."""
    query_norm: Tensor | None
    key_norm: Tensor | None
    sinks: Tensor | None
    """[heads]: a score of each head that takes part in the softmax and has no value."""
    output_gate: LinearWeights | None
    """[heads * head_dim, hidden]: what the output is multiplied by, before a sigmoid."""


@dataclass(frozen=True)
class RecurrentWeights:
    """Weights of a gated delta net or of Mamba2, which a layer may have in place of attention."""

    inputs: LinearWeights
    """Projections of queries, keys, values, the output's gate, the update's strength and the decay, stacked; the
    last two may be in ``gates``. Of Mamba2: of the gate, x, B, C and the time step."""
    convolution: Tensor
    """[channels, taps]: of queries, keys and values; the last tap is the token's own. Of Mamba2: of x, B and C."""
    log_decay: Tensor
    """[value heads] float32: logarithm of the decay's scale."""
    decay_bias: Tensor
    """[value heads] float32."""
    norm: Tensor
    """[value_dim]: of the output of each head. Of Mamba2: [value heads * value_dim]."""
    convolution_bias: Tensor | None = None
    """[channels], of Mamba2."""
    skip: Tensor | None = None
    """[value heads] float32: what is added of a token's own value; of Mamba2."""
    gates: LinearWeights | None = None
    """Projections of the strength and the decay, stacked, where ``inputs`` are quantized and these are not; None:
    they are among ``inputs``."""


@dataclass(frozen=True)
class LayerWeights:
    """Weights of one decoder layer."""

    attention_norm: NormWeights
    """Norm of the layer's input."""
    mixer: AttentionWeights | RecurrentWeights | None
    """What mixes tokens; None: the layer is an MLP."""
    output: LinearWeights | None
    """The projection of what attention or the delta net computes."""
    after_attention_norm: NormWeights | None
    mlp_norm: NormWeights | None
    """Norm of the MLP's input; None where that is the layer's, or there is no MLP."""
    mlp: MlpWeights | ExpertsWeights | None
    after_mlp_norm: NormWeights | None
    experts_beside: ExpertsBesideWeights | None = None
    """The experts beside the MLP."""
    layer_input: LayerInputWeights | None = None
    """How the layer's own input is added, after the MLP's output."""
    scale: Tensor | None = None
    """[1]: what the residual stream is multiplied by at the end."""


def expert_of(stacked: Matrix, index: int) -> Tensor | Fp8Matrix:
    """Returns a view of the matrix of one expert."""
    assert not isinstance(stacked, Int4Matrix), "experts in 4 bits are dequantized"
    return stacked.expert(index) if isinstance(stacked, Fp8Matrix) else stacked[index]


def _expert(stacked: LinearWeights, index: int) -> LinearWeights:
    bias = None if stacked.bias is None else stacked.bias[index]
    return LinearWeights(expert_of(stacked.weight, index), bias)
