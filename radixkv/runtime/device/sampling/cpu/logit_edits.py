"""What a request does to its logits before a token is chosen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from radixkv.errors import DeviceError
from radixkv.runtime.step.plan import RowSampling

_TOKEN = np.dtype("<i4")
_NEUTRAL = np.array([[0.0], [1.0], [1.0], [0.0]], dtype=np.float32)
"""What is added to a token's logit, what it is multiplied by if negative and if positive, what is taken off."""
_MIN_REPETITION_PENALTY = 1e-30
"""With less, logits leave float32; the order of tokens is the same."""
_MIN_CAPACITY = 64


class Edits:
    """Biases, bans and penalties of one request, as numbers for the tokens that they concern.

    A step reads and writes the logits of those tokens once, whatever is asked, and of no others. A token that comes
    into the answer is counted in O(1). What was counted one by one gives the same bits as a history that has it.
    """

    def __init__(self, sampling: RowSampling, vocab_size: int) -> None:
        """Starts with the history of ``sampling``, if it has one, and its penalties.

        Raises:
            DeviceError: a token of the history is outside the vocabulary.
        """
        self.counts_tokens = sampling.history is not None
        self._vocab_size = vocab_size
        self._repetition_penalty = max(sampling.repetition_penalty, _MIN_REPETITION_PENALTY)
        self._weaker = np.minimum if self._repetition_penalty >= 1.0 else np.maximum
        """Of a positive logit it takes the product with the penalty's inverse, of a negative that with itself."""
        self._frequency_penalty = sampling.frequency_penalty
        self._presence_penalty = sampling.presence_penalty
        self._logit_bias: tuple[tuple[int, float], ...] = ()
        self._banned: tuple[int, ...] = ()
        self._places: dict[int, int] = {}
        self._ids = np.zeros(_MIN_CAPACITY, dtype=np.int64)
        self._table = np.repeat(_NEUTRAL, _MIN_CAPACITY, axis=1)
        self._counts: Counter[int] = Counter()
        if sampling.history is not None:
            tokens = np.frombuffer(sampling.history.tokens, _TOKEN)
            self._counts.update(tokens[sampling.history.n_prompt :].tolist())
            self._add(np.unique(tokens).tolist())
            self._table[1, : len(self._places)] = self._repetition_penalty
            self._table[2, : len(self._places)] = 1.0 / self._repetition_penalty
            for token in self._counts:
                self._penalise(token)

    @property
    def ids(self) -> NDArray[np.int64]:
        """The tokens whose logits change, each once."""
        return self._ids[: len(self._places)]

    def has(self, sampling: RowSampling) -> bool:
        """Whether its ``logit_bias`` and ``banned`` are the objects that were adopted last."""
        return self._logit_bias is sampling.logit_bias and self._banned is sampling.banned

    def adopt(self, sampling: RowSampling) -> None:
        """Takes ``logit_bias`` and ``banned`` over; O(1) if they are the objects of the last time.

        Raises:
            DeviceError: one of their tokens is outside the vocabulary, or all of it is banned.
        """
        if self.has(sampling):
            return
        if len(set(sampling.banned)) == self._vocab_size:
            raise DeviceError(f"all {self._vocab_size} tokens are banned")
        self._logit_bias, self._banned = sampling.logit_bias, sampling.banned
        self._add([token for token, _ in self._logit_bias])
        self._add(self._banned)
        biases = self._table[0]
        biases[:] = 0.0
        for token, bias in self._logit_bias:
            biases[self._places[token]] += bias
        for token in self._banned:
            biases[self._places[token]] = -np.inf

    def apply(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """``logits``, those of ``ids``, after biases, bans and penalties; in this order."""
        biases, up, down, taken = self._table[:, : len(self._places)]
        changed: NDArray[np.float32] = logits + biases
        if self.counts_tokens:
            changed = self._weaker(changed * down, changed * up)
            changed -= taken
        return changed

    def count(self, token: int) -> None:
        """The token came into the answer."""
        self._counts[token] += 1
        if token not in self._places:
            self._add((token,))
        self._penalise(token)

    def _penalise(self, token: int) -> None:
        table, place = self._table, self._places[token]
        table[1, place] = self._repetition_penalty
        table[2, place] = 1.0 / self._repetition_penalty
        table[3, place] = self._frequency_penalty * self._counts[token] + self._presence_penalty

    def _add(self, tokens: Iterable[int]) -> None:
        new = [token for token in dict.fromkeys(tokens) if token not in self._places]
        if not new:
            return
        if not 0 <= min(new) <= max(new) < self._vocab_size:
            raise DeviceError(f"tokens {min(new)} to {max(new)} are not all between 0 and {self._vocab_size - 1}")
        first, end = len(self._places), len(self._places) + len(new)
        if end > len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros(end, dtype=np.int64)))
            self._table = np.concatenate((self._table, np.repeat(_NEUTRAL, end, axis=1)), axis=1)
        self._ids[first:end] = new
        self._places.update(zip(new, range(first, end), strict=True))
