"""Routes between texts and tokens: ``/tokenize``, ``/detokenize`` and ``/cache/explain``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from radixkv.errors import InvalidRequest
from radixkv.frontend.client import Client
from radixkv.frontend.decoding import BodyDecoder, check_messages, check_prompt
from radixkv.frontend.encoding import check_ids, encode, encode_texts, separate
from radixkv.frontend.explanation import explanation
from radixkv.frontend.http.bodies import Bodies
from radixkv.frontend.http.leaving import unless_gone
from radixkv.frontend.http.route import route
from radixkv.frontend.openai.conversation import conversation_text
from radixkv.frontend.openai.prompts import check_model, check_salt
from radixkv.frontend.served import Served
from radixkv.frontend.unbuilt import Unbuilt, refuse_unbuilt
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire import unpack_tokens

_INLINE_CHARACTERS = 4096
"""Of texts, and tokens, that are turned into the other at once; more are in a thread, so that the loop goes on."""
MAX_CHARACTERS = 1 << 20
"""Of a text to tokenize, which may be longer than the context."""
MAX_TOKENS = 1 << 18
"""Of a list to turn into text."""


class _TextRequest(Unbuilt, kw_only=True):
    """A text, or messages for the chat template."""

    model: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds those of its own; by default to texts, and not to what a template wrote."""

    def adds_special_tokens(self) -> bool:
        """The same, decided."""
        return self.messages is None if self.add_special_tokens is None else self.add_special_tokens


class TokenizeRequest(_TextRequest, kw_only=True):
    """The body of ``POST /tokenize``."""

    prompt: str | None = None
    return_token_strs: bool | None = False


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of ``POST /detokenize``."""

    tokens: list[int]
    model: str | None = None


class ExplainRequest(_TextRequest, kw_only=True):
    """The body of ``POST /cache/explain``."""

    prompt: str | list[int] | None = None
    cache_salt: str | None = None


def text_routes(client: Client, served: Served, bodies: Bodies, *, explain_contents: bool) -> list[Route]:
    """``/tokenize``, ``/detokenize`` and ``/cache/explain``, which tells of what others cached if it may."""

    async def tokenize(request: Request) -> Response:
        asked = await bodies.read(request, _tokenize.decode, MAX_CHARACTERS)
        return Response(
            await unless_gone(request.receive, _tokenized(asked, served)), media_type="application/json"
        )

    async def detokenize(request: Request) -> Response:
        asked = await bodies.read(request, _detokenize.decode, MAX_TOKENS)
        return _json({"prompt": await unless_gone(request.receive, _text_of(asked, served))})

    async def explain(request: Request) -> Response:
        asked = await bodies.read(request, _explain.decode, served.max_prompt_and_answer)
        tokens = await unless_gone(request.receive, _prompt_of(asked, served))
        explained = await client.explain(tokens, asked.cache_salt or "", contents=explain_contents)
        return _json(explanation(explained, served.tokenizer, contents=explain_contents))

    return [
        route("/tokenize", tokenize, "POST"),
        route("/detokenize", detokenize, "POST"),
        route("/cache/explain", explain, "POST"),
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
_explain = BodyDecoder(ExplainRequest, {"prompt": check_prompt, "messages": check_messages})


async def _tokenized(asked: TokenizeRequest, served: Served) -> bytes:
    _check(asked, asked.prompt, served)
    text = asked.prompt if asked.prompt is not None else await _rendered(asked, served)
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


async def _prompt_of(asked: ExplainRequest, served: Served) -> bytes:
    _check(asked, asked.prompt, served)
    check_salt(asked.cache_salt)
    adds_special_tokens = asked.adds_special_tokens()
    if asked.prompt is None:
        text = await _rendered(asked, served)
        (tokens,) = await encode_texts([text], served, "messages", adds_special_tokens=adds_special_tokens)
    else:
        prompts = separate(asked.prompt if isinstance(asked.prompt, str) else list(asked.prompt))
        (tokens,) = await encode(prompts, served, adds_special_tokens=adds_special_tokens)
    return tokens


def _check(asked: _TextRequest, prompt: object, served: Served) -> None:
    refuse_unbuilt(asked)
    check_model(asked.model, served)
    if (prompt is None) == (asked.messages is None):
        raise InvalidRequest("give either prompt or messages", param="prompt")


async def _rendered(asked: _TextRequest, served: Served) -> str:
    return await conversation_text(
        asked.messages or [],
        served,
        add_generation_prompt=asked.add_generation_prompt is not False,
        continue_final_message=bool(asked.continue_final_message),
        variables=asked.chat_template_kwargs,
    )


def _tokenizer(served: Served, field: str) -> Tokenizer:
    if served.tokenizer is None:
        raise InvalidRequest("this checkpoint has no tokenizer; start the server with --tokenizer", param=field)
    return served.tokenizer


def _json(value: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
