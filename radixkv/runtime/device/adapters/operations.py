"""The operations of a device, with adapters beside the products that these change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from radixkv.checkpoints.adapters import AdapterFolder
from radixkv.errors import CheckpointError
from radixkv.runtime.device.adapters.layers import LoraLinear, LoraMlp, LoraPair
from radixkv.runtime.device.adapters.rows import StepRows
from radixkv.runtime.device.ops.base import (
    Linear,
    Mlp,
    Norm,
    NormReader,
    Operations,
)
from radixkv.runtime.device.weights.adapter_matrices import adapter_pair
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


class LoraOperations:
    """``Operations`` of a device, with the LoRA of adapters beside attention's projections and dense MLPs.

    Products that no adapter changes are the device's own. The head, experts and recurrent layers are, too:
    ``targets.fitted`` refuses adapters that change them.

    Args:
        operations: of the device.
        adapters: the adapters, each once.
        dtype: in which A and B are kept: that of activations.
        step: the rows of the step that is computed.
    """

    def __init__(
        self, operations: ActivatedOperations, adapters: Sequence[AdapterFolder], dtype: torch.dtype, step: StepRows
    ) -> None:
        self._operations = operations
        self._adapters = adapters
        self._dtype = dtype
        self._step = step
        self._unused = {(one.digest, module) for one in adapters for module in one.modules}
        """Digests of adapters, and their modules that no product has yet."""
        self.gated = operations.gated
        self.capped = operations.capped
        self.head = operations.head
        self.recurrent_layer = operations.recurrent_layer
        self.experts = operations.experts
        self.routed_experts = operations.routed_experts
        self.experts_beside = operations.experts_beside
        self.layer_input = operations.layer_input
        self.rotate_and_store = operations.rotate_and_store

    def linear(self, weights: LinearWeights) -> Linear:
        """See ``Operations.linear``."""
        return self._with_adapters(self._operations.linear(weights), weights)

    def output(self, weights: LinearWeights) -> Linear:
        """See ``Operations.output``."""
        return self._with_adapters(self._operations.output(weights), weights)

    def norm(self, weights: NormWeights, reader: NormReader | None = None) -> Norm:
        """See ``Operations.norm``. It writes tensors, which products of adapters read."""
        return self._operations.norm(weights)

    def mlp(self, weights: MlpWeights) -> Mlp:
        """See ``Operations.mlp``."""
        pairs = self._pairs(weights.gate_up), self._pairs(weights.down)
        if not any(pairs):
            return self._operations.mlp(weights)
        products = self._operations.linear(weights.gate_up), self._operations.linear(weights.down)
        gate_up, down = (LoraLinear(*one, self._step) for one in zip(products, pairs, strict=True))
        return LoraMlp(gate_up, down, self._operations.activated, self._step)

    def check_whole(self) -> None:
        """Raises ``CheckpointError`` if a module of an adapter is in no product of the decoder."""
        if self._unused:
            digest, module = min(self._unused)
            raise CheckpointError(f"adapter {digest[:12]}: nothing computes with its module {module}")

    def _with_adapters(self, base: Linear, weights: LinearWeights) -> Linear:
        pairs = self._pairs(weights)
        return LoraLinear(base, pairs, self._step) if pairs else base

    def _pairs(self, weights: LinearWeights) -> dict[str, list[LoraPair]]:
        """Reads what adapters add to a product, by their digests."""
        pairs: dict[str, list[LoraPair]] = {}
        first = 0
        for part in weights.parts:
            columns = slice(first, first + part.n_out)
            for adapter in self._adapters:
                if part.name in adapter.modules:
                    pairs.setdefault(adapter.digest, []).append(self._pair(adapter, part, columns))
            first += part.n_out
        return pairs

    def _pair(self, adapter: AdapterFolder, part: Part, columns: slice) -> LoraPair:
        a, b = (one.to(self._dtype) for one in adapter_pair(adapter, part.name))
        if part.rows is not None:
            b = b[part.rows]
        self._unused.discard((adapter.digest, part.name))
        product = self._operations.linear
        return LoraPair(
            columns, product(LinearWeights(a)), product(LinearWeights(b)), adapter.modules[part.name].scale
        )
