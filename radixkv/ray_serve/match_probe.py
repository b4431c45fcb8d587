"""Questions to ``/cache/match``, made of clients' requests, and their answers."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from radixkv.ray_serve.messages import ForwardedRequest

_NO_FIELD = msgspec.Raw(b"")

ASKED_AS_SENT = frozenset({"/v1/completions", "/v1/chat/completions"})
"""Paths whose bodies ``/cache/match`` takes as they are: it ignores fields that it does not know."""


class _GenerateBody(msgspec.Struct):
    """The prompt of ``/generate``, and whose pages it may find."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    cache_salt: str | None = None
    lora_path: str | list[str | None] | None = None


class _AskedBody(msgspec.Struct):
    """The prompts of a question, and whose pages they may find."""

    prompt: msgspec.Raw = _NO_FIELD
    tools: msgspec.Raw = _NO_FIELD
    messages: msgspec.Raw = _NO_FIELD
    model: str | None = None
    cache_salt: str | None = None


class _Prompt(msgspec.Struct):
    prompt_tokens: int
    matched_tokens: dict[str, int]


class _Load(msgspec.Struct):
    running: int
    waiting: int


class _MatchReply(msgspec.Struct):
    prompts: list[_Prompt]
    load: _Load


class Question(NamedTuple):
    """A question to ``/cache/match`` about the prompts of a request."""

    body: bytes
    prompt: bytes
    """Bytes that begin alike where prompts do; none if only the load is asked for."""
    namespace: bytes
    """Of the model or adapter and the salt: equal prompts of different ones share no pages.

    An activated LoRA and its model do share some, which only the servers know.
    """


LOAD_QUESTION = Question(b'{"prompt": [0]}', b"", b"")
"""Asks for the load, when there is no prompt to ask about."""


class Match(NamedTuple):
    """What a server has of a request's prompts."""

    n_tokens: int
    """Tokens of all prompts."""
    n_matched: int
    """Tokens that any of its tiers has."""
    n_in_flight: int
    """Requests that the server runs, or that wait there."""


def match_question(request: ForwardedRequest) -> Question:
    """Returns what to ask about the prompts of a request; ``LOAD_QUESTION`` if it has none that can be asked.

    So it is for malformed bodies, and for ``/v1/messages`` and ``/v1/responses``, whose messages ``/cache/match``
    does not take.
    """
    path = request.path.partition("?")[0]
    try:
        if path in ASKED_AS_SENT:
            return _question(request.body)
        if path == "/generate" and (body := _question_of_generate(request.body)) is not None:
            return _question(body)
    except msgspec.DecodeError:
        pass
    return LOAD_QUESTION


def _question(body: bytes) -> Question:
    fields = _asked.decode(body)
    prompt = b"".join((fields.prompt, fields.tools, fields.messages))
    return Question(body, prompt, msgspec.json.encode((fields.model, fields.cache_salt)))


def _question_of_generate(request: bytes) -> bytes | None:
    body = _generate.decode(request)
    prompt = body.input_ids or body.text
    if prompt is None or isinstance(body.lora_path, list):  # a question is about one adapter
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


_asked = msgspec.json.Decoder(_AskedBody)
_generate = msgspec.json.Decoder(_GenerateBody)
_match = msgspec.json.Decoder(_MatchReply)
