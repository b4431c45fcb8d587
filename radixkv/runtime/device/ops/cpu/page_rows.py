"""The memory of a layer's pages as rows, whatever lies between the pages."""

from __future__ import annotations

from torch import Tensor


def rows_of(layer: Tensor, size: int) -> Tensor:
    """Returns K or V of a layer, and what lies between its pages, as rows of ``size`` values, [rows, size].

    Args:
        layer: [pages, kv_heads, page_size, head_dim], whose pages are contiguous, but may not follow each other.
        size: divides a page of one head, and the distance of two pages.
    """
    if layer.is_contiguous():  # much the fastest, and how pools of one kind of layer are
        return layer.view(-1, size)
    n_values = (len(layer) - 1) * layer.stride(0) + layer[0].numel()
    return layer.as_strided((n_values // size, size), (size, 1))
