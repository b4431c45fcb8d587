"""Prompts of given blocks: a block's id decides its content."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Blocks:
    """What stands in the blocks of prompts: numbers below ``n_symbols``, which a prompt's form gives a meaning.

    A block begins with the digits of its id, the last digit first; pseudo-random numbers follow. So two blocks are
    never the same, and those whose ids differ modulo ``n_symbols`` differ from the first number on; other pairs
    have at most ``n_digits - 1`` first numbers in common.
    """

    block_len: int
    """Numbers a block; at least ``n_digits``, or blocks cannot be told apart."""
    n_symbols: int
    n_digits: int
    """Of every id, to the base ``n_symbols``."""

    @staticmethod
    def digits(greatest_id: int, n_symbols: int) -> int:
        """How many digits ids up to the greatest have."""
        count = 1
        while n_symbols**count <= greatest_id:
            count += 1
        return count

    def symbols(self, ids: Sequence[int], length: int) -> npt.NDArray[np.int64]:
        """The first ``length`` numbers of these blocks, one behind the other: int64 ``[length]``.

        Cost: some 30 ns a number.
        """
        given = np.asarray(ids, np.uint64)
        symbols = _mixed(_mixed(given)[:, None] + np.arange(self.block_len).astype(np.uint64))
        symbols = (symbols >> np.uint64(32)) * np.uint64(self.n_symbols) >> np.uint64(32)
        for place in range(self.n_digits):
            symbols[:, place] = given // np.uint64(self.n_symbols**place) % np.uint64(self.n_symbols)
        return symbols.reshape(-1)[:length].astype(np.int64)


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64 of each: its bits spread over all 64."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
