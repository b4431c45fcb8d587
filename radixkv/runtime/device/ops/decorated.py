"""Operations that are those of others, but for what a class that extends these builds."""

from __future__ import annotations

from typing import Generic, TypeVar

from torch import Tensor

from radixkv.runtime.device.kv_dtype import LayerScales
from radixkv.runtime.device.model_config.experts import ExpertConfig
from radixkv.runtime.device.model_config.heads import LayerHeads
from radixkv.runtime.device.model_config.rope import Rope
from radixkv.runtime.device.model_config.states import RecurrentConfig
from radixkv.runtime.device.ops.base import (
    ExpertsBeside,
    LayerInput,
    Linear,
    Mlp,
    Norm,
    Operations,
    RecurrentLayer,
    RotateAndStore,
    RoutedExperts,
    RowReader,
)
from radixkv.runtime.device.weights.layer_weights import (
    ExpertsBesideWeights,
    ExpertsWeights,
    LayerInputWeights,
    LinearWeights,
    MlpWeights,
    NormWeights,
    RecurrentWeights,
)

OperationsT = TypeVar("OperationsT", bound=Operations)


class DecoratedOperations(Operations, Generic[OperationsT]):
    """``Operations`` that are those of another object. A class that extends this one builds some of them itself.

    Args:
        operations: the other object.
    """

    def __init__(self, operations: OperationsT) -> None:
        self._operations = operations

    def linear(self, weights: LinearWeights) -> Linear:
        """See ``Operations.linear``."""
        return self._operations.linear(weights)

    def output(self, weights: LinearWeights) -> Linear:
        """See ``Operations.output``."""
        return self._operations.output(weights)

    def head(self, weights: LinearWeights) -> Linear:
        """See ``Operations.head``."""
        return self._operations.head(weights)

    def norm(self, weights: NormWeights, reader: RowReader | None = None) -> Norm:
        """See ``Operations.norm``."""
        return self._operations.norm(weights, reader)

    def mlp(self, weights: MlpWeights) -> Mlp:
        """See ``Operations.mlp``."""
        return self._operations.mlp(weights)

    def recurrent_layer(self, weights: RecurrentWeights, config: RecurrentConfig) -> RecurrentLayer:
        """See ``Operations.recurrent_layer``."""
        return self._operations.recurrent_layer(weights, config)

    def gated(self, x: Tensor, gate: Tensor) -> Tensor:
        """See ``Operations.gated``."""
        return self._operations.gated(x, gate)

    def capped(self, logits: Tensor, cap: float) -> Tensor:
        """See ``Operations.capped``."""
        return self._operations.capped(logits, cap)

    def experts(self, weights: ExpertsWeights, config: ExpertConfig) -> Mlp:
        """See ``Operations.experts``."""
        return self._operations.experts(weights, config)

    def routed_experts(self, weights: ExpertsWeights, config: ExpertConfig) -> RoutedExperts:
        """See ``Operations.routed_experts``."""
        return self._operations.routed_experts(weights, config)

    def experts_beside(self, weights: ExpertsBesideWeights, experts: RoutedExperts) -> ExpertsBeside:
        """See ``Operations.experts_beside``."""
        return self._operations.experts_beside(weights, experts)

    def layer_input(self, weights: LayerInputWeights) -> LayerInput:
        """See ``Operations.layer_input``."""
        return self._operations.layer_input(weights)

    def rotate_and_store(
        self,
        heads: LayerHeads,
        rope: Rope | None,
        query_norm: Tensor | None,
        key_norm: Tensor | None,
        scales: LayerScales,
    ) -> RotateAndStore:
        """See ``Operations.rotate_and_store``."""
        return self._operations.rotate_and_store(heads, rope, query_norm, key_norm, scales)
