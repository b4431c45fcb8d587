"""Log-probabilities in the formats of OpenAI, and of vLLM for prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from radixkv.generation.logprobs import finite_logprob, finite_top_logprobs
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire import TokenLogprobs


@dataclass(frozen=True)
class RenderedToken:
    """One token with its logprobs, as a response shows it."""

    text: str
    logprob: float | None
    """None for the first token of a prompt."""
    offset: int
    """Where the token begins in the choice's text, in characters."""
    encoded: msgspec.Raw
    """The format's JSON of the token's alternatives.

    It is encoded as soon as the token arrives, so that encoding the whole response is fast.
    """


def completion_token(
    tokenizer: Tokenizer | None, token: int, offset: int, token_logprobs: TokenLogprobs | None, n_top: int
) -> RenderedToken:
    """Renders a token for completions: a map from text to logprob, with the token itself."""
    text = _text(tokenizer, token)
    if token_logprobs is None:
        return RenderedToken(text, None, offset, msgspec.Raw(b"null"))
    logprob = finite_logprob(token_logprobs, token)
    top_logprobs = {text: logprob}
    for other, other_logprob in finite_top_logprobs(token_logprobs, n_top):
        top_logprobs.setdefault(_text(tokenizer, other), other_logprob)
    return RenderedToken(text, logprob, offset, _raw(top_logprobs))


def chat_token(
    tokenizer: Tokenizer | None, token: int, offset: int, token_logprobs: TokenLogprobs | None, n_top: int
) -> RenderedToken:
    """Renders a token for chat: an object with a list of the likeliest tokens."""
    logprob = None if token_logprobs is None else finite_logprob(token_logprobs, token)
    entry = _chat_entry(tokenizer, token, logprob)
    top_logprobs = [] if token_logprobs is None else finite_top_logprobs(token_logprobs, n_top)
    entry["top_logprobs"] = [_chat_entry(tokenizer, *other) for other in top_logprobs]
    return RenderedToken(entry["token"], logprob, offset, _raw(entry))


def completion_logprobs(tokens: Sequence[RenderedToken]) -> dict[str, Any]:
    """Returns the ``logprobs`` object of a completion's choice."""
    return {
        "text_offset": [token.offset for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "tokens": [token.text for token in tokens],
        "top_logprobs": [token.encoded for token in tokens],
    }


def chat_logprobs(tokens: Sequence[RenderedToken]) -> dict[str, Any]:
    """Returns the ``logprobs`` object of a chat's choice."""
    return {"content": [token.encoded for token in tokens], "refusal": None}


def prompt_entry(tokenizer: Tokenizer | None, token: int, token_logprobs: TokenLogprobs, n_top: int) -> msgspec.Raw:
    """Returns one entry of vLLM's ``prompt_logprobs``: a map by token id, with the token itself first."""
    entries = {
        str(token): _prompt_logprob(tokenizer, token, finite_logprob(token_logprobs, token), token_logprobs.rank)
    }
    for rank, (other, logprob) in enumerate(finite_top_logprobs(token_logprobs, n_top), start=1):
        entries.setdefault(str(other), _prompt_logprob(tokenizer, other, logprob, rank))
    return _raw(entries)


def _prompt_logprob(tokenizer: Tokenizer | None, token: int, logprob: float, rank: int) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": _text(tokenizer, token)}


def _chat_entry(tokenizer: Tokenizer | None, token: int, logprob: float | None) -> dict[str, Any]:
    text = _text(tokenizer, token)
    token_bytes = text.encode() if tokenizer is None else tokenizer.token_bytes(token)
    return {"token": text, "logprob": logprob, "bytes": list(token_bytes)}


def _text(tokenizer: Tokenizer | None, token: int) -> str:
    return f"token_id:{token}" if tokenizer is None else tokenizer.token_text(token)


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
