"""One row of logits with its largest entries."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from radixkv.runtime.device.sampling.cpu.logit_edits import LogitEdits

Candidates = tuple[NDArray[np.int64], NDArray[np.float32]]
"""Token ids and their logits, [n] each."""

_NO_CANDIDATES: Candidates = (np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32))
_BLOCK_SIZE = 32
_FEW = 8
"""If at most one block in 8 contains a candidate, reading only those blocks is faster."""


def fold(reduce: np.ufunc, values: NDArray[np.float32], block_size: int) -> NDArray[np.float32]:
    """Reduces each block of about ``block_size`` values to one value.

    Block ``j`` of ``n`` is ``values[j::n]``. With this interleaving the processor reduces neighbouring blocks at
    once, many times faster than contiguous blocks.
    """
    n_blocks = max(1, len(values) // block_size)
    n_whole = len(values) // n_blocks * n_blocks
    folded: NDArray[np.float32] = reduce.reduce(values[:n_whole].reshape(-1, n_blocks), axis=0)
    rest = values[n_whole:]
    if len(rest):
        reduce(folded[: len(rest)], rest, out=folded[: len(rest)])
    return folded


class LogitRow:
    """A row of logits and its largest entries, found in few passes while the row is in the processor's cache."""

    def __init__(self, values: NDArray[np.float32], n_largest: int) -> None:
        """Finds the ``n_largest`` logits or somewhat more; 0 finds none."""
        self.values = values
        self.bound, (self.ids, self.large) = _find(values, n_largest) if n_largest else (math.inf, _NO_CANDIDATES)
        """Lower bound of the candidates; ``ids`` (ascending) and ``large`` are all logits that reach it."""
        self.best = int(self.ids[self.large.argmax()] if len(self.ids) else values.argmax())
        """First id of the largest logit; without candidates, the id of a NaN if there is one."""

    @property
    def is_finite(self) -> bool:
        """Whether all logits are finite."""
        return math.isfinite(self.values[self.best]) and math.isfinite(self.values.min())

    def rank(self, token: int) -> int:
        """Returns the token's rank: 1 plus the number of larger logits."""
        return 1 + int(np.count_nonzero(self.values > self.values[token]))

    @contextmanager
    def edited(self, edits: LogitEdits | None) -> Iterator[NDArray[np.float32]]:
        """Applies ``edits`` to the logits in place and restores them at the end of the ``with`` block."""
        if edits is None:
            yield self.values
            return
        before = self.values[edits.ids]
        self.values[edits.ids] = edits.apply(before)
        try:
            yield self.values
        finally:
            self.values[edits.ids] = before

    def largest(self, n: int, edits: LogitEdits | None) -> Candidates:
        """Returns the ``n`` largest logits after ``edits``, in any order, possibly with some smaller ones.

        Candidates found before are updated, and tokens that the edits lift over the bound are added. The row is
        searched again only if fewer than ``n`` remain above the bound.
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


def _find(values: NDArray[np.float32], n: int) -> tuple[float, Candidates]:
    """Returns a bound and all values that reach it, ids ascending: ``n`` or somewhat more, at most all.

    If n blocks have a maximum that reaches a bound, at least n values reach it. So the bound is chosen among the
    block maxima, and all values that reach it are in those blocks. If these are few, only they are read again.
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
    block_values = values.take(ids)
    large = np.flatnonzero(block_values >= bound)
    return float(bound), (ids.take(large), block_values.take(large))
