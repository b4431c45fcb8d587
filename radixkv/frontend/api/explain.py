"""``/cache/explain``: how much of a prompt is cached, and why no more."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from radixkv.frontend.chat_text import TextRequest, check_text_request, rendered_text
from radixkv.frontend.client import Client
from radixkv.frontend.http.body import Bodies
from radixkv.frontend.http.body_decoder import BodyDecoder, check_messages, check_prompt
from radixkv.frontend.http.disconnect import unless_gone
from radixkv.frontend.http.route import route
from radixkv.frontend.prompt_encoding import encode, encode_texts, separate
from radixkv.frontend.request_limits import check_salt
from radixkv.frontend.served_model import Served
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire import Explained


class ExplainRequest(TextRequest, kw_only=True):
    """The body of ``POST /cache/explain``."""

    prompt: str | list[int] | None = None
    cache_salt: str | None = None


def explain_routes(client: Client, served: Served, bodies: Bodies, *, explain_contents: bool) -> list[Route]:
    """``/cache/explain``; with ``explain_contents`` it also tells what other clients cached."""

    async def explain(request: Request) -> Response:
        asked = await bodies.read(request, _explain.decode, served.max_prompt_and_answer)
        tokens = await unless_gone(request.receive, _prompt_of(asked, served))
        explained = await client.explain(tokens, asked.cache_salt or "", contents=explain_contents)
        return Response(
            msgspec.json.encode(explanation(explained, served.tokenizer, contents=explain_contents)),
            media_type="application/json",
        )

    return [route("/cache/explain", explain, "POST")]


def explanation(explained: Explained, tokenizer: Tokenizer | None, *, contents: bool) -> dict[str, Any]:
    """The JSON object; fields that say nothing are left out. ``contents``: as they were asked for."""
    shown: dict[str, Any] = {
        "prompt_tokens": explained.n_tokens,
        "cached_tokens": explained.n_cached,
        "reason": explained.reason,
        "text": _sentence(explained, tokenizer, contents),
    }
    if explained.first_difference is not None:
        shown["first_difference"] = {
            "position": explained.first_difference,
            "prompt_token": _token(explained.token, tokenizer),
            "cached_token": _token(explained.cached_token, tokenizer),
        }
    if explained.n_cached_elsewhere is not None:
        shown["cached_elsewhere_tokens"] = explained.n_cached_elsewhere
    return shown


def _token(token: int | None, tokenizer: Tokenizer | None) -> dict[str, Any] | None:
    if token is None:
        return None
    return {"id": token, "text": None if tokenizer is None else tokenizer.token_text(token)}


def _sentence(explained: Explained, tokenizer: Tokenizer | None, contents: bool) -> str:
    how_much = f"{explained.n_cached} of {explained.n_tokens} prompt tokens are cached"
    match explained.reason:
        case "whole":
            why = "those are all whole pages of it" if explained.n_cached else "it has no whole page"
        case "differs":
            why = "what is cached goes on with other tokens"
            if not contents:
                why += ", which only a server with --explain-contents tells"
            elif explained.first_difference is not None:
                mine, theirs = _named(explained.token, tokenizer), _named(explained.cached_token, tokenizer)
                why += f": token {explained.first_difference} is {mine} here and {theirs} there"
        case "evicted":
            why = "the next page was cached, and has been evicted since"
        case "other_namespace":
            why = f"another cache_salt has {explained.n_cached_elsewhere} of them, and shares none"
        case _ if contents:
            why = "nothing that was computed before goes on from there"
        case _:
            why = "nothing that was computed before with this cache_salt goes on from there"
    return f"{how_much}; {why}."


def _named(token: int | None, tokenizer: Tokenizer | None) -> str:
    if token is None:
        return "another"
    return str(token) if tokenizer is None else f"{tokenizer.token_text(token)!r} ({token})"


_explain = BodyDecoder(ExplainRequest, {"prompt": check_prompt, "messages": check_messages})


async def _prompt_of(asked: ExplainRequest, served: Served) -> bytes:
    check_text_request(asked, asked.prompt, served)
    check_salt(asked.cache_salt)
    adds_special_tokens = asked.adds_special_tokens()
    if asked.prompt is None:
        text = await rendered_text(asked, served)
        (tokens,) = await encode_texts([text], served, "messages", adds_special_tokens=adds_special_tokens)
    else:
        prompts = separate(asked.prompt if isinstance(asked.prompt, str) else list(asked.prompt))
        (tokens,) = await encode(prompts, served, adds_special_tokens=adds_special_tokens)
    return tokens
