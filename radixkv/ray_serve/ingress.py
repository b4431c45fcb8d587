"""The HTTP side of the Ray Serve application, which sends requests to the replicas of servers."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from radixkv.errors import RequestError, RuntimeDied, UnsupportedFeature
from radixkv.frontend.http.auth import foreign_refusal
from radixkv.frontend.http.error_response import retry_after
from radixkv.frontend.http.errors import BodyTooLarge, RouteNotFound, error_body, status_of
from radixkv.frontend.http.sse import DONE_EVENT, error_event
from radixkv.ray_serve.messages import ForwardedRequest, NotTaken, ReplyHead

ATTEMPTS = 3
"""Servers that a request is sent to, one after another, while they refuse it before they begin."""
OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})
FORWARDED_PATHS = ("/v1/", "/generate", "/tokenize", "/detokenize", "/version")
"""Beginnings of the paths that any server can answer. Others, such as ``/metrics``, are about one server."""
ADAPTER_PATHS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
"""Paths that change one server: requests would find the adapter, or not, by the server that they come to."""

Pieces = AsyncGenerator[ReplyHead | NotTaken | bytes, None]


class Ingress:
    """Receives the clients' requests.

    Args:
        servers: the replicas.
        has_key: whether clients send a key, which the servers compare. Without one, only programs of this machine
            may use the application, and no web pages of other sites.
        max_body_bytes: the longest body.
    """

    def __init__(self, servers: DeploymentHandle, *, has_key: bool, max_body_bytes: int) -> None:
        self._servers = servers.options(stream=True)
        self._has_key = has_key
        self._max_body_bytes = max_body_bytes

    async def __call__(self, request: Request) -> Response:
        """Answers a request. Called by Ray Serve."""
        path = request.url.path
        try:
            if path in OPEN_PATHS:
                return JSONResponse({})
            if not self._has_key and (refusal := foreign_refusal(request.headers, ())) is not None:
                raise refusal
            if not path.startswith(FORWARDED_PATHS):
                raise RouteNotFound(f"{path} is not answered here; use one of {', '.join(FORWARDED_PATHS)}")
            if path in ADAPTER_PATHS:
                raise UnsupportedFeature(
                    f"{path} would change one server of several; start all of them with the adapter: "
                    "--lora-modules in the application's flags"
                )
            return await self._forward(await self._read(request))
        except RequestError as error:
            return _refusal(error, path)

    async def _read(self, request: Request) -> ForwardedRequest:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self._max_body_bytes:
                raise BodyTooLarge(
                    f"the body is longer than {self._max_body_bytes} bytes; send less, or give the application a "
                    "greater max_body_bytes, and its servers a greater --max-body-bytes"
                )
        query = f"?{request.url.query}" if request.url.query else ""
        return ForwardedRequest(request.method, request.url.path + query, request.headers.items(), bytes(body))

    async def _forward(self, request: ForwardedRequest) -> Response:
        """Sends a request to one server after another, until one has begun it.

        Raises:
            RuntimeDied: a server was lost that may have begun it. It is not sent again: the client decides.
        """
        for _ in range(ATTEMPTS):
            pieces = _pieces(self._servers.forward.remote(request))
            first = await anext(pieces)
            if isinstance(first, ReplyHead):
                return await _reply(first, pieces, request.path)
            await pieces.aclose()
        assert isinstance(first, NotTaken), "a reply begins with its head, or is refused as a whole"
        return Response(first.body, first.status, dict(first.headers))


def _refusal(error: RequestError, path: str) -> Response:
    headers = retry_after(error) if status_of(error) == 503 else {}
    return JSONResponse(error_body(error, path), status_of(error), headers)


async def _reply(head: ReplyHead, pieces: Pieces, path: str) -> Response:
    """Returns a stream of events as a stream, and any other reply once it is complete."""
    headers = dict(head.headers)
    if headers.get("Content-Type", "").startswith("text/event-stream"):
        return StreamingResponse(_events(pieces, path), head.status, headers)
    async with aclosing(pieces):
        body = b"".join([piece async for piece in pieces if isinstance(piece, bytes)])
    return Response(body, head.status, headers)


async def _events(pieces: Pieces, path: str) -> AsyncGenerator[bytes, None]:
    """Yields the pieces of a stream of events; ends it with an event of the error if its server is lost."""
    async with aclosing(pieces):
        try:
            async for piece in pieces:
                assert isinstance(piece, bytes)
                yield piece
        except RuntimeDied as error:
            yield error_event(error, path)
            yield DONE_EVENT


async def _pieces(response: Any) -> Pieces:
    """Yields what a server yields, and cancels its request if the caller stops reading."""
    is_complete = False
    try:
        async for piece in response:
            yield piece
        is_complete = True
    except RayError as error:
        raise RuntimeDied(f"the server of this request was lost; send it again ({type(error).__name__})") from None
    finally:
        if not is_complete:
            response.cancel()
