"""Random draws from token weights, reproducible from a request's seed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.runtime.device.sampling.cpu.logit_row import fold

_MASK = (1 << 64) - 1
_INCREMENT = 0x9E3779B97F4A7C15
_BLOCK_SIZE = 64


def uniforms(seed: int, index: int) -> Iterator[float]:
    """Yields endless uniform random values in [0, 1) that depend on the arguments alone.

    The generator is SplitMix64, seeded with a hash of ``seed`` and ``index``.
    """
    state = _mix(_mix(seed) + (index + 1) * _INCREMENT)
    while True:
        yield (state >> 11) * 2.0**-53
        state = _mix(state + _INCREMENT)


def draw_ordered(
    weights: NDArray[np.float32],
    uniform: NDArray[np.float64],
    *,
    top_k: NDArray[np.int64],
    min_p: NDArray[np.float32],
    top_p: NDArray[np.float64],
) -> NDArray[np.int64]:
    """Draws one column of each row of sorted weights.

    ``top_k`` and ``min_p`` keep the first columns of a row. Of these, ``top_p`` keeps the fewest whose sum reaches
    that share.

    Args:
        weights: [rows, width], each row descending from 1.
        uniform: [rows], random values in [0, 1) that select the column by inverse cumulative weight.
        top_k: [rows].
        min_p: [rows].
        top_p: [rows].

    Returns:
        [rows], column indices.
    """
    cumulative = weights.cumsum(axis=1, dtype=np.float64)

    def n_below(bounds: NDArray[np.float64]) -> NDArray[np.int64]:
        n: NDArray[np.int64] = np.count_nonzero(cumulative < bounds[:, None], axis=1)
        return n

    def total(n: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.take_along_axis(cumulative, n[:, None] - 1, axis=1)[:, 0]

    n = np.minimum(np.count_nonzero(weights >= min_p[:, None], axis=1), top_k)
    n = np.minimum(1 + n_below(top_p * total(n)), n)
    target = uniform * total(n)
    # If rounding leaves no column above the target, take the last one that adds weight.
    columns: NDArray[np.int64] = np.minimum(
        np.count_nonzero(cumulative <= target[:, None], axis=1), n_below(total(n))
    )
    return columns


def draw(weights: NDArray[np.float32], draws: Iterator[float], *, min_p: float, top_p: float) -> int:
    """Draws an index from unsorted weights, without sorting them.

    ``top_p`` keeps a weight if the sum of all larger ones does not reach the share, so equal weights are kept or
    dropped together. It works by rejection: if the drawn index is outside, the draw is repeated among the larger
    weights. For many equal-sized weights and a share p this takes 1 + ln(1/p) rounds on average; each round reads
    the weights twice.

    Args:
        weights: [vocab], the largest is 1; overwritten.
        draws: uniform random values in [0, 1), one per round.
        min_p: minimum weight to keep.
        top_p: share of the total weight to keep.
    """
    if min_p > 0.0:
        _zero_up_to(weights, np.nextafter(np.float32(min_p), np.float32(0.0)))
    sums = fold(np.add, weights, _BLOCK_SIZE)
    share = top_p * sums.sum(dtype=np.float64)
    while True:
        index = _invert(weights, sums, next(draws))
        if top_p >= 1.0:
            return index
        _zero_up_to(weights, weights[index])
        sums = fold(np.add, weights, _BLOCK_SIZE)
        if sums.sum(dtype=np.float64) < share:
            return index


def _zero_up_to(weights: NDArray[np.float32], bound: np.float32) -> None:
    torch.threshold_(torch.from_numpy(weights), float(bound), 0.0)


def _invert(weights: NDArray[np.float32], sums: NDArray[np.float32], uniform: float) -> int:
    """Returns the index where the cumulative weight exceeds ``uniform`` times the total.

    Weights are accumulated block by block, in the interleaved blocks of ``fold``.

    Args:
        weights: [vocab].
        sums: [blocks], sum of each block.
        uniform: value in [0, 1).
    """
    cumulative = sums.cumsum(dtype=np.float64)
    target = uniform * cumulative[-1]
    block = _first_above(cumulative, target)
    inside = weights[block :: len(sums)].cumsum(dtype=np.float64)
    return block + len(sums) * _first_above(inside, target - (cumulative[block - 1] if block else 0.0))


def _first_above(cumulative: NDArray[np.float64], target: float) -> int:
    """Returns the first index above ``target``; if rounding leaves none, the last index that adds weight."""
    index = int(cumulative.searchsorted(target, side="right"))
    return index if index < len(cumulative) else int(cumulative.searchsorted(cumulative[-1]))


def _mix(value: int) -> int:
    """The finaliser of SplitMix64, a bijection of 64-bit integers."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
