"""One row of logits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from radixkv.runtime.device.sampling.cpu.logit_edits import Edits

Listed = tuple[NDArray[np.int64], NDArray[np.float32]]
"""Ids of some logits, and these."""

_NOTHING: Listed = (np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32))
_BLOCK_SIZE = 32
_FEW = 8
"""One block in so many, or fewer: then it pays to read only these."""


def fold(reduce: np.ufunc, values: NDArray[np.float32], block_size: int) -> NDArray[np.float32]:
    """Reduces each block of about ``block_size`` to one number.

    Block ``j`` of ``n`` is ``values[j::n]``: the processor then goes through neighbouring blocks at once, many
    times as fast as block by block.
    """
    n_blocks = max(1, len(values) // block_size)
    n_whole = len(values) // n_blocks * n_blocks
    folded: NDArray[np.float32] = reduce.reduce(values[:n_whole].reshape(-1, n_blocks), axis=0)
    rest = values[n_whole:]
    if len(rest):
        reduce(folded[: len(rest)], rest, out=folded[: len(rest)])
    return folded


class LogitRow:
    """Logits, and which of them are large. They are read as seldom as can be, while the cache has them."""

    def __init__(self, values: NDArray[np.float32], n_largest: int) -> None:
        """Looks for the ``n_largest`` or somewhat more, to be listed; 0 for none."""
        self.values = values
        self.bound, (self.ids, self.large) = _find(values, n_largest) if n_largest else (math.inf, _NOTHING)
        """A bound, the ids of all logits that are at least as large, in ascending order, and these."""
        self.best = int(self.ids[self.large.argmax()] if len(self.ids) else values.argmax())
        """The first of the largest; of a NaN if there is one and nothing is listed."""

    @property
    def is_finite(self) -> bool:
        """Whether all logits are."""
        return math.isfinite(self.values[self.best]) and math.isfinite(self.values.min())

    def rank(self, token: int) -> int:
        """1, and one more for each larger logit."""
        return 1 + int(np.count_nonzero(self.values > self.values[token]))

    @contextmanager
    def edited(self, edits: Edits | None) -> Iterator[NDArray[np.float32]]:
        """All logits after ``edits``, in the same memory; at the end they are as before."""
        if edits is None:
            yield self.values
            return
        before = self.values[edits.ids]
        self.values[edits.ids] = edits.apply(before)
        try:
            yield self.values
        finally:
            self.values[edits.ids] = before

    def largest(self, n: int, edits: Edits | None) -> Listed:
        """The ``n`` largest after ``edits`` or all, in any order, and maybe others that are not larger.

        What was listed before stays; what the edits lift over the bound is added. Only if too few are left above it
        are they looked up again.
        """
        if edits is None:
            return self.ids, self.large
        ids = edits.ids
        before = self.values.take(ids)
        after = edits.apply(before)
        was_large, is_large = before >= self.bound, after >= self.bound
        listed = was_large.nonzero()[0]
        if len(self.ids) - len(listed) + np.count_nonzero(is_large) < min(n, len(self.values)):
            with self.edited(edits) as values:
                return _find(values, n)[1]
        large = self.large.copy()
        large[self.ids.searchsorted(ids.take(listed))] = after.take(listed)
        entered = (is_large > was_large).nonzero()[0]
        return np.concatenate((self.ids, ids.take(entered))), np.concatenate((large, after.take(entered)))


def _find(values: NDArray[np.float32], n: int) -> tuple[float, Listed]:
    """A bound, and all that reach it, their ids in ascending order: ``n`` or somewhat more, at most all.

    Where n blocks have a maximum that reaches a bound, at least n values do. So the bound is chosen among the few
    maxima, and all that reach it are in those blocks. Where these are few, only they are read again.
    """
    maxima = fold(np.maximum, values, _BLOCK_SIZE)
    n_blocks, n_values = len(maxima), len(values)
    if n > n_blocks:
        bound = np.sort(values)[-min(n, n_values)]
        blocks = np.arange(n_blocks)
    else:
        bound = np.partition(maxima, n_blocks - n)[n_blocks - n]
        blocks = np.flatnonzero(maxima >= bound)
    if _FEW * len(blocks) > n_blocks:
        ids = np.flatnonzero(values >= bound)
        return float(bound), (ids, values.take(ids))
    ids = (np.arange(0, n_values, n_blocks)[:, None] + blocks).ravel()
    ids = ids[: ids.searchsorted(n_values)]
    some = values.take(ids)
    large = np.flatnonzero(some >= bound)
    return float(bound), (ids.take(large), some.take(large))
