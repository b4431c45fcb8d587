"""The route ``/cache/pin``: keeps a cached prompt for some time."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from radixkv.frontend.client import RuntimeClient
from radixkv.frontend.http.body import BodyReader
from radixkv.frontend.http.body_decoder import BodyDecoder
from radixkv.frontend.http.disconnect import cancel_on_disconnect
from radixkv.frontend.http.openapi import DocumentedApp
from radixkv.frontend.served_model import ServedModel
from radixkv.frontend.tenant import tenant_of
from radixkv.frontend.text_request import CACHE_PROMPT_CHECKS, CachePromptRequest, encode_prompt
from radixkv.settings.compat import Place, refusals
from radixkv.settings.limits import DEFAULT_TTL_S, parse_ttl
from radixkv.wire.cache_messages import Pinned


class PinRequest(CachePromptRequest, kw_only=True):
    """The body of ``POST /cache/pin``."""

    ttl: Annotated[
        str | None,
        msgspec.Meta(
            description="Time to live, such as 90s, 5m or 1h; default: 5m. 0s ends the pin of this prompt."
        ),
    ] = None


def add_pin_route(
    app: DocumentedApp, client: RuntimeClient, served_model: ServedModel, body_reader: BodyReader
) -> None:
    """Adds the route ``/cache/pin``."""

    @app.post("/cache/pin", openapi_extra=app.json_body(PinRequest))
    async def pin(request: Request) -> Response:
        """Keeps what is cached of a prompt from eviction for some time, as long as anything else can be evicted."""
        tenant = tenant_of(request)
        body = await body_reader.read(request, _pin.decode, served_model.max_prompt_and_answer)
        ttl_s = DEFAULT_TTL_S if body.ttl is None else parse_ttl(body.ttl, "ttl")
        tokens = await cancel_on_disconnect(request.receive, encode_prompt(body, served_model, tenant))
        return JSONResponse(_report(await client.pin(tokens, body.cache_salt or "", ttl_s, tenant=tenant)))


def _report(pinned: Pinned) -> dict[str, Any]:
    return {
        "prompt_tokens": pinned.n_tokens,
        "pinned_tokens": pinned.n_pinned,
        "seconds_left": pinned.seconds_left,
    }


_pin = BodyDecoder(PinRequest, CACHE_PROMPT_CHECKS, refusals(Place.TEXT))
