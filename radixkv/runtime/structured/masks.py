"""Fills the token masks of a launched step, once the host knows all tokens before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from radixkv.runtime.request import Phase, Request
from radixkv.runtime.step.plan import Row
from radixkv.runtime.step.result import TokenMasks
from radixkv.runtime.structured.grammars import Grammars

if TYPE_CHECKING:
    from radixkv.runtime.structured.matcher import Matcher

_WORD_BITS = 32


class _MaskedRow(NamedTuple):
    """A row whose tokens a matcher constrains."""

    position: int
    """Its first sampled position in the plan."""
    request: Request
    matcher: Matcher
    drafts: memoryview
    """Token ids."""

    def follow(self, n_followed: int, mask: NDArray[np.int32]) -> bool:
        """Appends the row's next draft to the answer; returns whether the token after it needs a mask.

        It needs none if there is no other draft, if the draft ends the answer, or if the mask forbids it: then
        another token is sampled in its place, and what is sampled behind it counts for nothing.

        Args:
            n_followed: drafts that were appended before.
            mask: of the tokens that may come next.
        """
        if n_followed == len(self.drafts):
            return False
        draft = self.drafts[n_followed]
        is_allowed = bool(mask[draft // _WORD_BITS] >> draft % _WORD_BITS & 1)
        return is_allowed and self.matcher.accept(draft) and not self.matcher.has_ended


def fill_masks(rows_of: Sequence[tuple[Row, Request]], grammars: Grammars, vocab_size: int) -> TokenMasks | None:
    """Returns the masks of a step's masked rows; None if no row needs one any more.

    A row with drafts gets a mask for each sampled position that can count: its first one, and those behind drafts
    that the grammar allows. A row whose request has ended or failed since the launch needs none: its result is
    dropped. End tokens that ``min_tokens`` bans are taken out of a mask, unless nothing else would remain.

    O(masks · vocab / 32), and what the grammars take.

    Args:
        rows_of: the rows of the newest launched step, each with its request; the results of all earlier steps were
            taken.
        grammars: they made the matchers of the requests, which are as before when this returns.
        vocab_size: token ids are below it.
    """
    masked: list[_MaskedRow] = []
    n_most, position = 0, 0
    for planned, request in rows_of:
        is_dropped = request.phase is Phase.FINISHED or request.recovery.discards_results
        sampling = planned.sampling
        if sampling is not None and sampling.is_masked and not is_dropped:
            matcher = cast("Matcher", request.constraint)  # grammars alone constrain
            assert sampling.index == request.n_outputs == matcher.n_tokens, "the tokens before a mask are known"
            tokens = memoryview(planned.tokens or b"").cast("i")
            masked.append(_MaskedRow(position, request, matcher, tokens[len(tokens) - planned.n_drafts :]))
            n_most += 1 + planned.n_drafts
        position += 1 + planned.n_drafts
    if not masked:
        return None
    bits = np.empty((n_most, -(-vocab_size // _WORD_BITS)), dtype=np.int32)
    positions: list[int] = []
    n_followed, rows = 0, masked
    while rows:
        masks = bits[len(positions) : len(positions) + len(rows)]
        grammars.fill_masks([row.matcher for row in rows], masks)
        following: list[_MaskedRow] = []
        for row, mask in zip(rows, masks, strict=True):
            if row.request.n_outputs + n_followed < row.request.min_tokens:
                _ban(mask, row.request.sampling.banned)
            positions.append(row.position + n_followed)
            if row.follow(n_followed, mask):
                following.append(row)
        rows = following
        n_followed += 1
    for row in masked:
        row.matcher.truncate(row.request.n_outputs)
    return TokenMasks(tuple(positions), bits[: len(positions)])


def _ban(bits: NDArray[np.int32], tokens: tuple[int, ...]) -> None:
    """Clears the bits of tokens, unless no other is set."""
    cleared = bits.view(np.uint32).copy()
    for token in tokens:
        cleared[token // _WORD_BITS] &= np.uint32(~(1 << token % _WORD_BITS) & 0xFFFFFFFF)
    if cleared.any():
        bits[:] = cleared.view(np.int32)
