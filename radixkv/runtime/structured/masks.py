"""Fills the token masks of a launched step, once the host knows all tokens before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from radixkv.runtime.request import Phase, Request
from radixkv.runtime.step.plan import Row
from radixkv.runtime.step.result import TokenMasks
from radixkv.runtime.structured.grammars import Grammars

if TYPE_CHECKING:
    from radixkv.runtime.structured.matcher import Matcher

_WORD_BITS = 32


def fill_masks(rows_of: Sequence[tuple[Row, Request]], grammars: Grammars, vocab_size: int) -> TokenMasks | None:
    """Returns the masks of a step's masked rows; None if no row needs one any more.

    A row whose request has ended or failed since the launch needs none: its result is dropped. End tokens that
    ``min_tokens`` bans are taken out of a mask, unless nothing else would remain.

    O(masked rows · vocab / 32), and what the grammars take.

    Args:
        rows_of: the rows of the newest launched step, each with its request; the results of all earlier steps were
            taken.
        grammars: they made the matchers of the requests.
        vocab_size: token ids are below it.
    """
    masked: list[tuple[int, Request]] = []
    position = 0
    for row, request in rows_of:
        is_dropped = request.phase is Phase.FINISHED or request.recovery.discards_results
        if row.sampling is not None and row.sampling.is_masked and not is_dropped:
            assert row.sampling.index == request.n_outputs, "the tokens before a mask are known"
            masked.append((position, request))
        position += 1 + row.n_drafts
    if not masked:
        return None
    bits = np.empty((len(masked), -(-vocab_size // _WORD_BITS)), dtype=np.int32)
    matchers = [cast("Matcher", request.constraint) for _, request in masked]  # grammars alone constrain
    grammars.fill_masks(matchers, bits)
    for (_, request), row_bits in zip(masked, bits, strict=True):
        if request.n_outputs < request.min_tokens:
            _ban(row_bits, request.sampling.banned)
    return TokenMasks(tuple(position for position, _ in masked), bits)


def _ban(bits: NDArray[np.int32], tokens: tuple[int, ...]) -> None:
    """Clears the bits of tokens, unless no other is set."""
    cleared = bits.view(np.uint32).copy()
    for token in tokens:
        cleared[token // _WORD_BITS] &= np.uint32(~(1 << token % _WORD_BITS) & 0xFFFFFFFF)
    if cleared.any():
        bits[:] = cleared.view(np.int32)
