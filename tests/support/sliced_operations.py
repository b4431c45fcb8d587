"""Operations of one process whose row-parallel products are computed in slices, as ranks compute them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from radixkv.runtime.device.model_config.config import DecoderConfig
from radixkv.runtime.device.model_config.experts import ExpertConfig
from radixkv.runtime.device.ops.cpu.layers import Experts
from radixkv.runtime.device.ops.cpu.operations import CpuOperations
from radixkv.runtime.device.weights.layer_weights import (
    ExpertsWeights,
    LinearWeights,
    MlpWeights,
    SharedExpertWeights,
)


class SlicedOperations(CpuOperations):
    """``CpuOperations`` that sum attention's output projection and MLPs over slices of what these read.

    Slices are summed in float32, in their order. A bias belongs to the first. Nothing else is divided.
    """

    def __init__(self, config: DecoderConfig, max_positions: int, n_slices: int) -> None:
        super().__init__(config, max_positions)
        self.config = config
        self._n_slices = n_slices

    def output(self, weights: LinearWeights) -> Sum:
        slices = of_columns(weights, self._n_slices)
        parts = [super(SlicedOperations, self).linear(one) for one in slices]
        return Sum(parts, parts_of_columns(self._n_slices))

    def mlp(self, weights: MlpWeights) -> Sum:
        parts = [super(SlicedOperations, self).mlp(one) for one in self._mlp_slices(weights)]
        return Sum(parts, same(self._n_slices))

    def experts(self, weights: ExpertsWeights, config: ExpertConfig) -> Sum:
        return Sum(self._experts_slices(weights, config), same(self._n_slices))

    def routed_experts(self, weights: ExpertsWeights, config: ExpertConfig) -> _ExpertsSum:
        return _ExpertsSum(self._experts_slices(weights, config))

    def _experts_slices(self, weights: ExpertsWeights, config: ExpertConfig) -> list[Experts]:
        halves = self._mlp_slices(MlpWeights(weights.gate_up, weights.down))
        shared: Sequence[SharedExpertWeights | None] = [None] * self._n_slices
        if weights.shared is not None:
            shared = [replace(weights.shared, mlp=one) for one in self._mlp_slices(weights.shared.mlp)]
        return [
            super(SlicedOperations, self).experts(
                replace(weights, gate_up=one.gate_up, down=one.down, shared=other), config
            )
            for one, other in zip(halves, shared, strict=True)
        ]

    def _mlp_slices(self, weights: MlpWeights) -> list[MlpWeights]:
        n_halves = weights.gate_up.weight.shape[-2] // weights.down.weight.shape[-1]
        firsts = of_rows(weights.gate_up, self._n_slices, n_halves)
        return [MlpWeights(*pair) for pair in zip(firsts, of_columns(weights.down, self._n_slices), strict=True)]


class Sum:
    input_scales = None

    def __init__(
        self, parts: Sequence[Callable[[Tensor], Tensor]], divide: Callable[[Tensor], Sequence[Tensor]]
    ) -> None:
        self._parts = parts
        self._divide = divide

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        total = _sum([part(one) for part, one in zip(self._parts, self._divide(x), strict=True)])
        return total if out is None else out.copy_(total)

    def add_and_norm(self, x: Tensor, residual: Tensor, norm: Callable[[Tensor], Tensor]) -> Tensor:
        return norm(residual.add_(self(x)))


class _ExpertsSum:
    def __init__(self, parts: Sequence[Experts]) -> None:
        self._parts = parts

    def mixed(self, x: Tensor, routed: Tensor, out: Tensor | None = None) -> Tensor:
        total = _sum([part.mixed(x, routed) for part in self._parts])
        return total if out is None else out.copy_(total)


def _sum(outputs: Sequence[Tensor]) -> Tensor:
    total = outputs[0].float()
    for other in outputs[1:]:
        total = total + other.float()
    return total.to(outputs[0].dtype)


def parts_of_columns(n: int) -> Callable[[Tensor], Sequence[Tensor]]:
    return lambda x: [part.contiguous() for part in x.chunk(n, -1)]


def same(n: int) -> Callable[[Tensor], Sequence[Tensor]]:
    return lambda x: [x] * n


def of_columns(weights: LinearWeights, n: int) -> list[LinearWeights]:
    """Divides the inputs; the first part has the bias."""
    assert isinstance(weights.weight, Tensor)
    parts = weights.weight.chunk(n, -1)
    return [
        LinearWeights(part.contiguous(), weights.bias if index == 0 else None) for index, part in enumerate(parts)
    ]


def of_rows(weights: LinearWeights, n: int, n_halves: int) -> list[LinearWeights]:
    """Divides the outputs, each half of gate and up for itself."""
    assert isinstance(weights.weight, Tensor)

    def divided(matrix: Tensor, dim: int) -> list[Tensor]:
        halves = [half.chunk(n, dim) for half in matrix.chunk(n_halves, dim)]
        return [torch.cat(parts, dim) for parts in zip(*halves, strict=True)]

    biases = [None] * n if weights.bias is None else divided(weights.bias, -1)
    return [LinearWeights(*pair) for pair in zip(divided(weights.weight, -2), biases, strict=True)]
