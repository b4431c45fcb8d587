"""Attention of a planned step, as the decoder calls it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


def longest_window(windows: Sequence[int | None]) -> int | None:
    """Returns the most positions that a token attends to in any layer; None if a layer has no window.

    Args:
        windows: by layer, how many positions a token attends to, its own included; None for all.
    """
    finite = [window for window in windows if window is not None]
    return max(finite) if len(finite) == len(windows) else None


class LayerAttention(Protocol):
    """Attention of a planned step."""

    def run(self, layer: int, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
        """Computes one layer: each token attends to its sequence up to itself.

        A layer with a sliding window reads only the positions within the window. K and V of the step must be stored
        in the pool.

        Args:
            layer: index of the layer.
            q: [tokens, heads, head_dim], rotated.
            k_cache, v_cache: of the layer, in the layout of the device's pool.
            out: [tokens, heads, head_dim], the output.
        """
        ...
