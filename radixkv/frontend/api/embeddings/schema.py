"""The body of ``/v1/embeddings``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from radixkv.frontend.http.body_decoder import BodyDecoder, Int64, check_prompts
from radixkv.frontend.pooled_prompts import MAX_POOLED
from radixkv.settings.compat import Place, refusals


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """The body of ``POST /v1/embeddings``; unknown fields are ignored, and null means the default."""

    input: str | list[str | int | Sequence[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: Int64 | None = None
    user: str | None = None
    add_special_tokens: bool | None = None
    priority: Int64 | None = None
    cache_salt: str | None = None


_decoder = BodyDecoder(
    EmbeddingRequest,
    {"input": check_prompts("input", MAX_POOLED)},
    refusals(Place.EMBEDDINGS),
    ids_field="input",
)

parse_embedding = _decoder.decode
"""Decodes a body. Raises ``InvalidRequest``."""
