"""Token masks of lists of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from radixkv.runtime.step.result import TokenMasks


def masks_of(allowed: Sequence[Iterable[int] | None], vocab_size: int) -> TokenMasks:
    """Returns the masks of rows; None for a row without one."""
    rows = [row for row, tokens in enumerate(allowed) if tokens is not None]
    flags = np.zeros((len(rows), -(-vocab_size // 32) * 32), dtype=np.uint8)
    for index, row in enumerate(rows):
        flags[index, list(allowed[row] or ())] = 1
    return TokenMasks(tuple(rows), np.packbits(flags, axis=1, bitorder="little").view(np.int32))
