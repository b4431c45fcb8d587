"""The operations of CUDA, with adapters beside the products that these change."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from radixkv.runtime.device.adapters.cuda.blocks import StepAdapters
from radixkv.runtime.device.adapters.cuda.layers import FollowingNorm, LoraLinear
from radixkv.runtime.device.adapters.cuda.memory import AdapterMemory
from radixkv.runtime.device.model_config.families import Activation
from radixkv.runtime.device.ops.base import Mlp, Norm, RowReader
from radixkv.runtime.device.ops.cuda import layers
from radixkv.runtime.device.ops.cuda.layers import CudaLinear
from radixkv.runtime.device.ops.cuda.operations import CudaOperations
from radixkv.runtime.device.ops.decorated import DecoratedOperations
from radixkv.runtime.device.weights.fp8_matrix import Fp8Matrix
from radixkv.runtime.device.weights.int4_matrix import Int4Matrix
from radixkv.runtime.device.weights.layer_weights import LinearWeights, Matrix, MlpWeights, NormWeights


class CudaLoraOperations(DecoratedOperations[CudaOperations]):
    """``Operations`` on a GPU, with the LoRA of adapters beside attention's projections and dense MLPs.

    Products that no adapter can change are the device's own. The head, experts and recurrent layers are, too:
    ``targets.fitted`` refuses adapters that change them.

    Args:
        operations: of the device.
        activation: of the model's MLPs.
        targets: names of the modules that adapters may change.
        memory: gets the products that they may change.
        step: the step that is enqueued.
    """

    def __init__(
        self,
        operations: CudaOperations,
        activation: Activation,
        targets: Container[str],
        memory: AdapterMemory,
        step: StepAdapters,
    ) -> None:
        super().__init__(operations)
        self._activation: Activation = activation
        self._targets = targets
        self._memory = memory
        self._step = step

    def linear(self, weights: LinearWeights) -> CudaLinear:
        """See ``Operations.linear``."""
        base = self._operations.linear(weights)
        if not any(part.name in self._targets for part in weights.parts):
            return base
        slots = self._memory.add(weights.parts, _inputs_of(weights.weight))
        return LoraLinear(base, slots, self._step)

    def output(self, weights: LinearWeights) -> CudaLinear:
        """See ``Operations.output``."""
        return self.linear(weights)

    def norm(self, weights: NormWeights, reader: RowReader | None = None) -> Norm:
        """See ``Operations.norm``."""
        norm = self._operations.norm(weights, reader)
        if reader is None or not isinstance(norm, layers.RMSNorm) or norm.out_scales is None:
            return norm
        alone, with_unrounded = (replace(norm, keeps_unrounded=keeps) for keeps in (False, True))
        return FollowingNorm(alone, with_unrounded, reader)

    def mlp(self, weights: MlpWeights) -> Mlp:
        """See ``Operations.mlp``."""
        return layers.Mlp(self.linear(weights.gate_up), self.linear(weights.down), self._activation)


def _inputs_of(matrix: Matrix) -> int:
    """Returns the inputs of a product with a matrix."""
    if isinstance(matrix, Int4Matrix):
        return matrix.n_in
    return int((matrix.values if isinstance(matrix, Fp8Matrix) else matrix).shape[1])
