"""``Predictions``: guesses from what clients expect their answers to be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from radixkv.errors import InvalidRequest
from radixkv.runtime.drafts.sources import Guess, Source
from radixkv.runtime.protocols.request import Observer
from radixkv.runtime.request import Request
from radixkv.tree.node import TOKEN_BYTES
from radixkv.wire.messages import Submit
from radixkv.wire.request_limits import check_ids

_MAX_PLACES = 32
"""Places that are looked at, which limits the time for a prediction that was made for it."""


class Predictions(Source):
    """Guesses that an answer goes on as its request's prediction does, where that has the answer's last tokens.

    The longest match decides, and among equal ones that which is at nearly the same place in answer and prediction:
    an answer that differs from its prediction in a few places keeps in step with it.

    Args:
        sizes: least and most tokens of a match.
        vocab_size: ids are below it.
    """

    def __init__(self, sizes: tuple[int, int], vocab_size: int) -> None:
        self._min_matched, self._max_matched = sizes
        self._vocab_size = vocab_size

    def follow(self, message: Submit, choices: Sequence[Request]) -> Observer:
        """Returns what holds the prediction of a request. O(tokens). Raises ``InvalidRequest`` for other ids."""
        if len(message.prediction) % TOKEN_BYTES:
            raise InvalidRequest(
                f"a prediction of {len(message.prediction)} bytes is not an array of int32 ids", param="prediction"
            )
        prediction = _Prediction(message.prediction)
        check_ids((int(prediction.ids.min()), int(prediction.ids.max())), self._vocab_size, "prediction")
        return prediction

    def guess(self, request: Request, n_tokens: int) -> Guess | None:
        """Returns what follows the answer's last tokens in the prediction. O(tokens of the prediction)."""
        prediction = next((one for one in request.observers if isinstance(one, _Prediction)), None)
        if prediction is None:
            return None
        n_last = min(request.n_outputs, self._max_matched)
        last = np.frombuffer(request.known_key[len(request.known_key) - n_last * TOKEN_BYTES :], np.int32)
        n_matched, end = self._find(prediction.ids[:-1], last, request.n_outputs)
        followers = prediction.ids[end : end + n_tokens]
        return Guess("prediction", n_matched, followers.tobytes()) if n_matched else None

    def _find(self, ids: np.ndarray, last: np.ndarray, n_outputs: int) -> tuple[int, int]:
        """Returns how many tokens match, and the place after them; 0 and 0 if too few do.

        Args:
            ids: of the prediction, without its last token, which nothing follows.
            last: the last tokens of the answer.
            n_outputs: length of the answer.
        """
        n_least = self._min_matched
        if n_outputs < n_least:  # the answer has just begun
            return (n_outputs, n_outputs) if np.array_equal(ids[:n_outputs], last) else (0, 0)
        if len(ids) < n_least:
            return 0, 0
        is_alike = ids[n_least - 1 :] == last[-1]
        for n_before in range(1, n_least):
            is_alike &= ids[n_least - 1 - n_before : len(ids) - n_before] == last[-1 - n_before]
        ends = np.flatnonzero(is_alike) + n_least
        nearest = int(ends.searchsorted(n_outputs))
        ends = ends[max(0, nearest - _MAX_PLACES // 2) : nearest + _MAX_PLACES // 2]
        if not len(ends):
            return 0, 0
        n_matched = n_least
        while n_matched < len(last):
            longer = ends[ends > n_matched]
            longer = longer[ids[longer - 1 - n_matched] == last[-1 - n_matched]]
            if not len(longer):
                break
            ends, n_matched = longer, n_matched + 1
        return n_matched, int(ends[np.abs(ends - n_outputs).argmin()])


class _Prediction(Observer):
    """Holds the prediction of a request while there is the request."""

    __slots__ = ("ids",)

    def __init__(self, tokens: bytes) -> None:
        self.ids = np.frombuffer(tokens, np.int32)
