"""The route ``/sessions/{id}/close``: ends a session, so that what only it has cached is evicted first."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from radixkv.frontend.client import RuntimeClient
from radixkv.frontend.http.body import BodyReader
from radixkv.frontend.http.body_decoder import BodyDecoder
from radixkv.frontend.http.openapi import DocumentedApp
from radixkv.frontend.tenant import tenant_of
from radixkv.settings.limits import check_cache_salt, check_session_id


class CloseSessionRequest(msgspec.Struct, kw_only=True):
    """The body of ``POST /sessions/{id}/close``, which may be left out."""

    cache_salt: str | None = None


def add_session_routes(app: DocumentedApp, client: RuntimeClient, body_reader: BodyReader) -> None:
    """Adds the route ``/sessions/{id}/close``."""

    documented = app.json_body(CloseSessionRequest)
    documented["requestBody"]["required"] = False
    documented["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]

    @app.post("/sessions/{id:path}/close", openapi_extra=documented)
    async def close_session(request: Request) -> Response:
        """Ends a session: what only it has cached is evicted first."""
        session_id, body = request.path_params["id"], CloseSessionRequest()
        if "transfer-encoding" in request.headers or request.headers.get("content-length", "0") != "0":
            body = await body_reader.read(request, _close.decode, 0)
        check_session_id(session_id)
        check_cache_salt(body.cache_salt or "")
        closed = await client.close_session(session_id, body.cache_salt or "", tenant=tenant_of(request))
        tiers = {"device": closed.n_on_device, "host": closed.n_in_host}
        pages = {tier: n_pages for tier, n_pages in tiers.items() if n_pages is not None}
        return JSONResponse({"session_id": session_id, "pages_demoted": pages})


_close = BodyDecoder(CloseSessionRequest, {}, {})
