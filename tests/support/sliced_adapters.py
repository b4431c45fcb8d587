"""Adapters of one process that adds what they give to the slices of row-parallel products, as ranks do."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

import torch

from radixkv.checkpoints.adapters import LoraShape
from radixkv.runtime.device.adapters.operations import AdapterPairs, LoraOperations
from radixkv.runtime.device.adapters.rows import StepRows
from radixkv.runtime.device.ops.base import Linear
from radixkv.runtime.device.ops.cpu.operations import CpuOperations
from radixkv.runtime.device.weights.adapter_matrices import AdapterMatrices
from radixkv.runtime.device.weights.layer_weights import LinearWeights, MlpWeights
from radixkv.runtime.device.weights.shards import Cut
from support.sliced_operations import SlicedOperations, Sum, of_columns, of_rows, parts_of_columns, same

_INPUTS = ("o_proj", "out_proj", "down_proj", "fc2")
"""Ends of the names of modules of whose inputs each slice has some."""
_OUTPUTS = ("gate_proj", "up_proj", "fc1")


class SlicedLoraOperations(LoraOperations):
    """``LoraOperations`` over ``SlicedOperations``: each slice has a part of A, or of B, as its rank would."""

    def __init__(
        self,
        operations: SlicedOperations,
        targets: Container[str],
        dtype: torch.dtype,
        step: StepRows,
        *,
        n_slices: int,
    ) -> None:
        super().__init__(operations, targets, dtype, step)
        plain = CpuOperations(operations.config, 1)
        self._slices = [LoraOperations(plain, targets, dtype, step) for _ in range(n_slices)]

    def output(self, weights: LinearWeights) -> Linear:
        parts = of_columns(weights, len(self._slices))
        return self._sum(
            [one.output(replace(part, parts=weights.parts)) for one, part in zip(self._slices, parts, strict=True)]
        )

    def mlp(self, weights: MlpWeights) -> Sum:
        n = len(self._slices)
        names = weights.gate_up.parts
        inner = tuple(replace(part, n_out=part.n_out // n) for part in names)
        firsts = of_rows(weights.gate_up, n, len(names))
        lasts = of_columns(weights.down, n)
        return Sum(
            [
                one.mlp(MlpWeights(replace(first, parts=inner), replace(last, parts=weights.down.parts)))
                for one, first, last in zip(self._slices, firsts, lasts, strict=True)
            ],
            same(n),
        )

    def pairs(self, adapter: AdapterMatrices) -> list[AdapterPairs]:
        modules = adapter.modules
        sliced = {name: shape for name, shape in modules.items() if name.endswith((*_INPUTS, *_OUTPUTS))}
        found = super().pairs(_of(adapter, {name: modules[name] for name in modules.keys() - sliced.keys()}))
        for index, one in enumerate(self._slices):
            cuts = {name: _cut(name, shape, index, len(self._slices)) for name, shape in sliced.items()}
            found += one.pairs(replace(_of(adapter, sliced), cuts=cuts))
        return found

    def _sum(self, parts: list[Linear]) -> Sum:
        return Sum(parts, parts_of_columns(len(parts)))


def _of(adapter: AdapterMatrices, modules: dict[str, LoraShape]) -> AdapterMatrices:
    return replace(adapter, folder=replace(adapter.folder, modules=modules))


def _cut(name: str, shape: LoraShape, index: int, n_slices: int) -> Cut:
    dimension = 1 if name.endswith(_INPUTS) else 0
    size = (shape.n_out, shape.n_in)[dimension] // n_slices
    return Cut(dimension, ((index * size, size),), n_slices)
