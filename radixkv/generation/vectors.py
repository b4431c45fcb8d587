"""Embeddings and scores, from what the runtime reports of a prompt's last position."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from radixkv.errors import InvalidRequest, shortened

_MIN_LENGTH = np.float32(1e-12)
"""The least that a vector is divided by, as in torch."""


def embedding(state: bytes, dimensions: int | None, *, normalizes: bool) -> NDArray[np.float32]:
    """Returns the embedding of a hidden state, [dimensions], float32. O(dimensions).

    Args:
        state: little-endian float32.
        dimensions: how many of the leading values to keep; None: all.
        normalizes: whether these are divided by their length; always so for a part of them.
    """
    values = np.frombuffer(state, dtype="<f4")[:dimensions]
    if not (normalizes or dimensions is not None):
        return values
    length = np.sqrt(np.dot(values, values))
    return np.asarray(values / np.maximum(length, _MIN_LENGTH), np.float32)


def check_dimensions(dimensions: int | None, hidden_size: int) -> None:
    """Raises ``InvalidRequest`` unless an embedding of ``hidden_size`` values has as many."""
    if dimensions is not None and not (type(dimensions) is int and 1 <= dimensions <= hidden_size):
        raise InvalidRequest(
            f"dimensions is {shortened(dimensions)}; embeddings of this model have 1 to {hidden_size}",
            param="dimensions",
        )


def relevance(logits: bytes) -> float:
    """Returns the probability of the second of two logits, little-endian float32, between these two."""
    no, yes = np.frombuffer(logits, dtype="<f4").tolist()
    return 1 / (1 + math.exp(no - yes)) if no <= yes else math.exp(yes - no) / (1 + math.exp(yes - no))
