"""Prompt rows: tiles of queries; and on Hopper (FA3) which multiprocessor computes which tile of which head."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from radixkv.runtime.device.attention.cuda.work_items import Ints, Items


def tile_queries(head_dim: int) -> int:
    """Queries a tile."""
    return 192 if head_dim == 64 else 128


@dataclass(frozen=True)
class TileSchedule:
    """What the kernel reads, in one array.

    FlashInfer's own planner gives the same; here it needs no pinned buffer of its own and no loop over heads in
    Python. Cost: about 8 µs for every ``n_processors`` tiles.
    """

    numbers: Ints
    plan: list[int]
    """Byte offsets of the kernel's arrays in ``numbers``, in FlashInfer's order, and whether all heads have one
    schedule (never)."""

    @classmethod
    def of(
        cls,
        firsts: Ints,
        n_tokens: Ints,
        lengths: Ints,
        first_entries: Ints,
        *,
        n_heads: int,
        tile: int,
        n_processors: int,
    ) -> TileSchedule:
        """The longest tiles of every ``n_processors`` go to whoever has least to do so far.

        Args:
            firsts: [rows], each row's first query.
            n_tokens: [rows].
            lengths: [rows], positions that its last token reads.
            first_entries: [rows], where its pages begin in the block tables, seen flat.
            tile: queries a tile.
        """
        order = np.argsort(-lengths, kind="stable")
        n_tiles = -(-n_tokens[order] // tile)
        rows = np.repeat(order, n_tiles)
        tiles = np.repeat(np.cumsum(n_tiles), n_tiles) - np.arange(len(rows)) - 1  # a row's last and longest first
        reads = np.minimum(lengths[rows] - n_tokens[rows] + (tiles + 1) * tile, lengths[rows])
        rows, tiles, costs = np.tile(rows, n_heads), np.tile(tiles, n_heads), np.tile(reads + 2 * tile, n_heads)
        heads = np.repeat(np.arange(n_heads), len(reads))
        owners = balanced(costs, n_processors)
        work = np.argsort(owners, kind="stable")
        rows = rows[work]
        ends = np.cumsum(np.bincount(owners, minlength=n_processors))
        arrays = [
            tiles[work],
            firsts[rows],
            first_entries[rows],
            n_tokens[rows],
            lengths[rows],
            heads[work],
            np.concatenate([[0], ends]),
            rows,
        ]
        starts = np.concatenate([[0], np.cumsum([-(-len(array) // 4) * 4 for array in arrays])])
        numbers = np.zeros(starts[-1], dtype=np.int32)
        for start, array in zip(starts, arrays, strict=False):
            numbers[start : start + len(array)] = array
        return cls(numbers, [4 * int(start) for start in starts[:-1]] + [0])


def balanced(costs: NDArray[np.int64], n_processors: int) -> NDArray[np.int64]:
    """[tiles]: who computes each."""
    owners = np.empty(len(costs), dtype=np.int64)
    loads = np.zeros(n_processors, dtype=np.int64)
    for first in range(0, len(costs), n_processors):
        some = first + np.argsort(-costs[first : first + n_processors], kind="stable")
        idlest = np.argsort(loads, kind="stable")[: len(some)]
        owners[some] = idlest
        loads[idlest] += costs[some]
    return owners


def causal_tiles(firsts: Ints, n_tokens: Ints, lengths: Ints, first_entries: Ints, *, tile: int) -> Items:
    """Items of ``tile`` queries, each of which is the last positions of what it reads; the longest first.

    Args:
        firsts, n_tokens, lengths, first_entries: as in ``TileSchedule.of``.
    """
    n_tiles = -(-n_tokens // tile)
    rows = np.repeat(np.arange(len(n_tokens)), n_tiles)
    begins = (np.arange(len(rows)) - np.repeat(np.cumsum(n_tiles) - n_tiles, n_tiles)) * tile
    n_queries = np.minimum(n_tokens[rows] - begins, tile)
    ends = lengths[rows] - n_tokens[rows] + begins + n_queries
    order = np.argsort(-ends, kind="stable")
    columns = (firsts[rows] + begins, n_queries, first_entries[rows], np.zeros_like(ends), ends)
    return Items(*(column[order].astype(np.int32) for column in columns))
