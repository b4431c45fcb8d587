"""Attention on the CPU, as the executor uses it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from radixkv.runtime.device.attention.base import LayerAttention


@dataclass(frozen=True)
class RowSpan:
    """The tokens of one row within a step."""

    first_token: int
    """Index of the row's first token among the step's tokens."""
    n_tokens: int
    start: int
    """Position of the row's first token in its sequence."""
    pages: NDArray[np.int32]
    """Pages of positions ``0 .. start + n_tokens - 1``."""

    @property
    def length(self) -> int:
        """Number of positions that the row's last token reads, its own included."""
        return self.start + self.n_tokens


class LayerPages(Protocol):
    """The KV pool, as attention uses it."""

    @property
    def layers(self) -> Sequence[tuple[Tensor, Tensor]]:
        """K and V of each layer, [pages, kv_heads, page_size, head_dim]; the last page stays zero."""
        ...


class Attention(LayerAttention, Protocol):
    """Causal attention over the paged KV pool."""

    def plan(self, spans: Sequence[RowSpan], window_spans: Sequence[RowSpan] | None = None) -> None:
        """Prepares everything of a step's rows that does not depend on the layer.

        Args:
            spans: the rows.
            window_spans: the rows with the pages of layers with windows; None: all layers are in the same pages.
        """
        ...
