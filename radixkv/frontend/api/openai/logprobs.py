"""Log-probabilities in the formats of OpenAI, and of vLLM for prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from radixkv.generation.logprobs import finite_logprob, finite_top_logprobs
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.messages import TokenLogprobs


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
    tokenizer: Tokenizer | None,
    token: int,
    offset: int,
    token_logprobs: TokenLogprobs | None,
    n_top: int,
    *,
    as_ids: bool = False,
) -> RenderedToken:
    """Renders a token for completions: a map from name to logprob, with the token itself.

    A token's name is its text, or its bytes as OpenAI writes them if they are no whole characters. Of several
    tokens with one text, the token itself has it as its name, or else the likeliest; the others are named by their
    ids. So the likeliest name is that of the token itself exactly if the token is the likeliest.

    Args:
        tokenizer: of the model; None: all tokens are named by their ids.
        token: the token itself.
        offset: where its text begins.
        token_logprobs: of the token; None for the first one of a prompt.
        n_top: how many of the likeliest tokens the map has.
        as_ids: whether all tokens are named by their ids.
    """
    named_by = None if as_ids else tokenizer
    name = _name(named_by, token)
    if token_logprobs is None:
        return RenderedToken(name, None, offset, msgspec.Raw(b"null"))
    logprob = finite_logprob(token_logprobs, token)
    top_logprobs = {name: logprob}
    for other, other_logprob in finite_top_logprobs(token_logprobs, n_top):
        if other != token:
            other_name = _name(named_by, other)
            top_logprobs[_id_name(other) if other_name in top_logprobs else other_name] = other_logprob
    return RenderedToken(name, logprob, offset, _raw(top_logprobs))


def chat_token(
    tokenizer: Tokenizer | None,
    token: int,
    offset: int,
    token_logprobs: TokenLogprobs | None,
    n_top: int,
    *,
    as_ids: bool = False,
) -> RenderedToken:
    """Renders a token for chat: an object with a list of the likeliest tokens. See ``completion_token``."""
    logprob = None if token_logprobs is None else finite_logprob(token_logprobs, token)
    entry = _chat_entry(tokenizer, token, logprob, as_ids=as_ids)
    top_logprobs = [] if token_logprobs is None else finite_top_logprobs(token_logprobs, n_top)
    entry["top_logprobs"] = [_chat_entry(tokenizer, *other, as_ids=as_ids) for other in top_logprobs]
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


def _chat_entry(tokenizer: Tokenizer | None, token: int, logprob: float | None, *, as_ids: bool) -> dict[str, Any]:
    text = _text(None if as_ids else tokenizer, token)
    token_bytes = text.encode() if tokenizer is None else tokenizer.token_bytes(token)
    return {"token": text, "logprob": logprob, "bytes": list(token_bytes)}


def _text(tokenizer: Tokenizer | None, token: int) -> str:
    return _id_name(token) if tokenizer is None else tokenizer.token_text(token)


def _name(tokenizer: Tokenizer | None, token: int) -> str:
    """Returns a text that no other text and no other bytes have."""
    if tokenizer is None:
        return _id_name(token)
    token_bytes = tokenizer.token_bytes(token)
    try:
        return token_bytes.decode()
    except UnicodeDecodeError:
        return f"bytes:{str(token_bytes)[2:-1]}"  # of b' \xf0', what is between the quotes


def _id_name(token: int) -> str:
    """Returns the name that vLLM gives a token with ``return_tokens_as_token_ids``."""
    return f"token_id:{token}"


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
