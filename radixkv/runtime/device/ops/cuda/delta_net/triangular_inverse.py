"""The inverse of a block's lower triangular matrix."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def unit_lower_inverse(a: tl.tensor) -> tl.tensor:
    """Returns ``(I + a)^-1`` for a strictly lower triangular ``a``, [64, 64] float32.

    The two squares of 32 on its diagonal are inverted by forward substitution. Below them the inverse has
    ``-B^-1 N A^-1``, where ``N`` is below the squares ``A`` and ``B``. A product of powers of ``a`` would take
    fewer operations, but loses all digits where keys are alike.
    """
    which, row = tl.arange(0, 2), tl.arange(0, 32)
    squares = tl.reshape(a, [2, 32, 2, 32])
    is_diagonal = (which[:, None] == which[None, :])[:, None, :, None]
    diagonal = tl.sum(tl.where(is_diagonal, squares, 0.0), 2)  # [2, 32, 32]
    inverse = tl.where(row[:, None] == row[None, :], 1.0, 0.0)[None, :, :] + tl.zeros([2, 32, 32], tl.float32)
    for step in range(1, 32):
        is_row = (row == step)[None, :, None]
        known = tl.sum(tl.where(is_row, diagonal, 0.0), 1)  # [2, 32]: a row of each square
        inverse = tl.where(is_row, inverse - tl.sum(known[:, :, None] * inverse, 1)[:, None, :], inverse)
    is_first = (which == 0)[:, None, None]
    first, second = tl.sum(tl.where(is_first, inverse, 0.0), 0), tl.sum(tl.where(is_first, 0.0, inverse), 0)
    is_below = ((which[:, None] == 1) & (which[None, :] == 0))[:, None, :, None]
    below = tl.sum(tl.sum(tl.where(is_below, squares, 0.0), 2), 0)
    below = tl.dot(tl.dot(second, below, input_precision="ieee"), first, input_precision="ieee")
    whole = tl.where(is_diagonal, tl.reshape(inverse, [2, 32, 1, 32]), 0.0)
    whole = tl.where(is_below, -tl.reshape(below, [1, 32, 1, 32]), whole)
    return tl.reshape(whole, [64, 64])
