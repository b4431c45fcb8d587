"""Weights -> a place, by numbers that depend on a request's seed alone."""

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
    """Numbers in [0, 1) without end that depend on the arguments alone: SplitMix64, seeded by a mix of ``seed``."""
    state = _mix(_mix(seed) + (index + 1) * _INCREMENT)
    while True:
        yield (state >> 11) * 2.0**-53
        state = _mix(state + _INCREMENT)


def draw_ordered(
    weights: NDArray[np.float32],
    shares: NDArray[np.float64],
    *,
    top_k: NDArray[np.int64],
    min_p: NDArray[np.float32],
    top_p: NDArray[np.float64],
) -> NDArray[np.int64]:
    """Of each row of ``weights``, which fall from 1 on, the place that a share in [0, 1) of their sum falls on.

    ``top_k`` and ``min_p`` leave the first places of a row, ``top_p`` then the fewest that reach that share.

    Args:
        weights: [rows, width].
        shares: [rows], as the settings are.
    """
    cumulative = weights.cumsum(axis=1, dtype=np.float64)

    def n_below(bounds: NDArray[np.float64]) -> NDArray[np.int64]:
        n: NDArray[np.int64] = np.count_nonzero(cumulative < bounds[:, None], axis=1)
        return n

    def total(n: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.take_along_axis(cumulative, n[:, None] - 1, axis=1)[:, 0]

    n = np.minimum(np.count_nonzero(weights >= min_p[:, None], axis=1), top_k)
    n = np.minimum(1 + n_below(top_p * total(n)), n)
    wanted = shares * total(n)
    # Where rounding leaves no place above, it is the last one that adds anything.
    places: NDArray[np.int64] = np.minimum(
        np.count_nonzero(cumulative <= wanted[:, None], axis=1), n_below(total(n))
    )
    return places


def draw(weights: NDArray[np.float32], draws: Iterator[float], *, min_p: float, top_p: float) -> int:
    """The same for weights in any order, of which the largest is 1; they are changed.

    Nothing is sorted. ``top_p`` leaves those for which all heavier ones together do not reach the share, so that
    equal weights are in or out together; a place that turns out to be beyond is drawn again, from the heavier ones.
    A share of p of many even weights takes 1 + ln(1/p) rounds on average, and each reads the weights twice.
    """
    if min_p > 0.0:
        _drop_up_to(weights, np.nextafter(np.float32(min_p), np.float32(0.0)))
    sums = fold(np.add, weights, _BLOCK_SIZE)
    share = top_p * sums.sum(dtype=np.float64)
    while True:
        place = _invert(weights, sums, next(draws))
        if top_p >= 1.0:
            return place
        _drop_up_to(weights, weights[place])
        sums = fold(np.add, weights, _BLOCK_SIZE)
        if sums.sum(dtype=np.float64) < share:
            return place


def _drop_up_to(weights: NDArray[np.float32], bound: np.float32) -> None:
    torch.threshold_(torch.from_numpy(weights), float(bound), 0.0)


def _invert(weights: NDArray[np.float32], sums: NDArray[np.float32], share: float) -> int:
    """The place where the cumulative weight, block after block, exceeds a share of the whole."""
    cumulative = sums.cumsum(dtype=np.float64)
    wanted = share * cumulative[-1]
    block = _first_above(cumulative, wanted)
    inside = weights[block :: len(sums)].cumsum(dtype=np.float64)
    return block + len(sums) * _first_above(inside, wanted - (cumulative[block - 1] if block else 0.0))


def _first_above(cumulative: NDArray[np.float64], wanted: float) -> int:
    """The first place that exceeds ``wanted``; where rounding leaves none, the last one that adds anything."""
    place = int(cumulative.searchsorted(wanted, side="right"))
    return place if place < len(cumulative) else int(cumulative.searchsorted(cumulative[-1]))


def _mix(value: int) -> int:
    """SplitMix64's finaliser: a bijection of 64-bit integers."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
