"""The inverse of a block's lower triangular matrix."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def unit_lower_inverse(a: tl.tensor, PRECISION: tl.constexpr) -> tl.tensor:
    """Returns ``(I + a)^-1`` for a strictly lower triangular ``a``, [64, 64] float32.

    Squares on the diagonal of ``I + a`` are inverted, and their size doubles: where ``A`` and ``B`` are the
    inverses of two neighbours and ``N`` is below them, the inverse of the square of both has ``-B N A`` below. With
    ``X`` the inverses of all squares this is ``X - X N X``. Squares of up to 16 are computed apart, in small
    products. A product of powers of ``a`` would take fewer operations, but loses all digits where keys are alike.

    Args:
        a: the matrix; other entries than those below the diagonal are 0.
        PRECISION: of the products, as ``tl.dot`` names it.
    """
    which, row = tl.arange(0, 4), tl.arange(0, 16)
    is_diagonal = (which[:, None] == which[None, :])[:, None, :, None]
    squares = tl.sum(tl.where(is_diagonal, tl.reshape(a, [4, 16, 4, 16]), 0.0), 2)
    i, j = row[None, :, None], row[None, None, :]
    inverse = tl.where(i == j, 1.0, tl.where(i >> 1 == j >> 1, -squares, 0.0))
    for level in tl.static_range(1, 4):
        inverse = _joined(inverse, squares, i, j, level, PRECISION)
    whole = tl.reshape(tl.where(is_diagonal, tl.reshape(inverse, [4, 16, 1, 16]), 0.0), [64, 64])
    i, j = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    for level in tl.static_range(4, 6):
        whole = _joined(whole, a, i, j, level, PRECISION)
    return whole


@triton.jit
def _joined(
    inverse: tl.tensor,
    a: tl.tensor,
    i: tl.tensor,
    j: tl.tensor,
    level: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Returns the inverses of squares of ``2 << level``, of those of half their size."""
    is_below = (i >> (level + 1) == j >> (level + 1)) & (i >> level != j >> level)
    product = tl.dot(inverse, tl.where(is_below, a, 0.0), input_precision=PRECISION)
    return inverse - tl.dot(product, inverse, input_precision=PRECISION)
