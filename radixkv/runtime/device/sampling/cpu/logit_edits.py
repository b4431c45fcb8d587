"""Logit biases, bans and penalties of one request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from radixkv.errors import DeviceError
from radixkv.runtime.step.plan import RowSampling

_TOKEN = np.dtype("<i4")
_NEUTRAL = np.array([[0.0], [1.0], [1.0], [0.0]], dtype=np.float32)
"""[4, 1]: edits that change nothing: bias, multiplier of a negative logit, multiplier of a positive one, penalty to
subtract."""
_MIN_REPETITION_PENALTY = 1e-30
"""Smaller penalties are raised to this, because logits would overflow float32; the order of tokens is the same."""
_MIN_CAPACITY = 64
"""Initial number of tokens that the edit table has room for."""


class LogitEdits:
    """Biases, bans and penalties of one request, as a table with one column per affected token.

    A step reads and writes only the logits of affected tokens, each once, whichever settings are used. Counting an
    output token costs O(1). Tokens counted one by one give the same bits as a history that contains them.
    """

    def __init__(self, sampling: RowSampling, vocab_size: int) -> None:
        """Starts with the history and the penalties of ``sampling``.

        Raises:
            DeviceError: a token of the history is outside the vocabulary.
        """
        self.counts_tokens = sampling.history is not None
        self._vocab_size = vocab_size
        self._repetition_penalty = max(sampling.repetition_penalty, _MIN_REPETITION_PENALTY)
        self._weaker = np.minimum if self._repetition_penalty >= 1.0 else np.maximum
        """Selects the product with the inverse penalty for positive logits, with the penalty for negative ones."""
        self._frequency_penalty = sampling.frequency_penalty
        self._presence_penalty = sampling.presence_penalty
        self._logit_bias: tuple[tuple[int, float], ...] = ()
        self._banned: tuple[int, ...] = ()
        self._columns: dict[int, int] = {}
        self._ids = np.zeros(_MIN_CAPACITY, dtype=np.int64)
        self._table = np.repeat(_NEUTRAL, _MIN_CAPACITY, axis=1)
        self._counts: Counter[int] = Counter()
        if sampling.history is not None:
            tokens = np.frombuffer(sampling.history.tokens, _TOKEN)
            self._counts.update(tokens[sampling.history.n_prompt :].tolist())
            self._add(np.unique(tokens).tolist())
            self._table[1, : len(self._columns)] = self._repetition_penalty
            self._table[2, : len(self._columns)] = 1.0 / self._repetition_penalty
            for token in self._counts:
                self._penalise(token)

    @property
    def ids(self) -> NDArray[np.int64]:
        """Affected tokens, each once."""
        return self._ids[: len(self._columns)]

    def has_adopted(self, sampling: RowSampling) -> bool:
        """Returns whether ``logit_bias`` and ``banned`` are the same objects that were adopted last."""
        return self._logit_bias is sampling.logit_bias and self._banned is sampling.banned

    def adopt(self, sampling: RowSampling) -> None:
        """Takes over ``logit_bias`` and ``banned``. O(1) if they are the objects that were adopted last.

        Raises:
            DeviceError: one of their tokens is outside the vocabulary, or all tokens are banned.
        """
        if self.has_adopted(sampling):
            return
        if len(set(sampling.banned)) == self._vocab_size:
            raise DeviceError(f"all {self._vocab_size} tokens are banned")
        self._logit_bias, self._banned = sampling.logit_bias, sampling.banned
        self._add([token for token, _ in self._logit_bias])
        self._add(self._banned)
        biases = self._table[0]
        biases[:] = 0.0
        for token, bias in self._logit_bias:
            biases[self._columns[token]] += bias
        for token in self._banned:
            biases[self._columns[token]] = -np.inf

    def apply(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns the logits of ``ids`` after biases, bans and penalties, applied in this order.

        Args:
            logits: [ids], original logits of ``ids``.
        """
        biases, penalty, inverse_penalty, subtracted = self._table[:, : len(self._columns)]
        edited: NDArray[np.float32] = logits + biases
        if self.counts_tokens:
            edited = self._weaker(edited * inverse_penalty, edited * penalty)
            edited -= subtracted
        return edited

    def count(self, token: int) -> None:
        """Counts an output token for the penalties."""
        self._counts[token] += 1
        if token not in self._columns:
            self._add((token,))
        self._penalise(token)

    def _penalise(self, token: int) -> None:
        table, column = self._table, self._columns[token]
        table[1, column] = self._repetition_penalty
        table[2, column] = 1.0 / self._repetition_penalty
        table[3, column] = self._frequency_penalty * self._counts[token] + self._presence_penalty

    def _add(self, tokens: Iterable[int]) -> None:
        new = [token for token in dict.fromkeys(tokens) if token not in self._columns]
        if not new:
            return
        if not 0 <= min(new) <= max(new) < self._vocab_size:
            raise DeviceError(
                f"token ids {min(new)} to {max(new)} are not all between 0 and {self._vocab_size - 1}"
            )
        first, end = len(self._columns), len(self._columns) + len(new)
        if end > len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros(end, dtype=np.int64)))
            self._table = np.concatenate((self._table, np.repeat(_NEUTRAL, end, axis=1)), axis=1)
        self._ids[first:end] = new
        self._columns.update(zip(new, range(first, end), strict=True))
