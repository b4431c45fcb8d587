"""The routes ``/``, ``/ui``, ``/cache/tree`` and ``/cache/tree/events``: what the cache holds, as page and JSON."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from radixkv.frontend.api.ui.page import Page
from radixkv.frontend.api.ui.watch import CacheWatch
from radixkv.frontend.client import RuntimeClient
from radixkv.frontend.http.openapi import DocumentedApp
from radixkv.frontend.http.response_docs import EVENTS
from radixkv.frontend.http.sse import EventStream
from radixkv.frontend.served_model import ServedModel


def add_ui_routes(
    app: DocumentedApp, client: RuntimeClient, served_model: ServedModel, *, explain_contents: bool
) -> None:
    """Adds the page and its routes; with ``explain_contents`` these also show tokens of clients."""
    watch, page = CacheWatch(client, served_model, contents=explain_contents), Page()

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
