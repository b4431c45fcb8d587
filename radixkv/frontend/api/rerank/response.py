"""The responses of ``/v1/rerank``, ``/v2/rerank`` and ``/v1/score``."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from radixkv.frontend.pooled_prompts import PooledPrompts
from radixkv.frontend.served_model import ServedModel
from radixkv.generation.vectors import relevance


def rerank_response(
    pooled: PooledPrompts, served_model: ServedModel, documents: Sequence[str], *, n_best: int, has_documents: bool
) -> dict[str, Any]:
    """Returns the response in the form of Jina and vLLM: the best documents first, and equal ones in their order.

    Args:
        pooled: the logits of each document, in their order.
        served_model: the one model.
        documents: their texts.
        n_best: most results.
        has_documents: whether results have the texts.
    """
    scores = list(map(relevance, pooled.values))
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[:n_best]
    return {
        "id": f"rerank-{uuid.uuid4().hex}",
        "model": served_model.name,
        "usage": pooled.usage(served_model),
        "results": [
            {"index": index}
            | ({"document": {"text": documents[index]}} if has_documents else {})
            | {"relevance_score": scores[index]}
            for index in order
        ],
    }


def cohere_meta(pooled: PooledPrompts) -> dict[str, Any]:
    """Returns the field ``meta`` of Cohere's second API."""
    return {"meta": {"api_version": {"version": "2"}, "tokens": {"input_tokens": pooled.n_tokens}}}


def score_response(pooled: PooledPrompts, served_model: ServedModel) -> dict[str, Any]:
    """Returns vLLM's response: the score of each pair, in their order."""
    return {
        "id": f"score-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": served_model.name,
        "data": [
            {"index": index, "object": "score", "score": relevance(logits)}
            for index, logits in enumerate(pooled.values)
        ],
        "usage": pooled.usage(served_model),
    }
