"""Follows the tokens of answers through grammars, and says which tokens may come next."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import xgrammar
from numpy.typing import NDArray

from radixkv.errors import GrammarFailure
from radixkv.runtime.structured.spelling import MAX_BYTES, Spelling
from radixkv.tree.node import TOKEN_BYTES

MAX_SEARCH_S = 0.01
"""Processor time of a search for a forced text after which its grammar has no more searches. Where a grammar is
ambiguous, a search may take the square of the text's length, or more."""
MIN_THREADED_S = 1e-3
"""Time from which masks are filled by several threads. Starting them takes 0.05 to 0.1 ms."""


class Grammar:
    """A compiled grammar, which any number of answers may follow.

    Args:
        compiled: the grammar.
        spelling: of the texts that it forces; None if they may be too long to be looked for.
    """

    def __init__(self, compiled: xgrammar.CompiledGrammar, spelling: Spelling | None = None) -> None:
        self._compiled = compiled
        self.spelling = spelling
        """For matchers. None if forced texts are not looked for, from the first slow search on."""
        self.n_bytes: int = compiled.memory_size_bytes
        """Memory that it takes, about."""

    def new_matcher(self) -> Matcher:
        """Returns a matcher of an answer without tokens. Costs less than a millisecond."""
        return Matcher(xgrammar.GrammarMatcher(self._compiled), self)


class Matcher:
    """One answer's way through its grammar."""

    def __init__(self, matcher: xgrammar.GrammarMatcher, grammar: Grammar) -> None:
        self.xgrammar_matcher = matcher
        """For ``MaskFiller``."""
        self._grammar = grammar
        self.end_tokens = frozenset(matcher.stop_token_ids)
        """The tokens that end the answer, where it is complete."""
        self.n_tokens = 0
        """Tokens of the answer."""
        self.has_ended: bool = matcher.is_terminated()
        """Whether a token that ends the answer was accepted. No other token is accepted then."""

    def accept(self, token_id: int) -> bool:
        """Appends a token to the answer; returns False, and does nothing, if the grammar rejects it.

        A token that ends the answer is accepted where the answer is complete.
        """
        if self.has_ended or not self.xgrammar_matcher.accept_token(token_id):
            return False
        self.n_tokens += 1
        self.has_ended = self.xgrammar_matcher.is_terminated()
        return True

    def truncate(self, n_tokens: int) -> None:
        """Takes back all tokens after the first ``n_tokens``, as if they had not been accepted. O(tokens taken)."""
        if n_tokens < self.n_tokens:
            self.xgrammar_matcher.rollback(self.n_tokens - n_tokens)
            self.n_tokens = n_tokens
            self.has_ended = self.xgrammar_matcher.is_terminated()

    def forced(self, n_tokens: int) -> bytes:
        """Returns the first tokens of the text that must come next, as a model would most likely write it.

        Takes 2 µs, 15 more if the text is new, and up to 5 ms if it has ``forced_texts.MAX_CHARACTERS``. A search
        that takes more than ``MAX_SEARCH_S`` is the last one of its grammar.

        Args:
            n_tokens: most tokens to return.
        """
        spelling = self._grammar.spelling
        if spelling is None or self.has_ended:
            return b""
        began = time.thread_time()
        try:
            text = self.xgrammar_matcher.find_jump_forward_string().encode()
        except UnicodeDecodeError as error:  # it begins or ends within a character
            text = error.object
        if time.thread_time() - began > MAX_SEARCH_S:
            self._grammar.spelling = None
        return spelling.spell(text[:MAX_BYTES])[: n_tokens * TOKEN_BYTES]

    def n_allowed(self, tokens: bytes) -> int:
        """Returns how many of these tokens may come next, one after another, without those that end the answer.

        Takes 2 µs a token. The answer is the same after it.

        Args:
            tokens: little-endian int32.
        """
        if self.has_ended:
            return 0
        accept, n_allowed = self.xgrammar_matcher.accept_token, 0
        for token in memoryview(tokens).cast("i"):
            if token in self.end_tokens or not accept(token):
                break
            n_allowed += 1
        if n_allowed:
            self.xgrammar_matcher.rollback(n_allowed)
        return n_allowed

    def rejection(self, token_id: int) -> GrammarFailure:
        """Returns the error of a request whose sampled token ``accept`` has rejected."""
        return GrammarFailure(f"the sampled token {token_id} is not one that structured_outputs allows here")

    @property
    def is_complete(self) -> bool:
        """Whether the answer may end here: its tokens so far match the grammar."""
        return bool(self.xgrammar_matcher.is_completed())


class MaskFiller:
    """Fills the masks of many answers at once, on several processors where that is worth starting threads."""

    def __init__(self, n_threads: int) -> None:
        """``n_threads`` is the number of processors to use."""
        self._n_threads = n_threads
        self._alone = xgrammar.BatchGrammarMatcher(1)
        self._together = xgrammar.BatchGrammarMatcher(n_threads)
        self._seconds_per_mask = 0.0
        """Time of a mask in the last call, about, if one thread fills it."""

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
            is_slow = len(rows) * self._seconds_per_mask > MIN_THREADED_S
            began = time.perf_counter()
            (self._together if is_slow else self._alone).batch_fill_next_token_bitmask(following, masks, rows)
            elapsed_s = time.perf_counter() - began
            self._seconds_per_mask = elapsed_s * (self._n_threads if is_slow else 1) / len(rows)
