"""Tile sizes with which a matrix product gives the same bits.

A BLAS chooses its kernel, and with it the order of its sums, by the matrices' sizes. A result that must not depend
on who else is in the batch therefore comes from products of fixed sizes; sizes that agree bit for bit may be mixed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def agreeing_tiles(product: Callable[[Tensor], Tensor], sample: Tensor, sizes: Sequence[int]) -> tuple[int, ...]:
    """The first of ``sizes`` and those of the rest that agree with it, tried on this machine; or only 1, if a row's
    result depends on where in the tile it lies.

    Args:
        product: maps [rows, ...] to one result a row, for any number of rows.
        sample: random rows, a multiple of every size.
        sizes: ascending.
    """

    def in_tiles(rows: Tensor, size: int) -> Tensor:
        return torch.cat([product(tile) for tile in torch.split(rows, size)])

    expected = in_tiles(sample, sizes[0])
    few = sample[: 4 * sizes[0]]
    for shift in (1, 3):
        if not torch.equal(in_tiles(few.roll(shift, 0), sizes[0]).roll(-shift, 0), expected[: len(few)]):
            return (1,)
    return tuple(size for size in sizes if torch.equal(in_tiles(sample, size), expected))


def cover(n: int, tiles: Sequence[int]) -> list[int]:
    """Tile sizes that add up to at least ``n`` rows, with less than one smallest tile to spare.

    Args:
        tiles: ascending; each a multiple of the first.
    """
    chosen = []
    left = n
    for tile in reversed(tiles):
        while left >= tile:
            chosen.append(tile)
            left -= tile
    if left > 0:
        chosen.append(tiles[0])
    return chosen
