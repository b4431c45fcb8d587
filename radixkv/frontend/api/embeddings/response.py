"""The response of ``/v1/embeddings``."""

from __future__ import annotations

import base64

import msgspec
import numpy as np
from numpy.typing import NDArray

from radixkv.frontend.pooled_prompts import PooledPrompts
from radixkv.frontend.served_model import ServedModel
from radixkv.generation.vectors import embedding


def embedding_response(
    pooled: PooledPrompts, served_model: ServedModel, *, dimensions: int | None, is_base64: bool
) -> bytes:
    """Returns the JSON of the response. O(values). A thread that runs it lets others run after each vector.

    Args:
        pooled: hidden states of all inputs, in their order.
        served_model: the one model.
        dimensions: how many values of each to keep; None: all.
        is_base64: whether values are little-endian float32 in base64, and not numbers.
    """
    vectors = (embedding(state, dimensions, normalizes=served_model.normalizes) for state in pooled.values)
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(vector, is_base64=is_base64)}
        for index, vector in enumerate(vectors)
    ]
    usage = pooled.usage(served_model)
    return msgspec.json.encode({"object": "list", "data": data, "model": served_model.name, "usage": usage})


def _encoded(vector: NDArray[np.float32], *, is_base64: bool) -> msgspec.Raw:
    """Returns the JSON of a vector, which the encoder of the response only copies."""
    values = base64.b64encode(vector.astype("<f4").tobytes()).decode() if is_base64 else vector.tolist()
    return msgspec.Raw(msgspec.json.encode(values))
