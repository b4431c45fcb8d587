"""The inverse of a block's lower triangular matrix."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def unit_lower_inverse(a: tl.tensor) -> tl.tensor:
    """Returns ``(I + a)^-1`` for a strictly lower triangular ``a``, [64, 64] float32.

    Its diagonal squares of 16 are inverted by forward substitution. Then pairs of inverted squares are joined:
    where ``A`` and ``B`` are on the diagonal and ``N`` is below it, the inverse has ``-B^-1 N A^-1`` there. A
    product of powers of ``a`` would take fewer operations, but loses all digits where keys are alike.
    """
    index = tl.arange(0, 64)
    squares = tl.reshape(a, [4, 16, 4, 16])
    which = tl.arange(0, 4)
    is_diagonal = (which[:, None] == which[None, :])[:, None, :, None]
    diagonal = tl.sum(tl.where(is_diagonal, squares, 0.0), 2)  # [4, 16, 16]
    row = tl.arange(0, 16)
    inverse = tl.where(row[:, None] == row[None, :], 1.0, 0.0)[None, :, :] + tl.zeros([4, 16, 16], tl.float32)
    for step in range(1, 16):
        known = tl.sum(tl.where((row == step)[None, :, None], diagonal, 0.0), 1)  # [4, 16], a row of each square
        sums = tl.sum(known[:, :, None] * inverse, 1)
        inverse = tl.where((row == step)[None, :, None], inverse - sums[:, None, :], inverse)
    whole = tl.where(is_diagonal, tl.reshape(inverse, [4, 16, 1, 16]), 0.0)
    whole = tl.reshape(whole, [64, 64])
    for n_joined in tl.static_range(2):
        size = 16 << n_joined
        below = (index // size)[:, None] == (index // size)[None, :] + 1
        joined = below & ((index // (2 * size))[:, None] == (index // (2 * size))[None, :])
        part = tl.dot(whole, tl.where(joined, a, 0.0), input_precision="tf32x3")
        whole -= tl.dot(part, whole, input_precision="tf32x3")
    return whole
