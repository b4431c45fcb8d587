"""Operations of one rank, whose products of a part of the inputs are summed over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Literal, Protocol

from torch import Tensor

from radixkv.runtime.device.model_config.experts import ExpertConfig
from radixkv.runtime.device.ops.base import (
    Linear,
    Mlp,
    NormReader,
    Operations,
    RoutedExperts,
    Rows,
    RowScales,
)
from radixkv.runtime.device.ops.decorated import DecoratedOperations
from radixkv.runtime.device.weights.layer_weights import ExpertsWeights, LinearWeights, MlpWeights

PartMemory = Literal[0, 1]
"""Which of a rank's two memories has its parts of a sum. The sums of a step take them in turn."""


class SummedOperations(DecoratedOperations[Operations]):
    """``Operations`` of a rank: those of its device, with sums after the mixers' output projections and after MLPs.

    A rank has some of the heads, and some of the values inside each MLP and each expert (Megatron-LM, arXiv
    1909.08053). So output projections, MLPs and mixtures of experts give a part of each output; all other products
    are whole, as those of layer inputs, or of the rank alone, as those of recurrent layers. A layer whose experts
    are beside its MLP has three sums, others have two or one. What adapters add to a part is within it, and so in
    the sum once.

    Args:
        operations: of the device, with those of adapters.
        summed: returns a product, or an MLP, whose outputs are summed over all ranks.
        summed_experts: returns the same of experts whose router reads other rows.
        head: see ``Operations.head``.
    """

    def __init__(
        self,
        operations: Operations,
        summed: Callable[[NormReader, PartMemory], SummedPart],
        summed_experts: Callable[[RoutedExperts, PartMemory], RoutedExperts],
        head: Callable[[LinearWeights], Linear],
    ) -> None:
        super().__init__(operations)
        self._summed = summed
        self._summed_experts = summed_experts
        self._memories: Iterator[PartMemory] = cycle((0, 1))
        self._head = head

    def output(self, weights: LinearWeights) -> Linear:
        """See ``Operations.output``."""
        return self._summed(self._operations.output(weights), next(self._memories))

    def head(self, weights: LinearWeights) -> Linear:
        """See ``Operations.head``."""
        return self._head(weights)

    def mlp(self, weights: MlpWeights) -> Mlp:
        """See ``Operations.mlp``."""
        return self._summed(self._operations.mlp(weights), next(self._memories))

    def experts(self, weights: ExpertsWeights, config: ExpertConfig) -> Mlp:
        """See ``Operations.experts``."""
        return self._summed(self._operations.experts(weights, config), next(self._memories))

    def routed_experts(self, weights: ExpertsWeights, config: ExpertConfig) -> RoutedExperts:
        """See ``Operations.routed_experts``."""
        return self._summed_experts(self._operations.routed_experts(weights, config), next(self._memories))


class SummedPart(Linear, Mlp, Protocol):
    """A product or an MLP whose outputs are summed over all ranks."""


class Summed(SummedPart):
    """A product or an MLP whose outputs are summed by a function.

    Args:
        part: computes this rank's part of each output.
        sum_parts: returns the sum of all ranks' parts.
    """

    def __init__(self, part: NormReader, sum_parts: Callable[[Tensor], Tensor]) -> None:
        self._part = part
        self._sum_parts = sum_parts

    @property
    def input_scales(self) -> RowScales | None:
        """See ``ops.base.NormReader``."""
        return self._part.input_scales

    @property
    def reads_unrounded(self) -> bool:
        """See ``ops.base.NormReader``."""
        return self._part.reads_unrounded

    def __call__(self, x: Rows, out: Tensor | None = None) -> Tensor:
        """See ``ops.base.NormReader``."""
        total = self._sum_parts(self._part(x))
        return total if out is None else out.copy_(total)


class SummedExperts(RoutedExperts):
    """A mixture of experts whose outputs are summed by a function.

    Args:
        part: computes this rank's part of each output.
        sum_parts: returns the sum of all ranks' parts.
    """

    def __init__(self, part: RoutedExperts, sum_parts: Callable[[Tensor], Tensor]) -> None:
        self._part = part
        self._sum_parts = sum_parts

    def mixed(self, x: Tensor, routed: Tensor, out: Tensor | None = None) -> Tensor:
        """See ``ops.base.RoutedExperts``."""
        total = self._sum_parts(self._part.mixed(x, routed))
        return total if out is None else out.copy_(total)
