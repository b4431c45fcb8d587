"""The operations of a device, with adapters beside the products that these change."""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from radixkv.errors import CheckpointError
from radixkv.runtime.device.adapters.layers import LoraLinear, LoraMlp, LoraPair
from radixkv.runtime.device.adapters.rows import StepRows
from radixkv.runtime.device.ops.base import (
    Linear,
    Mlp,
    Norm,
    Operations,
    RowReader,
)
from radixkv.runtime.device.ops.decorated import DecoratedOperations
from radixkv.runtime.device.weights.adapter_matrices import AdapterMatrices
from radixkv.runtime.device.weights.layer_weights import (
    LinearWeights,
    MlpWeights,
    NormWeights,
    Part,
)


class ActivatedOperations(Operations, Protocol):
    """Operations of a device that computes the parts of an MLP one after the other."""

    def activated(self, x: Tensor) -> Tensor:
        """Applies the activation of the model's MLPs to the output of their first product; may overwrite it.

        Args:
            x: [rows, 2 * inner], gate first; [rows, inner] if the activation has no gate.

        Returns:
            [rows, inner].
        """
        ...


class AdapterPairs(NamedTuple):
    """What an adapter adds to a product."""

    of_product: dict[str, list[LoraPair]]
    """What all adapters add to it, by their digests; the product reads it in each step."""
    own: list[LoraPair]


class LoraOperations(DecoratedOperations[ActivatedOperations]):
    """``Operations`` of a device, with the LoRA of adapters beside attention's projections and dense MLPs.

    Adapters come and go between steps. Products that none can change are the device's own. The head, experts and
    recurrent layers are, too: ``targets.fitted`` refuses adapters that change them.

    Args:
        operations: of the device.
        targets: names of the modules that adapters may change.
        dtype: in which A and B are kept: that of activations.
        step: the rows of the step that is computed.
    """

    def __init__(
        self, operations: ActivatedOperations, targets: Container[str], dtype: torch.dtype, step: StepRows
    ) -> None:
        super().__init__(operations)
        self._targets = targets
        self._dtype = dtype
        self._step = step
        self._products: list[tuple[tuple[Part, ...], dict[str, list[LoraPair]]]] = []
        """Each product that adapters may change: the matrices that it stacks, and what adapters add to it."""

    def linear(self, weights: LinearWeights) -> Linear:
        """See ``Operations.linear``."""
        return self._with_adapters(self._operations.linear(weights), weights)

    def output(self, weights: LinearWeights) -> Linear:
        """See ``Operations.output``."""
        return self._with_adapters(self._operations.output(weights), weights)

    def norm(self, weights: NormWeights, reader: RowReader | None = None) -> Norm:
        """See ``Operations.norm``. It writes tensors, which products of adapters read."""
        return self._operations.norm(weights)

    def mlp(self, weights: MlpWeights) -> Mlp:
        """See ``Operations.mlp``."""
        gate_up, down = weights.gate_up, weights.down
        if not self._may_change(gate_up) and not self._may_change(down):
            return self._operations.mlp(weights)
        first, last = (self._changeable(self._operations.linear(one), one) for one in (gate_up, down))
        return LoraMlp(first, last, self._operations.activated, self._step)

    def pairs(self, adapter: AdapterMatrices) -> list[AdapterPairs]:
        """Reads what an adapter adds to each product that it changes, which changes nothing yet.

        Call it once the decoder is built. Any thread may.

        Raises:
            CheckpointError: a module of the adapter is in no product of the decoder.

        Cost: a copy of its matrices.
        """
        found: list[AdapterPairs] = []
        unused = set(adapter.modules)
        for parts, of_product in self._products:
            own: list[LoraPair] = []
            first = 0
            for part in parts:
                if part.name in adapter.modules:
                    own.append(self._pair(adapter, part, slice(first, first + part.n_out)))
                    unused.discard(part.name)
                first += part.n_out
            if own:
                found.append(AdapterPairs(of_product, own))
        if unused:
            raise CheckpointError(f"adapter {adapter.digest[:12]}: nothing computes with its module {min(unused)}")
        return found

    def remove(self, digest: str) -> None:
        """Removes what an adapter adds to all products."""
        for _, of_product in self._products:
            of_product.pop(digest, None)

    def _may_change(self, weights: LinearWeights) -> bool:
        return any(part.name in self._targets for part in weights.parts)

    def _with_adapters(self, base: Linear, weights: LinearWeights) -> Linear:
        return self._changeable(base, weights) if self._may_change(weights) else base

    def _changeable(self, base: Linear, weights: LinearWeights) -> LoraLinear:
        of_product: dict[str, list[LoraPair]] = {}
        self._products.append((weights.parts, of_product))
        return LoraLinear(base, of_product, self._step)

    def _pair(self, adapter: AdapterMatrices, part: Part, columns: slice) -> LoraPair:
        a, b = (one.to(self._dtype) for one in adapter.pair(part.name))
        if part.rows is not None:
            b = b[part.rows]
        product = self._operations.linear
        return LoraPair(
            columns, product(LinearWeights(a)), product(LinearWeights(b)), adapter.modules[part.name].scale
        )
