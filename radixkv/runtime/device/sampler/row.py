"""One row of logits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from radixkv.runtime.device.sampler.edits import Edits

Found = tuple[np.float32, NDArray[np.int64]]
"""A bound, and the ids of all logits that are at least as large, in ascending order."""

_BLOCK_SIZE = 64
_NOTHING: Found = (np.float32(np.inf), np.empty(0, dtype=np.int64))


def fold(reduce: np.ufunc, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Reduces each block to one number. Block ``j`` of ``n`` is ``values[j::n]``: the processor then goes through
    neighbouring blocks at once, many times as fast as block by block."""
    n_blocks = max(1, len(values) // _BLOCK_SIZE)
    n_whole = len(values) // n_blocks * n_blocks
    folded: NDArray[np.float32] = reduce.reduce(values[:n_whole].reshape(-1, n_blocks), axis=0)
    rest = values[n_whole:]
    reduce(folded[: len(rest)], rest, out=folded[: len(rest)])
    return folded


class LogitRow:
    """Logits, and which of them are large. They are read as seldom as can be, while the cache has them."""

    def __init__(self, values: NDArray[np.float32], found: Found) -> None:
        self.values = values
        self._bound, self._found = found
        self.best = int(self._found[values[self._found].argmax()]) if len(self._found) else int(values.argmax())
        """The first of the largest; of a NaN if there is one and nothing was found."""

    @classmethod
    def read(cls, values: NDArray[np.float32], n_largest: int) -> LogitRow:
        """Looks at once for as many as ``largest`` will be asked for; 0 for none."""
        return cls(values, _find(values, n_largest) if n_largest else _NOTHING)

    @property
    def is_finite(self) -> bool:
        """Whether all logits are."""
        return math.isfinite(self.values[self.best]) and math.isfinite(self.values.min())

    def largest(self, n: int) -> NDArray[np.int64]:
        """Ids of the ``n`` largest or of all, largest first; of equals the smaller id first."""
        if len(self._found) < min(n, len(self.values)):
            self._bound, self._found = _find(self.values, n)
        order = np.argsort(-self.values[self._found], kind="stable")
        return self._found[order[:n]]

    def rank(self, token: int) -> int:
        """1, and one more for each larger logit."""
        value = self.values[token]
        others = self.values[self._found] if value >= self._bound else self.values
        return 1 + int(np.count_nonzero(others > value))

    @contextmanager
    def edited(self, edits: Edits) -> Iterator[LogitRow]:
        """The row after ``edits``, in the same memory; at the end it is as before."""
        ids, values = edits.ids, self.values
        before = values[ids]
        values[ids] = after = edits.apply(before)
        try:
            stayed = self._found[values[self._found] >= self._bound]
            entered = ids[(before < self._bound) & (after >= self._bound)]
            yield LogitRow(values, (self._bound, np.sort(np.concatenate((stayed, entered)))))
        finally:
            values[ids] = before


def _find(values: NDArray[np.float32], n: int) -> Found:
    """A bound, and all that reach it: ``n`` or somewhat more, at most all.

    Where n blocks have a maximum that reaches a bound, at least n values do. So the bound is chosen among the few
    maxima, and one comparison with all values finds what reaches it, in order.
    """
    maxima = fold(np.maximum, values)
    bound = np.sort(maxima if n <= len(maxima) else values)[-min(n, len(values))]
    return bound, np.flatnonzero(values >= bound)
