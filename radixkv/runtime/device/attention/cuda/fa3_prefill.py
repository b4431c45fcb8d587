"""The schedule of prompt attention's tiles onto multiprocessors, for FlashInfer's FA3 kernel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from radixkv.runtime.device.attention.cuda.work_items import Ints


def tile_queries(head_dim: int) -> int:
    """Returns the queries per tile of the FA3 kernel."""
    return 192 if head_dim == 64 else 128


@dataclass(frozen=True)
class Fa3Schedule:
    """The FA3 kernel's schedule of prompt rows, in one array.

    FlashInfer's own planner computes the same. This one needs no pinned buffer and no Python loop over heads. Cost:
    about 8 µs for every ``n_processors`` tiles.
    """

    values: Ints
    plan: list[int]
    """Byte offsets of the kernel's arrays in ``values``, in FlashInfer's order, then whether all heads share one
    schedule (never)."""

    @classmethod
    def build(
        cls,
        firsts: Ints,
        n_tokens: Ints,
        lengths: Ints,
        first_entries: Ints,
        *,
        n_heads: int,
        tile: int,
        n_processors: int,
    ) -> Fa3Schedule:
        """Assigns each group of ``n_processors`` tiles, longest first, to the least loaded multiprocessors.

        Args:
            firsts: [rows], index of each row's first query.
            n_tokens: [rows].
            lengths: [rows], positions that each row's last token attends to.
            first_entries: [rows], index of each row's first entry in the flattened block tables.
            n_heads: query heads.
            tile: queries per tile.
            n_processors: multiprocessors.
        """
        order = np.argsort(-lengths, kind="stable")
        n_tiles = -(-n_tokens[order] // tile)
        rows = np.repeat(order, n_tiles)
        tiles = np.repeat(np.cumsum(n_tiles), n_tiles) - np.arange(len(rows)) - 1  # a row's last and longest first
        reads = np.minimum(lengths[rows] - n_tokens[rows] + (tiles + 1) * tile, lengths[rows])
        rows, tiles, costs = np.tile(rows, n_heads), np.tile(tiles, n_heads), np.tile(reads + 2 * tile, n_heads)
        heads = np.repeat(np.arange(n_heads), len(reads))
        owners = balance_tiles(costs, n_processors)
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
        values = np.zeros(starts[-1], dtype=np.int32)
        for start, array in zip(starts, arrays, strict=False):
            values[start : start + len(array)] = array
        return cls(values, [4 * int(start) for start in starts[:-1]] + [0])


def balance_tiles(costs: NDArray[np.int64], n_processors: int) -> NDArray[np.int64]:
    """Assigns tiles to multiprocessors by load. Returns [tiles]: the multiprocessor of each tile."""
    owners = np.empty(len(costs), dtype=np.int64)
    loads = np.zeros(n_processors, dtype=np.int64)
    for first in range(0, len(costs), n_processors):
        group = first + np.argsort(-costs[first : first + n_processors], kind="stable")
        least_loaded = np.argsort(loads, kind="stable")[: len(group)]
        owners[group] = least_loaded
        loads[least_loaded] += costs[group]
    return owners
