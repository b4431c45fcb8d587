"""The weights of a decoder's layers, as its operations take them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from radixkv.runtime.device.weights.fp8_matrix import Fp8Matrix
from radixkv.runtime.device.weights.int4_matrix import Int4Matrix

Matrix = Tensor | Fp8Matrix | Int4Matrix


@dataclass(frozen=True)
class LinearWeights:
    """A matrix [out, in] and an optional bias [out]. Matrices that share an input are stacked along ``out``."""

    weight: Matrix
    bias: Tensor | None = None


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
class ExpertsWeights:
    """The router, and the MLPs of all experts stacked along a new first dimension."""

    router: LinearWeights
    gate_up: LinearWeights
    """[experts, 2 * inner, hidden], gate first, with an optional bias [experts, 2 * inner]."""
    down: LinearWeights
    """[experts, hidden, inner], with an optional bias [experts, hidden]."""

    def experts(self) -> Iterator[MlpWeights]:
        """Yields views of the weights of each expert."""
        for index in range(len(self.down.weight)):
            yield MlpWeights(*(_expert(stacked, index) for stacked in (self.gate_up, self.down)))


@dataclass(frozen=True)
class LayerWeights:
    """Weights of one decoder layer."""

    attention_norm: NormWeights
    query_key_value: LinearWeights
    query_norm: Tensor | None
    key_norm: Tensor | None
    sinks: Tensor | None
    """[heads]: a score of each head that takes part in the softmax and has no value."""
    output: LinearWeights
    after_attention_norm: NormWeights | None
    mlp_norm: NormWeights
    mlp: MlpWeights | ExpertsWeights
    after_mlp_norm: NormWeights | None


def expert_of(stacked: Matrix, index: int) -> Tensor | Fp8Matrix:
    """Returns a view of the matrix of one expert."""
    assert not isinstance(stacked, Int4Matrix), "experts in 4 bits are dequantized"
    return stacked.expert(index) if isinstance(stacked, Fp8Matrix) else stacked[index]


def _expert(stacked: LinearWeights, index: int) -> LinearWeights:
    bias = None if stacked.bias is None else stacked.bias[index]
    return LinearWeights(expert_of(stacked.weight, index), bias)
