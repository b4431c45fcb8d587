"""What ends each half of a decoder layer: a product, added to the residual stream, and the norm of the sum."""

from __future__ import annotations

from torch import Tensor

from radixkv.runtime.device.ops.cuda.linear import linear
from radixkv.runtime.device.ops.cuda.norm import add_rms_norm, rms_norm

_MANY_ROWS = 256
"""From here on the product adds to the residual stream, and the norm reads that alone: an 8B model's long runs take
0.4% less, with 256 rows a step and with prompts."""


def add_linear_and_norm(
    x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, out: Tensor
) -> None:
    """``residual += x @ weight.T``; then ``out = rms_norm(residual)``. Allocates the product for few rows.

    The sum is rounded once for many rows, the product and the sum for few.

    Args:
        x: [rows, in], contiguous; all tensors are of one dtype.
        weight: [hidden, in], contiguous.
        residual: [rows, hidden], contiguous.
        norm_weight: [hidden].
        eps: of the norm.
        out: [rows, hidden].
    """
    if len(x) >= _MANY_ROWS:
        residual.addmm_(x, weight.t())
        rms_norm(residual, norm_weight, eps, out)
        return
    product = residual.new_empty(residual.shape)
    linear(x, weight, product)
    add_rms_norm(product, residual, norm_weight, eps, out)
