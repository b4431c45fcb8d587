"""Log-probabilities as OpenAI and vLLM show them."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from radixkv.text.tokenizer import Tokenizer
from radixkv.wire import TokenLogprobs, unpack_tokens

MIN_LOGPROB = -9999.0
"""Shown instead of minus infinity, for which JSON has no number."""


@dataclass(frozen=True)
class ShownToken:
    """One token beside its text."""

    text: str
    logprob: float | None
    """None for the first token of a prompt, which nothing comes before."""
    offset: int
    """Where it begins in the choice's text, in characters."""
    likeliest: msgspec.Raw
    """The JSON that has the other likely tokens. Made with the token, so that a whole reply is quick to make."""


ShowToken = Callable[[Tokenizer | None, int, int, TokenLogprobs | None, int], ShownToken]
"""Takes the tokenizer, a token, its offset and its figures, and how many of the likeliest to show."""


def completion_token(
    tokenizer: Tokenizer | None, token: int, offset: int, figures: TokenLogprobs | None, n_likeliest: int
) -> ShownToken:
    """As completions show a token: a map of the likeliest texts, the token's own among them."""
    text = _text(tokenizer, token)
    if figures is None:
        return ShownToken(text, None, offset, msgspec.Raw(b"null"))
    logprob = own_logprob(figures, token)
    likeliest = {text: logprob}
    for other, other_logprob in _likeliest(figures, n_likeliest):
        likeliest.setdefault(_text(tokenizer, other), other_logprob)
    return ShownToken(text, logprob, offset, _raw(likeliest))


def chat_token(
    tokenizer: Tokenizer | None, token: int, offset: int, figures: TokenLogprobs | None, n_likeliest: int
) -> ShownToken:
    """As chat shows a token: an object with a list of the likeliest."""
    logprob = None if figures is None else own_logprob(figures, token)
    entry = _chat_entry(tokenizer, token, logprob)
    likeliest = [] if figures is None else _likeliest(figures, n_likeliest)
    entry["top_logprobs"] = [_chat_entry(tokenizer, *other) for other in likeliest]
    return ShownToken(entry["token"], logprob, offset, _raw(entry))


def completion_logprobs(tokens: Sequence[ShownToken]) -> dict[str, Any]:
    """The ``logprobs`` object of a completion's choice."""
    return {
        "text_offset": [token.offset for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "tokens": [token.text for token in tokens],
        "top_logprobs": [token.likeliest for token in tokens],
    }


def chat_logprobs(tokens: Sequence[ShownToken]) -> dict[str, Any]:
    """The ``logprobs`` object of a chat's choice."""
    return {"content": [token.likeliest for token in tokens], "refusal": None}


def prompt_entry(tokenizer: Tokenizer | None, token: int, figures: TokenLogprobs, n_likeliest: int) -> msgspec.Raw:
    """One token of vLLM's ``prompt_logprobs``: a map of ids, the token's own first."""
    entries = {str(token): _prompt_figures(tokenizer, token, own_logprob(figures, token), figures.rank)}
    for rank, (other, logprob) in enumerate(_likeliest(figures, n_likeliest), start=1):
        entries.setdefault(str(other), _prompt_figures(tokenizer, other, logprob, rank))
    return _raw(entries)


def own_logprob(figures: TokenLogprobs, token: int) -> float:
    """The token's own, as JSON shows it: the same number as among the likeliest, which are float32."""
    ids = unpack_tokens(figures.top_ids)
    if token in ids:
        (logprob,) = struct.unpack_from("<f", figures.top_logprobs, 4 * ids.index(token))
    else:
        (logprob,) = struct.unpack("<f", struct.pack("<f", figures.logprob))
    return shown_logprob(logprob)


def shown_logprob(logprob: float) -> float:
    """A log-probability for which JSON has a number."""
    return max(logprob, MIN_LOGPROB)


def _prompt_figures(tokenizer: Tokenizer | None, token: int, logprob: float, rank: int) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": _text(tokenizer, token)}


def _chat_entry(tokenizer: Tokenizer | None, token: int, logprob: float | None) -> dict[str, Any]:
    text = _text(tokenizer, token)
    of_token = text.encode() if tokenizer is None else tokenizer.token_bytes(token)
    return {"token": text, "logprob": logprob, "bytes": list(of_token)}


def _likeliest(figures: TokenLogprobs, count: int) -> Iterator[tuple[int, float]]:
    ids = unpack_tokens(figures.top_ids)[:count]
    logprobs = struct.unpack_from(f"<{len(ids)}f", figures.top_logprobs)
    return zip(ids, map(shown_logprob, logprobs), strict=True)


def _text(tokenizer: Tokenizer | None, token: int) -> str:
    return f"token_id:{token}" if tokenizer is None else tokenizer.token_text(token)


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
