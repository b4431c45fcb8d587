"""Logit biases, bans, penalties and token masks of a row, as both samplers apply them.

A bias is added to its token's logit, and a banned token's logit becomes -inf. Then the repetition penalty divides
the positive and multiplies the negative logits of tokens in prompt or output. From the logits of tokens in the
output, the frequency penalty is subtracted once for each occurrence, and the presence penalty once. Last, the
logits of tokens that the row's mask forbids become -inf.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from radixkv.errors import DeviceError
from radixkv.runtime.step.plan import History, RowSampling

MIN_REPETITION_PENALTY = 1e-30
"""Smaller penalties are raised to this, because logits would overflow float32; the order of tokens is the same."""
MAX_LOGIT = 3.0e38
"""Largest magnitude of a penalised logit, so that weights stay finite."""

_TOKEN = np.dtype("<i4")


def has_edits(sampling: RowSampling) -> bool:
    """Whether a row's logits have biases, bans, penalties or a mask."""
    return sampling.has_penalties or sampling.is_masked or bool(sampling.logit_bias) or bool(sampling.banned)


@dataclass(frozen=True)
class TokenBiases:
    """Biases and bans of a row, one value for each token."""

    sampling: RowSampling
    ids: NDArray[np.int64]
    """[n], distinct."""
    values: NDArray[np.float32]
    """[n]; -inf for banned tokens."""

    @classmethod
    def parse(cls, sampling: RowSampling, vocab_size: int) -> TokenBiases:
        """Adds up the biases of each token. O(biases).

        Raises:
            DeviceError: a token is outside the vocabulary, or all tokens are banned.
        """
        if len(set(sampling.banned)) == vocab_size:
            raise DeviceError(f"all {vocab_size} tokens are banned")
        biases: dict[int, float] = {}
        for token, bias in sampling.logit_bias:
            biases[token] = biases.get(token, 0.0) + bias
        biases.update(dict.fromkeys(sampling.banned, -np.inf))
        ids = np.array(list(biases), dtype=np.int64)
        _check_ids(ids, vocab_size)
        return cls(sampling, ids, np.array(list(biases.values()), dtype=np.float32))

    def is_of(self, sampling: RowSampling) -> bool:
        """Whether ``sampling`` has the same bias and ban objects."""
        return self.sampling.logit_bias is sampling.logit_bias and self.sampling.banned is sampling.banned


def split_history(history: History, vocab_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the token ids of prompt and output. Raises ``DeviceError`` if one is outside the vocabulary."""
    tokens = np.frombuffer(history.tokens, _TOKEN).astype(np.int64)
    _check_ids(tokens, vocab_size)
    return tokens[: history.n_prompt], tokens[history.n_prompt :]


def check_histories(
    batch_slots: Sequence[int], sampling: Sequence[RowSampling], has_history: Sequence[bool]
) -> None:
    """Raises ``DeviceError`` if a row has penalties, and neither it nor its batch slot has a history.

    Args:
        batch_slots: [rows].
        sampling: [rows].
        has_history: by batch slot, whether an earlier row of its request brought one.
    """
    for batch_slot, row in zip(batch_slots, sampling, strict=True):
        if row.has_penalties and row.history is None and not has_history[batch_slot]:
            raise DeviceError(f"batch slot {batch_slot} has penalties and no history; send one with its first row")


def _check_ids(ids: NDArray[np.int64], vocab_size: int) -> None:
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise DeviceError(f"token ids {ids.min()} to {ids.max()} are not all between 0 and {vocab_size - 1}")
