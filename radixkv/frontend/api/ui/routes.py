"""The routes ``/``, ``/ui``, ``/cache/tree`` and ``/cache/tree/events``: what the cache holds, as page and JSON."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from radixkv.frontend.api.ui.watch import CacheWatch
from radixkv.frontend.engine_client import EngineClient
from radixkv.frontend.http.openapi import DocumentedApp
from radixkv.frontend.http.response_docs import EVENTS
from radixkv.frontend.http.sse import EventStream
from radixkv.frontend.served_model import ServedModel


def add_ui_routes(
    app: DocumentedApp, client: EngineClient, served_model: ServedModel, *, explain_contents: bool
) -> None:
    """Adds the page and its routes; with ``explain_contents`` these also show tokens of clients."""
    watch, page = CacheWatch(client, served_model, contents=explain_contents), _Page()

    @app.api_route("/", methods=["GET", "HEAD"], status_code=307, response_class=RedirectResponse)
    async def root(request: Request) -> Response:
        """Leads to the page ``/ui``; needs no key."""
        return RedirectResponse("ui")  # relative, because a proxy may give the server a path of its own

    @app.api_route("/ui", methods=["GET", "HEAD"], response_class=HTMLResponse)
    async def ui(request: Request) -> Response:
        """A page that shows what the cache holds and why it missed; needs no key itself, but asks for it."""
        return page.response()

    @app.get("/cache/tree")
    async def tree(request: Request) -> Response:
        """The largest nodes of each tier's tree, with the counters of pool, tiers and load."""
        return Response(await watch.snapshot(), media_type="application/json")

    @app.get("/cache/tree/events", response_class=Response, responses=EVENTS)
    async def tree_events(request: Request) -> Response:
        """The same as a stream of server-sent events, one a second."""
        return EventStream(watch.events(), end=b"")


class _Page:
    """The page ``/ui``, put together of its files, with the policy that lets a browser run these only."""

    def __init__(self) -> None:
        folder = files(__package__)
        style = folder.joinpath("page.css").read_text("utf-8")
        script = "\n".join(
            folder.joinpath(name).read_text("utf-8") for name in ("explain.js", "tables.js", "page.js")
        )
        document = folder.joinpath("page.html").read_text("utf-8")
        for place, content in (("<style></style>", style), ("<script></script>", script)):
            assert document.count(place) == 1, place
            document = document.replace(place, place.replace("><", f">{content}<"))
        self._document = document
        policy = (
            "default-src 'none'",
            f"script-src '{_hash(script)}'",
            f"style-src '{_hash(style)}'",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
        self._headers = {
            "Content-Security-Policy": "; ".join(policy),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        }

    def response(self) -> Response:
        """Returns the document, which has no data of the server."""
        return HTMLResponse(self._document, headers=self._headers)


def _hash(content: str) -> str:
    """Returns the source expression that allows an inline element with this content."""
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"
