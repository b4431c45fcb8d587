"""Matrix products and MLPs over FP8 weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from radixkv.runtime.device.ops import base
from radixkv.runtime.device.ops.cuda.fp8_linear import fp8_linear, multiply_fp8, weight_only_tile
from radixkv.runtime.device.ops.cuda.fp8_rows import Fp8Rows, quantize_rows, silu_and_multiply_to_fp8
from radixkv.runtime.device.weights.fp8_matrix import Fp8Matrix


@dataclass(frozen=True)
class Fp8Linear(base.Linear):
    """A product with an FP8 matrix, of activations that are rounded to FP8 too where the GPU multiplies it."""

    weight: Fp8Matrix
    """[out, in]."""
    bias: Tensor | None
    rounds_input: bool
    """False where the GPU has no FP8: the matrix is then converted while it is read."""

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See ``ops.base.Linear``."""
        if self.rounds_input:
            product = self.multiply(quantize_rows(x, by_group=self.weight.has_blocks), x.dtype)
            return product if out is None else out.copy_(product)
        if out is None:
            out = x.new_empty(len(x), len(self.weight))
        multiply_fp8(x, None, self.weight, out, weight_only_tile(len(x)))
        return self._with_bias(out)

    def multiply(self, x: Fp8Rows, dtype: torch.dtype) -> Tensor:
        """Maps rounded rows to [rows, out] of a dtype."""
        return self._with_bias(fp8_linear(x, self.weight, dtype))

    def _with_bias(self, product: Tensor) -> Tensor:
        return product if self.bias is None else product.add_(self.bias)


@dataclass(frozen=True)
class Fp8Mlp(base.Mlp):
    """A dense MLP ``down(silu(gate(x)) * up(x))`` whose activation is rounded by the kernel that computes it."""

    gate_up: Fp8Linear
    down: Fp8Linear

    def __call__(self, x: Tensor) -> Tensor:
        """See ``ops.base.Mlp``."""
        rows = silu_and_multiply_to_fp8(self.gate_up(x), by_group=self.down.weight.has_blocks)
        return self.down.multiply(rows, x.dtype)
