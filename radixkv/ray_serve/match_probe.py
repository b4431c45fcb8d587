"""Questions to ``/cache/match``, made of clients' requests, and their answers."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from radixkv.ray_serve.messages import ForwardedRequest

ASKED_AS_SENT = frozenset({"/v1/completions", "/v1/chat/completions"})
"""Paths whose bodies ``/cache/match`` takes as they are: it ignores fields that it does not know."""


class _GenerateBody(msgspec.Struct):
    """The prompt of ``/generate``, and whose pages it may find."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    cache_salt: str | None = None
    lora_path: str | None = None


class _Prompt(msgspec.Struct):
    prompt_tokens: int
    matched_tokens: dict[str, int]


class _Load(msgspec.Struct):
    running: int
    waiting: int


class _MatchReply(msgspec.Struct):
    prompts: list[_Prompt]
    load: _Load


class Match(NamedTuple):
    """What a server has of a request's prompts."""

    n_tokens: int
    """Tokens of all prompts."""
    n_matched: int
    """Tokens that any of its tiers has."""
    n_in_flight: int
    """Requests that the server runs, or that wait there."""


def match_question(request: ForwardedRequest) -> bytes | None:
    """Returns the body of a ``/cache/match`` about the prompts of a request; None if it has none that can be asked.

    It is also None for malformed bodies, and for ``/v1/messages`` and ``/v1/responses``, whose messages
    ``/cache/match`` does not take.
    """
    path = request.path.partition("?")[0]
    if path in ASKED_AS_SENT:
        return request.body
    if path != "/generate":
        return None
    try:
        body = _generate.decode(request.body)
    except msgspec.DecodeError:
        return None
    prompt = body.input_ids or body.text
    if prompt is None:
        return None
    question: dict[str, Any] = {"prompt": prompt}
    if body.cache_salt is not None:
        question["cache_salt"] = body.cache_salt
    if body.lora_path:
        question["model"] = body.lora_path
    return msgspec.json.encode(question)


def read_match(reply: bytes) -> Match:
    """Reads the reply of ``/cache/match``.

    Raises:
        msgspec.DecodeError: it is something else.
    """
    match = _match.decode(reply)
    return Match(
        sum(prompt.prompt_tokens for prompt in match.prompts),
        sum(sum(prompt.matched_tokens.values()) for prompt in match.prompts),
        match.load.running + match.load.waiting,
    )


_generate = msgspec.json.Decoder(_GenerateBody)
_match = msgspec.json.Decoder(_MatchReply)
