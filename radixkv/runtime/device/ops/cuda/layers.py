"""Norms, matrix products and dense MLPs on CUDA, over fused kernels.

Attributes of a norm (``fused``) and of a product (``input_scales``, ``gated``) say what can be fused, and not their
classes. So an object that wraps another decides for both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from radixkv.runtime.device.model_config.families import Activation
from radixkv.runtime.device.ops import base
from radixkv.runtime.device.ops.base import Norm, RmsFields, Rows, RowScales, as_tensor
from radixkv.runtime.device.ops.cuda.activation import silu_and_multiply, square_positive
from radixkv.runtime.device.ops.cuda.fp8_linear import fp8_linear, multiply_fp8, weight_only_tile
from radixkv.runtime.device.ops.cuda.fp8_rows import (
    quantize_rows,
    row_scales,
    rows_of,
    silu_and_multiply_to_fp8,
)
from radixkv.runtime.device.ops.cuda.int4_linear import MAX_ROWS, int4_linear, int4_tile
from radixkv.runtime.device.ops.cuda.int4_product import multiply_int4
from radixkv.runtime.device.ops.cuda.linear import add_linear_and_norm, gated_linear, linear
from radixkv.runtime.device.ops.cuda.norm import rms_norm
from radixkv.runtime.device.weights.fp8_matrix import Fp8Matrix
from radixkv.runtime.device.weights.int4_matrix import Int4Matrix


class RMSNorm(RmsFields, Norm):
    """An RMS norm."""

    def __call__(self, x: Tensor) -> Rows:
        """See ``ops.base.Norm``."""
        out = rows_of(self, x)
        rms_norm(x, self, out)
        return out

    def add(self, x: Tensor, residual: Tensor) -> Rows:
        """See ``ops.base.Norm``."""
        out = rows_of(self, residual)
        rms_norm(x, self, out, residual)
        return out

    @property
    def fused(self) -> RmsFields:
        """See ``ops.base.Norm``."""
        return self


@dataclass(frozen=True)
class LayerNorm(Norm):
    """A layer norm, in torch."""

    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """See ``ops.base.Norm``."""
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class CudaLinear(base.Linear, Protocol):
    """A matrix product whose output may be that of the gate and up projections of an MLP."""

    def gated(self, x: Rows, reader: base.Linear) -> Rows:
        """Maps [rows, in] to ``silu(gate) * up``, [rows, inner], in FP8 if ``reader`` reads that alone.

        The product has gate and up side by side.
        """
        gate_up = self(x)
        gated = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        silu_and_multiply(gate_up, gated)
        return gated


@dataclass(frozen=True)
class Linear(CudaLinear):
    """A product with a matrix in 16 bits. Without a bias it is fused with what follows."""

    weight: Tensor
    """[out, in]."""
    bias: Tensor | None

    def __call__(self, x: Rows, out: Tensor | None = None) -> Tensor:
        """See ``ops.base.Linear``."""
        x = as_tensor(x)
        if out is None:
            out = x.new_empty(len(x), len(self.weight))
        if self.bias is None:
            linear(x, self.weight, out)
        else:
            torch.addmm(self.bias, x, self.weight.t(), out=out)
        return out

    def add_and_norm(self, x: Rows, residual: Tensor, norm: Norm) -> Rows:
        """See ``ops.base.Linear``."""
        fields = norm.fused
        if self.bias is not None or fields is None or fields.adds_one:
            return norm.add(self(x), residual)
        out = rows_of(fields, residual)
        add_linear_and_norm(as_tensor(x), self.weight, residual, fields, out)
        return out

    def gated(self, x: Rows, reader: base.Linear) -> Rows:
        """See ``CudaLinear``."""
        if self.bias is not None:
            return super().gated(x, reader)
        x = as_tensor(x)
        gated = x.new_empty(len(x), len(self.weight) // 2)
        gated_linear(x, self.weight, gated)
        return gated


@dataclass(frozen=True)
class Fp8Linear(CudaLinear):
    """A product with an FP8 matrix, of activations that are rounded to FP8 too where the GPU multiplies it."""

    weight: Fp8Matrix
    """[out, in]."""
    bias: Tensor | None
    rounds_input: bool
    """False where the GPU has no FP8: the matrix is then converted while it is read."""

    def __call__(self, x: Rows, out: Tensor | None = None) -> Tensor:
        """See ``ops.base.Linear``. Rows of ``out`` may be strided, and it may have some for the padding of rows."""
        if self.rounds_input:
            rows = quantize_rows(x, row_scales(self.weight)) if isinstance(x, Tensor) else x
            return self._with_bias(fp8_linear(rows, self.weight, out))
        x = as_tensor(x)
        out = x.new_empty(len(x), len(self.weight)) if out is None else out[: len(x)]
        multiply_fp8(x, None, self.weight, out, weight_only_tile(len(x)))
        return self._with_bias(out)

    @property
    def input_scales(self) -> RowScales | None:
        """See ``ops.base.Linear``."""
        return row_scales(self.weight) if self.rounds_input else None

    def gated(self, x: Rows, reader: base.Linear) -> Rows:
        """See ``CudaLinear``."""
        scales = None if reader.reads_unrounded else reader.input_scales
        return super().gated(x, reader) if scales is None else silu_and_multiply_to_fp8(self(x), scales)

    def _with_bias(self, product: Tensor) -> Tensor:
        return product if self.bias is None else product.add_(self.bias)


@dataclass(frozen=True)
class Int4Linear(CudaLinear):
    """A product of activations in 16 bits with a 4-bit matrix."""

    weight: Int4Matrix
    """[out, in]."""
    bias: Tensor | None

    def __call__(self, x: Rows, out: Tensor | None = None) -> Tensor:
        """See ``ops.base.Linear``."""
        x = as_tensor(x)
        if out is None:
            out = x.new_empty(len(x), len(self.weight))
        int4_linear(x, self.weight, out)
        return out if self.bias is None else out.add_(self.bias)

    def gated(self, x: Rows, reader: base.Linear) -> Rows:
        """See ``CudaLinear``."""
        x = as_tensor(x)
        if self.bias is not None or len(x) > MAX_ROWS:
            return super().gated(x, reader)
        out = x.new_empty(len(x), len(self.weight) // 2)
        multiply_int4(x, self.weight, out, int4_tile(len(x), self.weight), gated=True)
        return out


@dataclass(frozen=True)
class Mlp(base.Mlp):
    """A dense MLP: ``down(silu(gate(x)) * up(x))``, or with another activation."""

    gate_up: CudaLinear
    down: base.Linear
    activation: Activation

    @property
    def input_scales(self) -> RowScales | None:
        """See ``ops.base.Mlp``."""
        return self.gate_up.input_scales

    @property
    def reads_unrounded(self) -> bool:
        """See ``ops.base.RowReader``."""
        return self.gate_up.reads_unrounded

    def __call__(self, x: Rows, out: Tensor | None = None) -> Tensor:
        """See ``ops.base.Mlp``."""
        return self.down(self._activated(x), out)

    def add_and_norm(self, x: Rows, residual: Tensor, norm: Norm) -> Rows:
        """See ``ops.base.Mlp``."""
        return self.down.add_and_norm(self._activated(x), residual, norm)

    def _activated(self, x: Rows) -> Rows:
        if self.activation == "relu":
            return self.gate_up(x).relu_()
        if self.activation == "relu2":
            squared = self.gate_up(x)
            square_positive(squared)
            return squared
        if self.activation == "gelu_tanh":
            gate, up = self.gate_up(x).chunk(2, -1)
            return functional.gelu(gate, approximate="tanh").mul_(up)
        return self.gate_up.gated(x, self.down)
