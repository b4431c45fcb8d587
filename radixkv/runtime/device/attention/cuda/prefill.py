"""Prompt rows of a step, and what computes their attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from radixkv.runtime.device.attention.base import longest_window
from radixkv.runtime.device.attention.cuda.base import LayerLaunch
from radixkv.runtime.device.attention.cuda.work_items import Ints, WorkItems


@dataclass(frozen=True)
class PrefillBatch:
    """Prompt rows as ranges of block tables. The tokens of consecutive rows are consecutive.

    If all layers with these tables have windows, rows begin at the first page that they read: kernels load whole
    tiles of positions before they mask them, and other requests may have the pages before. With windows and an
    8-bit KV pool, FlashInfer's FA3 also multiplies a row's first tile of V by 0, so what it holds must be finite.
    """

    firsts: Ints
    """[rows], index of each row's first token in the step."""
    n_tokens: Ints
    """[rows]."""
    lengths: Ints
    """[rows], positions that each row's last token attends to."""
    first_entries: Ints
    """[rows], index of each row's first entry in the flattened block tables."""

    @classmethod
    def of(
        cls,
        batch_slots: Ints,
        starts: Ints,
        n_tokens: Ints,
        windows: Sequence[int | None],
        width: int,
        page_size: int,
    ) -> PrefillBatch:
        """Returns the rows of a step.

        Args:
            batch_slots: [rows].
            starts: [rows], position of each row's first token.
            n_tokens: [rows].
            windows: of all layers that read these block tables.
            width: entries per block table.
            page_size: tokens per page.
        """
        firsts = np.cumsum(n_tokens, dtype=np.int32) - n_tokens
        n_behind = pages_behind(starts, longest_window(windows), page_size)
        lengths = starts + n_tokens - n_behind * np.int32(page_size)
        return cls(firsts, n_tokens, lengths, batch_slots * np.int32(width) + n_behind)


PrefillLaunches = Mapping[int | None, LayerLaunch]
"""What enqueues attention of the planned rows in a layer, by the layer's window."""


class PrefillAttention(Protocol):
    """Attention of prompt rows by one kernel, chosen when the engine starts."""

    def connect(self, tables: Tensor) -> None:
        """Binds the block tables, [max_rows + 1, width] int32 at a fixed address, and loads the kernels."""
        ...

    def plan(self, rows: PrefillBatch) -> PrefillLaunches:
        """Plans the rows, and sends the plan on the current stream without waiting."""
        ...


def pages_behind(starts: Ints, window: int | None, page_size: int) -> Ints:
    """Returns how many pages of each row lie behind the window of its first token: [rows], 0 without a window.

    Args:
        starts: [rows], position of each row's first token.
        window: positions that a token attends to, its own included; None for all.
        page_size: tokens per page.
    """
    if window is None:
        return np.zeros_like(starts)
    n_behind: Ints = np.maximum(starts + np.int32(1 - window), 0) // np.int32(page_size)
    return n_behind


def causal_tiles(rows: PrefillBatch, tile: int) -> WorkItems:
    """Splits prompt rows into items of ``tile`` queries, the longest first.

    An item's queries are the last positions that it reads.

    Args:
        rows: the prompt rows.
        tile: queries per item.
    """
    n_tiles = -(-rows.n_tokens // tile)
    row = np.repeat(np.arange(len(n_tiles)), n_tiles)
    begins = (np.arange(len(row)) - np.repeat(np.cumsum(n_tiles) - n_tiles, n_tiles)) * tile
    n_queries = np.minimum(rows.n_tokens[row] - begins, tile)
    ends = rows.lengths[row] - rows.n_tokens[row] + begins + n_queries
    order = np.argsort(-ends, kind="stable")
    limits = ends - n_queries + 1
    columns = (rows.firsts[row] + begins, n_queries, rows.first_entries[row], np.zeros_like(ends), ends, limits)
    return WorkItems(np.array(columns, np.int32)[:, order])
