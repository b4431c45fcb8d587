"""Routes that say how long something stays cached: dropped at once, pinned, or demoted with its session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from radixkv.errors import InvalidRequest
from radixkv.frontend.arrival import tenant_of
from radixkv.frontend.engine_client import EngineClient
from radixkv.frontend.http.body_decoder import BodyDecoder
from radixkv.frontend.http.disconnect import cancel_on_disconnect
from radixkv.frontend.http.openapi import DocumentedApp
from radixkv.frontend.served_model import ServedModel
from radixkv.frontend.text_request import CACHE_PROMPT_CHECKS, CachePromptRequest, encode_prompt
from radixkv.settings.compat import Place, refusals
from radixkv.wire.cache_messages import Invalidated
from radixkv.wire.namespace import CacheNamespace
from radixkv.wire.request_limits import DEFAULT_TTL_S, check_cache_salt, check_prefix, check_session_id, parse_ttl


class InvalidateRequest(CachePromptRequest, kw_only=True):
    """The body of ``POST /cache/invalidate``; without prompt and messages it means all that ``cache_salt`` has."""

    add_generation_prompt: bool | None = False

    def adds_generation_prompt(self) -> bool:
        """Returns ``add_generation_prompt`` or its default: later turns continue the messages, not the header."""
        return bool(self.add_generation_prompt)


class _Prefix(NamedTuple):
    """What an invalidation drops."""

    tokens: bytes
    """Little-endian int32 ids."""
    namespace: CacheNamespace
    all_adapters: bool = False
    """Whether also what adapters have of these tokens, of the same tenant and salt."""


class PinRequest(CachePromptRequest, kw_only=True):
    """The body of ``POST /cache/pin``."""

    ttl: Annotated[
        str | None,
        msgspec.Meta(
            description="Time to live, such as 90s, 5m or 1h; default: 5m. 0s ends the pin of this prompt."
        ),
    ] = None


class CloseSessionRequest(msgspec.Struct, kw_only=True):
    """The body of ``POST /sessions/{id}/close``, which may be left out."""

    cache_salt: str | None = None
    model: str | None = None
    """That of the session's requests, if they had an adapter."""


def add_lifetime_routes(app: DocumentedApp, client: EngineClient, served_model: ServedModel) -> None:
    """Adds the routes ``/cache/invalidate``, ``/cache/pin`` and ``/sessions/{id}/close``."""
    longest = served_model.max_prompt_and_answer

    @app.post("/cache/invalidate", openapi_extra=app.json_body(InvalidateRequest))
    async def invalidate(request: Request) -> Response:
        """Drops what is cached of a prefix and of all that continues it, or everything with a salt."""
        tenant = tenant_of(request)
        body = await app.read_body(request, _invalidate.decode, longest)
        prefixes = await cancel_on_disconnect(request.receive, _prefixes(body, served_model, tenant))
        invalidated = [
            await client.invalidate(one.tokens, one.namespace, all_adapters=one.all_adapters) for one in prefixes
        ]
        return JSONResponse(_report(invalidated))

    @app.post("/cache/pin", openapi_extra=app.json_body(PinRequest))
    async def pin(request: Request) -> Response:
        """Keeps what is cached of a prompt from eviction for some time, as long as anything else can be evicted."""
        tenant = tenant_of(request)
        body = await app.read_body(request, _pin.decode, longest)
        ttl_s = DEFAULT_TTL_S if body.ttl is None else parse_ttl(body.ttl, "ttl")
        tokens = await cancel_on_disconnect(request.receive, encode_prompt(body, served_model, tenant))
        namespace = served_model.named(body.model).namespace(tenant, body.cache_salt)
        pinned = await client.pin(tokens, namespace, ttl_s)
        return JSONResponse(
            {
                "prompt_tokens": pinned.n_tokens,
                "pinned_tokens": pinned.n_pinned,
                "seconds_left": pinned.seconds_left,
            }
        )

    documented = app.json_body(CloseSessionRequest)
    documented["requestBody"]["required"] = False
    documented["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]

    @app.post("/sessions/{id:path}/close", openapi_extra=documented)
    async def close_session(request: Request) -> Response:
        """Ends a session: what only it has cached is evicted first."""
        session_id, body = request.path_params["id"], CloseSessionRequest()
        if "transfer-encoding" in request.headers or request.headers.get("content-length", "0") != "0":
            body = await app.read_body(request, _close.decode, 0)
        check_session_id(session_id)
        check_cache_salt(body.cache_salt or "")
        namespace = served_model.named(body.model).namespace(tenant_of(request), body.cache_salt)
        closed = await client.close_session(session_id, namespace)
        tiers = {"device": closed.n_on_device, "host": closed.n_in_host}
        pages = {tier: n_pages for tier, n_pages in tiers.items() if n_pages is not None}
        return JSONResponse({"session_id": session_id, "pages_demoted": pages})


async def _prefixes(body: InvalidateRequest, served_model: ServedModel, tenant: str) -> list[_Prefix]:
    """Returns what to drop, in one namespace or, without a ``model``, those of the model and of all adapters.

    An adapter has a prefix of its own if earlier answers stand in its messages in other tokens.
    """
    model = served_model.named(body.model)
    tokens = await _prefix(body, served_model, tenant)
    prefixes = [_Prefix(tokens, model.namespace(tenant, body.cache_salt), all_adapters=body.model is None)]
    if body.model is None and body.messages is not None:
        for adapted in list(served_model.adapted.values()):  # loads and unloads change it meanwhile
            own_tokens = await _prefix(body, adapted, tenant)
            if own_tokens != tokens:
                prefixes.append(_Prefix(own_tokens, adapted.namespace(tenant, body.cache_salt)))
    return list(dict.fromkeys(prefixes))  # adapters of one digest may have several names


async def _prefix(body: InvalidateRequest, served_model: ServedModel, tenant: str) -> bytes:
    """Returns the tokens of the prefix; none for everything with the body's salt."""
    if body.prompt is not None or body.messages is not None:
        tokens = await encode_prompt(body, served_model, tenant)
        check_prefix(len(tokens) // 4, served_model.ready.page_size)
        return tokens
    if body.cache_salt is None:
        raise InvalidRequest(
            "give prompt or messages, or only a cache_salt to drop all that is cached with it; "
            "/flush_cache empties the whole cache",
            param="prompt",
        )
    check_cache_salt(body.cache_salt)
    return b""


def _report(invalidated: Sequence[Invalidated]) -> dict[str, Any]:
    """Returns the sums of all replies."""
    tiers = {
        "device": [one.n_on_device for one in invalidated],
        "host": [one.n_in_host for one in invalidated if one.n_in_host is not None],
        "storage": [one.n_on_disk for one in invalidated if one.n_on_disk is not None],
    }
    return {
        "pages_dropped": {tier: sum(counts) for tier, counts in tiers.items() if counts},
        "pages_held": sum(one.n_held for one in invalidated),
    }


_invalidate = BodyDecoder(InvalidateRequest, CACHE_PROMPT_CHECKS, refusals(Place.TEXT))
_pin = BodyDecoder(PinRequest, CACHE_PROMPT_CHECKS, refusals(Place.TEXT))
_close = BodyDecoder(CloseSessionRequest, {}, {})
