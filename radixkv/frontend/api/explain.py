"""The route ``/cache/explain``: how much of a prompt is cached, and why not more."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from radixkv.errors import InvalidRequest, shortened
from radixkv.frontend.arrival import tenant_of
from radixkv.frontend.chat import Chat, prompt_tokens
from radixkv.frontend.engine_client import EngineClient
from radixkv.frontend.http.body import Parse
from radixkv.frontend.http.body_decoder import BodyDecoder
from radixkv.frontend.http.disconnect import cancel_on_disconnect
from radixkv.frontend.http.openapi import DocumentedApp
from radixkv.frontend.served_model import ServedModel
from radixkv.frontend.text_request import CACHE_PROMPT_CHECKS, CachePromptRequest, encode_prompt
from radixkv.settings.compat import Place, refusals
from radixkv.text.tokenizer import Tokenizer
from radixkv.wire.cache_messages import Explained
from radixkv.wire.messages import unpack_tokens

_PATHS = ("", "/v1/completions", "/v1/chat/completions")
"""The paths whose bodies this route reads by itself."""


def add_explain_route(
    app: DocumentedApp,
    client: EngineClient,
    served_model: ServedModel,
    chats: Mapping[str, Parse[Chat]],
    *,
    explain_contents: bool,
) -> None:
    """Adds the route ``/cache/explain``.

    Args:
        app: gets the route.
        client: asks the runtime.
        served_model: the model.
        chats: by path, for APIs whose bodies are neither completions nor chats: reads the prompt of a body.
        explain_contents: whether the answers also show tokens of other clients.
    """

    @app.post("/cache/explain", openapi_extra=app.json_body(CachePromptRequest))
    async def explain(request: Request) -> Response:
        """How much of a prompt is cached, and why not more; with ?path=/v1/messages, of a body for that path."""
        path = request.query_params.get("path", "")
        tenant, max_tokens = tenant_of(request), served_model.max_prompt_and_answer
        if path in chats:
            chat = await app.read_body(request, chats[path], max_tokens)
            model, cache_salt = served_model.named(chat.model), chat.cache_salt
            encoding = prompt_tokens(chat, model, tenant)
        elif path in _PATHS:
            body = await app.read_body(request, _explain.decode, max_tokens)
            model, cache_salt = served_model.named(body.model), body.cache_salt or ""
            encoding = encode_prompt(body, served_model, tenant)
        else:
            paths = ", ".join((*_PATHS[1:], *chats))
            raise InvalidRequest(
                f"path {shortened(path)} has no prompts to explain; give one of {paths}", param="path"
            )
        tokens = await cancel_on_disconnect(request.receive, encoding)
        namespace = model.namespace(tenant, cache_salt)
        explained = await client.explain(tokens, namespace, contents=explain_contents)
        fields = explanation(explained, served_model.tokenizer, contents=explain_contents)
        if request.query_params.get("return_token_ids", "false").lower() in ("true", "1"):
            fields["prompt_token_ids"] = unpack_tokens(tokens)
        return Response(msgspec.json.encode(fields), media_type="application/json")


def explanation(explained: Explained, tokenizer: Tokenizer | None, *, contents: bool) -> dict[str, Any]:
    """Returns the JSON object, without fields that do not apply.

    Args:
        explained: the runtime's reply.
        tokenizer: gives the texts of tokens; None for ids only.
        contents: whether the query allowed tokens of other clients.
    """
    fields: dict[str, Any] = {
        "prompt_tokens": explained.n_tokens,
        "cached_tokens": explained.n_cached,
        "reason": explained.reason,
        "text": _summary(explained, tokenizer, contents),
    }
    if explained.first_difference is not None:
        fields["first_difference"] = {
            "position": explained.first_difference,
            "prompt_token": _token(explained.token, tokenizer),
            "cached_token": _token(explained.cached_token, tokenizer),
        }
    if explained.n_without_state:
        fields["without_state_tokens"] = explained.n_without_state
    if explained.n_cached_elsewhere is not None:
        fields["cached_elsewhere_tokens"] = explained.n_cached_elsewhere
    if explained.n_in_host:
        fields["host"] = {"tokens": explained.n_in_host, "is_loaded": explained.is_loaded}
        if explained.min_loaded_tokens is not None:
            fields["host"]["min_loaded_tokens"] = explained.min_loaded_tokens  # JSON has null for infinite
    if explained.is_demoted:
        fields["is_demoted"] = True
    if explained.n_on_disk:
        fields["storage"] = {"tokens": explained.n_on_disk, "is_fetched": explained.is_fetched}
        if explained.n_from_shared is not None:
            fields["storage"] |= {
                "fetched_tokens": explained.n_fetched,
                "shared_store_tokens": min(explained.n_fetched, explained.n_from_shared),
            }
    if explained.n_pinned:
        fields["pinned"] = {"tokens": explained.n_pinned, "seconds_left": explained.pin_seconds_left}
    return fields


def _token(token: int | None, tokenizer: Tokenizer | None) -> dict[str, Any] | None:
    if token is None:
        return None
    return {"id": token, "text": None if tokenizer is None else tokenizer.token_text(token)}


def _summary(explained: Explained, tokenizer: Tokenizer | None, contents: bool) -> str:
    how_much = f"{explained.n_cached} of {explained.n_tokens} prompt tokens are cached"
    if explained.is_loaded:
        how_much += f", {explained.n_in_host} of them in the host tier, from which a request loads them"
    elif explained.n_in_host:
        how_much += (
            f"; the host tier has {explained.n_in_host} more, which a request computes: {_why_computed(explained)}"
        )
    if explained.n_on_disk:
        then = "fetches and loads" if explained.is_fetched else "computes"
        how_much += f"; the store behind the host tier has {explained.n_on_disk} more, which a request {then}"
        if explained.n_from_shared is not None:
            n_shared = min(explained.n_fetched, explained.n_from_shared)
            how_much += f": {explained.n_fetched - n_shared} from disk and {n_shared} from the shared store"
    if explained.n_pinned:
        how_much += f"; the first {explained.n_pinned} are pinned for {explained.pin_seconds_left:.0f} s more"
    if explained.is_demoted:
        how_much += "; they are the first to be evicted" + (" after that" if explained.n_pinned else "")
    pages = f"pages match up to token {explained.n_cached + explained.n_without_state}"
    state = "state of recurrent layers or windows"
    match explained.reason:
        case "whole" if explained.n_cached == explained.n_tokens - 1:
            why = "the last token of a prompt is always computed"
        case "whole" if explained.n_without_state:
            why = f"{pages}, and the next place for a {state} is not before the prompt's last token"
        case "whole" if explained.first_difference is None:
            why = "these are all full pages of the prompt" if explained.n_cached else "the prompt has no full page"
        case "whole" | "differs":
            why = "other requests went on in another way"
            if not contents:
                why += "; a server with --explain-contents shows the tokens"
            elif explained.first_difference is not None:
                own, cached = _describe(explained.token, tokenizer), _describe(explained.cached_token, tokenizer)
                why += f": token {explained.first_difference} is {own} in the prompt and {cached} in the cache"
        case "evicted":
            why = "the next page was cached but has been evicted"
        case "evicted_or_never_seen":
            why = "the next page is new, or was evicted too long ago to be remembered"
        case "other_namespace" if explained.adapter_elsewhere is not None:
            other = "without an adapter" if not explained.adapter_elsewhere else "with another adapter"
            why = f"{explained.n_cached_elsewhere} are cached {other}, whose KV differs"
        case "other_namespace":
            why = f"{explained.n_cached_elsewhere} are cached under another cache_salt, which is not shared"
        case "invocation" if explained.adapter_elsewhere is not None:
            other = "without an adapter" if not explained.adapter_elsewhere else "with another adapter"
            why = f"the cache goes on as it is computed {other}, whose KV differs"
        case "invocation":
            why = "the adapter's invocation stands elsewhere in what is cached, so KV differs from there on"
        case "no_state":
            where = f"the nearest one before is at {explained.n_cached}" if explained.n_cached else "none is before"
            why = f"{pages}, where no {state} is kept; {where}"
        case _ if contents:
            why = "no earlier request continued from there"
        case _:
            why = "no earlier request with this cache_salt continued from there"
    return f"{how_much}; {why}."


def _why_computed(explained: Explained) -> str:
    if explained.min_loaded_tokens is None:
        return "the load policy is never"
    if math.isinf(explained.min_loaded_tokens):
        return "computing is faster here"
    return f"loading is faster only above {explained.min_loaded_tokens:.0f} tokens"


def _describe(token: int | None, tokenizer: Tokenizer | None) -> str:
    if token is None:
        return "another"
    return str(token) if tokenizer is None else f"{tokenizer.token_text(token)!r} ({token})"


_explain = BodyDecoder(CachePromptRequest, CACHE_PROMPT_CHECKS, refusals(Place.TEXT))
