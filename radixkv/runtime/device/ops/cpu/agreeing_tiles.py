"""Search for tile sizes that give bit-equal matrix products.

A BLAS chooses its kernel, and with it the order of summation, by the matrix sizes. Batch-invariant results
therefore need products of fixed sizes. Sizes that agree bit for bit may be mixed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor


def agreeing_tiles(product: Callable[[Tensor], Tensor], sample: Tensor, sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns the tile sizes that agree bit for bit with the first of ``sizes``, as measured on this machine.

    Returns ``(1,)`` if a row's result depends on its position in the tile.

    Args:
        product: maps [rows, ...] to one result per row, for any number of rows.
        sample: random rows; their number is a multiple of every size.
        sizes: candidate sizes, ascending.
    """

    def in_tiles(rows: Tensor, size: int) -> Tensor:
        return torch.cat([product(tile) for tile in torch.split(rows, size)])

    expected = in_tiles(sample, sizes[0])
    head = sample[: 4 * sizes[0]]
    for shift in (1, 3):
        if not torch.equal(in_tiles(head.roll(shift, 0), sizes[0]).roll(-shift, 0), expected[: len(head)]):
            return (1,)
    return tuple(size for size in sizes if torch.equal(in_tiles(sample, size), expected))


@lru_cache(1024)
def cover(n: int, tiles: tuple[int, ...]) -> tuple[int, ...]:
    """Returns tile sizes that add up to ``n`` rows, rounded up to a multiple of the smallest tile.

    It is asked for each product of a step, with one number of rows, so its answers are kept.

    Args:
        n: number of rows.
        tiles: available sizes, ascending, each a multiple of the first.
    """
    chosen = []
    left = -(-n // tiles[0]) * tiles[0]
    for tile in reversed(tiles):
        while left >= tile:
            chosen.append(tile)
            left -= tile
    return tuple(chosen)
