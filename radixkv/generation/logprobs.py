"""The runtime's logprobs, decoded."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import TypeVar

from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.messages import TokenLogprobs, unpack_tokens

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot express."""

RenderedT = TypeVar("RenderedT")

TokenRenderer = Callable[[Tokenizer | None, int, int, TokenLogprobs | None, int], RenderedT]
"""Returns a token with its logprobs in the form of one API.

It takes the tokenizer, the token, the token's offset in the text, its logprobs, and how many of the
likeliest tokens to show.
"""


def top_logprobs(token_logprobs: TokenLogprobs, count: int | None = None) -> Iterator[tuple[int, float]]:
    """Returns the ``count`` likeliest tokens with their logprobs, or all that the runtime reported."""
    ids = unpack_tokens(token_logprobs.top_ids)[:count]
    return zip(ids, struct.unpack_from(f"<{len(ids)}f", token_logprobs.top_logprobs), strict=True)


def finite_top_logprobs(token_logprobs: TokenLogprobs, count: int | None = None) -> list[tuple[int, float]]:
    """Returns what ``top_logprobs`` does, with no logprob below ``MIN_LOGPROB``."""
    return [(token, max(logprob, MIN_LOGPROB)) for token, logprob in top_logprobs(token_logprobs, count)]


def finite_logprob(token_logprobs: TokenLogprobs, token: int) -> float:
    """Returns the token's own logprob as a float32 value, at least ``MIN_LOGPROB``.

    It is the same number as the token has among the likeliest, which are float32.
    """
    rounded: float
    (rounded,) = struct.unpack("<f", struct.pack("<f", token_logprobs.logprob))
    return max(dict(top_logprobs(token_logprobs)).get(token, rounded), MIN_LOGPROB)


def token_text(tokenizer: Tokenizer | None, token: int) -> str | None:
    """Returns the text of a single token; None without a tokenizer."""
    return None if tokenizer is None else tokenizer.token_text(token)
