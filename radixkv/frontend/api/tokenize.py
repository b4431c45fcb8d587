"""Routes between texts and tokens: ``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from radixkv.errors import InvalidRequest
from radixkv.frontend.chat_text import TextRequest, check_text_request, rendered_text
from radixkv.frontend.http.body import Bodies
from radixkv.frontend.http.body_decoder import BodyDecoder, check_messages
from radixkv.frontend.http.disconnect import unless_gone
from radixkv.frontend.http.route import route
from radixkv.frontend.prompt_encoding import check_ids
from radixkv.frontend.request_limits import check_model
from radixkv.frontend.served_model import Served
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire import unpack_tokens

_INLINE_CHARACTERS = 4096
"""Of texts, and tokens, that are turned into the other at once; more are in a thread, so that the loop goes on."""
MAX_CHARACTERS = 1 << 20
"""Of a text to tokenize, which may be longer than the context."""
MAX_TOKENS = 1 << 18
"""Of a list to turn into text."""


class TokenizeRequest(TextRequest, kw_only=True):
    """The body of ``POST /tokenize``."""

    prompt: str | None = None
    return_token_strs: bool | None = False


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of ``POST /detokenize``."""

    tokens: list[int]
    model: str | None = None


def tokenize_routes(served: Served, bodies: Bodies) -> list[Route]:
    """``/tokenize`` and ``/detokenize``."""

    async def tokenize(request: Request) -> Response:
        asked = await bodies.read(request, _tokenize.decode, MAX_CHARACTERS)
        return Response(
            await unless_gone(request.receive, _tokenized(asked, served)), media_type="application/json"
        )

    async def detokenize(request: Request) -> Response:
        asked = await bodies.read(request, _detokenize.decode, MAX_TOKENS)
        return _json({"prompt": await unless_gone(request.receive, _text_of(asked, served))})

    return [
        route("/tokenize", tokenize, "POST"),
        route("/detokenize", detokenize, "POST"),
    ]


def _check_text(raw: bytes, most: int) -> None:
    # A character takes six bytes at most, as \uXXXX.
    if len(raw) > 6 * most + 2:
        raise InvalidRequest(f"prompt is longer than {most} characters; send it in parts", param="prompt")


def _check_tokens(raw: bytes, most: int) -> None:
    if raw.count(b",") >= most or raw.count(b"[") > 1:
        raise InvalidRequest(f"tokens must be a list of at most {most} token ids", param="tokens")


_tokenize = BodyDecoder(TokenizeRequest, {"prompt": _check_text, "messages": check_messages})
_detokenize = BodyDecoder(DetokenizeRequest, {"tokens": _check_tokens})


async def _tokenized(asked: TokenizeRequest, served: Served) -> bytes:
    check_text_request(asked, asked.prompt, served)
    text = asked.prompt if asked.prompt is not None else await rendered_text(asked, served)
    if len(text) > MAX_CHARACTERS:
        raise InvalidRequest(
            f"the text is longer than {MAX_CHARACTERS} characters; send it in parts", param="prompt"
        )
    tokenizer, has_names = _tokenizer(served, "prompt"), bool(asked.return_token_strs)

    def tokenized(encode: Callable[..., bytes]) -> bytes:
        ids = unpack_tokens(encode(text, adds_special_tokens=asked.adds_special_tokens()))
        found = {
            "count": len(ids),
            "max_model_len": served.max_prompt_and_answer,
            "tokens": ids,
            "token_strs": [tokenizer.token(one, skip_special_tokens=False) for one in ids] if has_names else None,
        }
        return msgspec.json.encode(found)

    if len(text) <= _INLINE_CHARACTERS:
        return tokenized(tokenizer.encode_here)
    return await served.alone.run(partial(tokenized, tokenizer.encode))


async def _text_of(asked: DetokenizeRequest, served: Served) -> str:
    check_model(asked.model, served)
    tokenizer = _tokenizer(served, "tokens")
    if asked.tokens:
        check_ids(asked.tokens, served, "tokens")
    if len(asked.tokens) <= _INLINE_CHARACTERS:
        return tokenizer.decode(asked.tokens, skip_special_tokens=False)
    return await served.alone.run(partial(tokenizer.decode, asked.tokens, skip_special_tokens=False))


def _tokenizer(served: Served, field: str) -> Tokenizer:
    if served.tokenizer is None:
        raise InvalidRequest("this checkpoint has no tokenizer; start the server with --tokenizer", param=field)
    return served.tokenizer


def _json(value: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
