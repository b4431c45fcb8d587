"""Matrix products and MLPs over FP8 weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from radixkv.runtime.device.ops import base
from radixkv.runtime.device.ops.base import Rows, as_tensor
from radixkv.runtime.device.ops.cuda.fp8_linear import fp8_linear, multiply_fp8, weight_only_tile
from radixkv.runtime.device.ops.cuda.fp8_rows import RowScales, quantize_rows, row_scales, silu_and_multiply_to_fp8
from radixkv.runtime.device.weights.fp8_matrix import Fp8Matrix


@dataclass(frozen=True)
class Fp8Linear(base.Linear):
    """A product with an FP8 matrix, of activations that are rounded to FP8 too where the GPU multiplies it."""

    weight: Fp8Matrix
    """[out, in]."""
    bias: Tensor | None
    rounds_input: bool
    """False where the GPU has no FP8: the matrix is then converted while it is read."""

    def __call__(self, x: Rows, out: Tensor | None = None) -> Tensor:
        """See ``ops.base.Linear``."""
        if self.rounds_input:
            rows = quantize_rows(x, row_scales(self.weight)) if isinstance(x, Tensor) else x
            product = self._with_bias(fp8_linear(rows, self.weight))
            return product if out is None else out.copy_(product)
        x = as_tensor(x)
        if out is None:
            out = x.new_empty(len(x), len(self.weight))
        multiply_fp8(x, None, self.weight, out, weight_only_tile(len(x)))
        return self._with_bias(out)

    @property
    def input_scales(self) -> RowScales | None:
        """Scales of the activations that it reads in FP8; None if it reads them in 16 bits."""
        return row_scales(self.weight) if self.rounds_input else None

    def _with_bias(self, product: Tensor) -> Tensor:
        return product if self.bias is None else product.add_(self.bias)


@dataclass(frozen=True)
class Fp8Mlp(base.Mlp):
    """A dense MLP ``down(silu(gate(x)) * up(x))`` whose activation is rounded by the kernel that computes it."""

    gate_up: Fp8Linear
    down: Fp8Linear

    def __call__(self, x: Rows) -> Tensor:
        """See ``ops.base.Mlp``."""
        return self.down(silu_and_multiply_to_fp8(self.gate_up(x), row_scales(self.down.weight)))
