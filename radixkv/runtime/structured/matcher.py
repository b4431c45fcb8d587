"""Follows the tokens of answers through grammars, and says which tokens may come next."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xgrammar
from numpy.typing import NDArray


class Grammar:
    """A compiled grammar, which any number of answers may follow."""

    def __init__(self, compiled: xgrammar.CompiledGrammar) -> None:
        self._compiled = compiled
        self.n_bytes: int = compiled.memory_size_bytes
        """Memory that it takes, about."""

    def new_matcher(self) -> Matcher:
        """Returns a matcher of an answer without tokens. Costs less than a millisecond."""
        return Matcher(xgrammar.GrammarMatcher(self._compiled))


class Matcher:
    """One answer's way through its grammar."""

    def __init__(self, matcher: xgrammar.GrammarMatcher) -> None:
        self.xgrammar_matcher = matcher
        """For ``MaskFiller``."""

    def accept(self, token_id: int) -> bool:
        """Appends a token to the answer; returns False, and does nothing, if the grammar rejects it.

        A token that ends the answer is accepted where the answer is complete.
        """
        return not self.has_ended and bool(self.xgrammar_matcher.accept_token(token_id))

    @property
    def has_ended(self) -> bool:
        """Whether a token that ends the answer was accepted. No other token is accepted then."""
        return bool(self.xgrammar_matcher.is_terminated())

    @property
    def is_complete(self) -> bool:
        """Whether the answer may end here: its tokens so far match the grammar."""
        return bool(self.xgrammar_matcher.is_completed())


class MaskFiller:
    """Fills the masks of many answers at once."""

    def __init__(self, n_threads: int) -> None:
        """``n_threads`` is the number of processors to use."""
        self._batch = xgrammar.BatchGrammarMatcher(n_threads)

    def fill(self, matchers: Sequence[Matcher | None], masks: NDArray[np.int32]) -> None:
        """Sets bit ``id % 32`` of word ``id // 32`` for each token that may come next, and clears the others.

        Args:
            matchers: one per row; the row of None, and of an answer that has ended, allows every token.
            masks: [rows, at least ``Vocabulary.n_mask_words``], C order. Rows beyond the matchers stay as they are.
        """
        rows, following = [], []
        for row, matcher in enumerate(matchers):
            if matcher is None or matcher.has_ended:
                masks[row] = -1
            else:
                rows.append(row)
                following.append(matcher.xgrammar_matcher)
        if following:
            self._batch.batch_fill_next_token_bitmask(following, masks, rows)
