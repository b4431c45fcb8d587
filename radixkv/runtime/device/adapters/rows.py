"""Which rows of a step's activations belong to which adapter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from radixkv.runtime.step.plan import Row

_CHUNK_ROWS = 256
"""Rows that an MLP computes at once, few enough to keep what is between its products in the processor's cache."""


@dataclass(frozen=True)
class AdapterRows:
    """Some consecutive rows of activations, and those among them that adapters change."""

    first: int
    """Index of the first one among the rows of the step."""
    n_rows: int
    indices: dict[str, Tensor] = field(default_factory=dict)
    """By digest of an adapter: [n] int64, ascending indices of its rows, from 0. Adapters without a row are left
    out."""

    @property
    def last(self) -> int:
        """Index of the row after the last one among the rows of the step."""
        return self.first + self.n_rows

    def part(self, first: int, last: int) -> AdapterRows:
        """Returns the rows ``first`` to ``last``, without the latter."""
        parts = {name: rows[(rows >= first) & (rows < last)] - first for name, rows in self.indices.items()}
        return AdapterRows(
            self.first + first, last - first, {name: rows for name, rows in parts.items() if len(rows)}
        )


class StepRows:
    """The rows of the step that is computed, which all layers with adapters read."""

    def __init__(self) -> None:
        self.whole = AdapterRows(0, 0)
        """All rows of the step."""
        self.chunks: Sequence[AdapterRows] = ()
        """The same rows in parts that an MLP computes at once."""

    def plan(self, rows: Iterable[Row]) -> None:
        """Takes the rows of a step's plan, each of which has a row of activations for each of its tokens.

        O(rows + tokens with adapters).
        """
        spans: dict[str, list[Tensor]] = {}
        n_tokens = 0
        for row in rows:
            if row.adapter:
                first = n_tokens + max(0, row.adapter_start - row.start)
                spans.setdefault(row.adapter, []).append(torch.arange(first, n_tokens + row.n_tokens))
            n_tokens += row.n_tokens
        self.whole = AdapterRows(0, n_tokens, {name: torch.cat(parts) for name, parts in spans.items()})
        self.chunks = [
            self.whole.part(first, min(first + _CHUNK_ROWS, n_tokens)) for first in range(0, n_tokens, _CHUNK_ROWS)
        ]
