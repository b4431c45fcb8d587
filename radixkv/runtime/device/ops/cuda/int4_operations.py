"""Matrix products over 4-bit weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from radixkv.runtime.device.ops import base
from radixkv.runtime.device.ops.base import Rows, as_tensor
from radixkv.runtime.device.ops.cuda.int4_linear import int4_gated_linear, int4_linear
from radixkv.runtime.device.weights.int4_matrix import Int4Matrix


@dataclass(frozen=True)
class Int4Linear(base.Linear):
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

    def gated(self, x: Tensor) -> Tensor:
        """Maps [rows, in] to [rows, inner] with gate and up projection stacked in ``weight``, without a bias."""
        out = x.new_empty(len(x), len(self.weight) // 2)
        int4_gated_linear(x, self.weight, out)
        return out
