"""The route ``/cache/invalidate``: drops what is cached of a prefix, or under a salt."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from radixkv.errors import InvalidRequest
from radixkv.frontend.client import RuntimeClient
from radixkv.frontend.http.body import BodyReader
from radixkv.frontend.http.body_decoder import BodyDecoder
from radixkv.frontend.http.disconnect import cancel_on_disconnect
from radixkv.frontend.http.openapi import DocumentedApp
from radixkv.frontend.served_model import ServedModel
from radixkv.frontend.tenant import tenant_of
from radixkv.frontend.text_request import CACHE_PROMPT_CHECKS, CachePromptRequest, encode_prompt
from radixkv.settings.compat import Place, refusals
from radixkv.settings.limits import check_cache_salt, check_prefix
from radixkv.wire.cache_messages import Invalidated


class InvalidateRequest(CachePromptRequest, kw_only=True):
    """The body of ``POST /cache/invalidate``; without prompt and messages it means all that ``cache_salt`` has."""

    add_generation_prompt: bool | None = False

    def adds_generation_prompt(self) -> bool:
        """Returns ``add_generation_prompt`` or its default: later turns continue the messages, not the header."""
        return bool(self.add_generation_prompt)


def add_invalidate_route(
    app: DocumentedApp, client: RuntimeClient, served_model: ServedModel, body_reader: BodyReader
) -> None:
    """Adds the route ``/cache/invalidate``."""

    @app.post("/cache/invalidate", openapi_extra=app.json_body(InvalidateRequest))
    async def invalidate(request: Request) -> Response:
        """Drops what is cached of a prefix and of all that continues it, or everything with a salt."""
        tenant = tenant_of(request)
        body = await body_reader.read(request, _invalidate.decode, served_model.max_prompt_and_answer)
        tokens = await cancel_on_disconnect(request.receive, _encode(body, served_model, tenant))
        return JSONResponse(_report(await client.invalidate(tokens, body.cache_salt or "", tenant=tenant)))


_invalidate = BodyDecoder(InvalidateRequest, CACHE_PROMPT_CHECKS, refusals(Place.TEXT))


async def _encode(body: InvalidateRequest, served_model: ServedModel, tenant: str) -> bytes:
    """Returns the tokens of the prefix; none for everything with the body's salt."""
    if body.prompt is not None or body.messages is not None:
        tokens = await encode_prompt(body, served_model, tenant)
        check_prefix(len(tokens) // 4, served_model.ready.page_size)
        return tokens
    served_model.check_name(body.model)
    if body.cache_salt is None:
        raise InvalidRequest(
            "give prompt or messages, or only a cache_salt to drop all that is cached with it; "
            "/flush_cache empties the whole cache",
            param="prompt",
        )
    check_cache_salt(body.cache_salt)
    return b""


def _report(invalidated: Invalidated) -> dict[str, Any]:
    tiers = {
        "device": invalidated.n_on_device,
        "host": invalidated.n_in_host,
        "storage": invalidated.n_on_disk,
    }
    return {
        "pages_dropped": {tier: n_pages for tier, n_pages in tiers.items() if n_pages is not None},
        "pages_held": invalidated.n_held,
    }
