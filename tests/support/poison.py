"""Pages of a device's KV pool filled with NaN, so that reads of positions that nobody wrote show up."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

from torch import Tensor


class Pool(Protocol):
    """K and V of each layer, [pages + 1, ...]; the last page stays zero."""

    layers: list[tuple[Tensor, Tensor]]
    n_pages: int


def poison(pool: Pool, pages: Iterable[int]) -> None:
    """Fills pages with NaN in all layers."""
    for page in pages:
        if not 0 <= page < pool.n_pages:
            raise IndexError(f"page {page} is not between 0 and {pool.n_pages - 1}")
        for values in pool.layers:
            for one in values:
                one[page] = math.nan
