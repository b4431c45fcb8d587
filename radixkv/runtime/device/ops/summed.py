"""Operations of one rank, whose products of a part of the inputs are summed over all ranks."""

from __future__ import annotations

from torch import Tensor

from radixkv.runtime.device.collectives import Collectives
from radixkv.runtime.device.kv_dtype import LayerScales
from radixkv.runtime.device.model_config.config import ExpertConfig
from radixkv.runtime.device.model_config.rope import Rope
from radixkv.runtime.device.ops.base import (
    Linear,
    Mlp,
    Norm,
    NormReader,
    Operations,
    RotateAndStore,
    Rows,
    RowScales,
)
from radixkv.runtime.device.weights.layer_weights import ExpertsWeights, LinearWeights, MlpWeights, NormWeights


class SummedOperations:
    """``Operations`` of a rank: those of its device, with sums after attention's output projection and after MLPs.

    A rank has some of the heads, and some of the values inside each MLP (Megatron-LM, arXiv 1909.08053). So these
    two products give a part of each output; all others are whole, or of the rank alone.

    Args:
        operations: of the device.
        collectives: of the rank.
    """

    def __init__(self, operations: Operations, collectives: Collectives) -> None:
        self._operations = operations
        self._collectives = collectives
        self.linear = operations.linear

    def output(self, weights: LinearWeights) -> Linear:
        """See ``Operations.output``."""
        return Summed(self._operations.output(weights), self._collectives)

    def norm(self, weights: NormWeights, reader: NormReader | None = None) -> Norm:
        """See ``Operations.norm``."""
        return self._operations.norm(weights, reader)

    def mlp(self, weights: MlpWeights) -> Mlp:
        """See ``Operations.mlp``."""
        return Summed(self._operations.mlp(weights), self._collectives)

    def experts(self, weights: ExpertsWeights, config: ExpertConfig) -> Mlp:
        """See ``Operations.experts``."""
        return Summed(self._operations.experts(weights, config), self._collectives)

    def rotate_and_store(
        self, rope: Rope | None, query_norm: Tensor | None, key_norm: Tensor | None, scales: LayerScales
    ) -> RotateAndStore:
        """See ``Operations.rotate_and_store``."""
        return self._operations.rotate_and_store(rope, query_norm, key_norm, scales)


class Summed(Linear, Mlp):
    """A product or an MLP whose outputs are summed over all ranks.

    Args:
        part: computes this rank's part of each output.
        collectives: of the rank.
    """

    def __init__(self, part: NormReader, collectives: Collectives) -> None:
        self._part = part
        self._collectives = collectives

    @property
    def input_scales(self) -> RowScales | None:
        """See ``ops.base.NormReader``."""
        return self._part.input_scales

    def __call__(self, x: Rows, out: Tensor | None = None) -> Tensor:
        """See ``ops.base.Linear``."""
        total = self._collectives.sum(self._part(x))
        return total if out is None else out.copy_(total)
