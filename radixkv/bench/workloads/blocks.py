"""Deterministic content for the blocks of a trace's prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Blocks:
    """Generates the content of blocks as symbols below ``n_symbols``; each symbol becomes a token or a word.

    A block begins with the digits of its id to the base ``n_symbols``, last digit first, followed by pseudo-random
    symbols. So different blocks always differ. Blocks whose ids differ modulo ``n_symbols`` differ from the first
    symbol on; others have at most ``n_digits - 1`` leading symbols in common.
    """

    block_len: int
    """Symbols in a block; at least ``n_digits``, or blocks cannot be told apart."""
    n_symbols: int
    n_digits: int
    """Digits of every id to the base ``n_symbols``."""

    @staticmethod
    def digits(max_id: int, n_symbols: int) -> int:
        """Returns the number of digits of ids up to ``max_id`` to the base ``n_symbols``."""
        count = 1
        while n_symbols**count <= max_id:
            count += 1
        return count

    def symbols(self, ids: Sequence[int], length: int) -> npt.NDArray[np.int64]:
        """Returns the first ``length`` symbols of the concatenated blocks: int64 ``[length]``.

        Cost: about 30 ns a symbol.
        """
        block_ids = np.asarray(ids, np.uint64)
        symbols = _mix(_mix(block_ids)[:, None] + np.arange(self.block_len).astype(np.uint64))
        symbols = (symbols >> np.uint64(32)) * np.uint64(self.n_symbols) >> np.uint64(32)
        for digit in range(self.n_digits):
            symbols[:, digit] = block_ids // np.uint64(self.n_symbols**digit) % np.uint64(self.n_symbols)
        return symbols.reshape(-1)[:length].astype(np.int64)


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Returns SplitMix64 of each value, a hash that depends on all its bits."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
