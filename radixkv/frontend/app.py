"""All HTTP routes in one app, the guard before them, and how their errors look."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from radixkv.config import EngineConfig, ServerConfig
from radixkv.errors import ContextLengthExceeded, InvalidRequest, RequestError, UnsupportedFeature
from radixkv.frontend.api.admin import native_routes
from radixkv.frontend.api.explain import explain_routes
from radixkv.frontend.api.openai.routes import openai_routes
from radixkv.frontend.api.server_info import about_routes
from radixkv.frontend.api.sglang.routes import generate_routes
from radixkv.frontend.api.tokenize import tokenize_routes
from radixkv.frontend.client import Client
from radixkv.frontend.http.auth import KeyRequired, LocalOnly
from radixkv.frontend.http.body import Bodies
from radixkv.frontend.http.disconnect import ClientGone
from radixkv.frontend.http.error_response import error_response
from radixkv.frontend.http.errors import MethodNotAllowed, RouteNotFound
from radixkv.frontend.http.route import route
from radixkv.frontend.metrics.aliases import Repeat
from radixkv.frontend.metrics.prometheus import Metrics
from radixkv.frontend.served_model import Served

CLIENT_CLOSED_REQUEST = 499

NOT_BUILT = (
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
    "/v1/moderations",
    "/v1/audio/speech",
    "/v1/audio/transcriptions",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/encode",
    "/pooling",
    "/classify",
    "/invocations",
    "/abort_request",
    "/sleep",
    "/wake_up",
    "/pause",
    "/resume",
    "/start_profile",
    "/stop_profile",
)


def build_app(
    client: Client, served: Served, metrics: Metrics, bodies: Bodies, engine: EngineConfig, server: ServerConfig
) -> ASGIApp:
    """All routes over one client, and the guard before them."""
    if server.api_key is None:
        guard = Middleware(LocalOnly, origins=server.allowed_origins)
    else:
        guard = Middleware(KeyRequired, key=server.api_key)
    compat = server.metrics_compat
    repeat = None if compat is None else Repeat(compat, served.name, served.ready.page_size)
    app = FastAPI(
        openapi_url=None,
        redirect_slashes=False,
        routes=[
            *openai_routes(client, served, bodies),
            *generate_routes(client, served, bodies),
            *native_routes(client, metrics, repeat),
            *tokenize_routes(served, bodies),
            *explain_routes(client, served, bodies, explain_contents=server.may_explain_contents),
            *about_routes(client, served, metrics, engine, server),
            *(route(path, _refuse_route, "GET", "POST") for path in NOT_BUILT),
        ],
        middleware=[guard],
        exception_handlers={
            RequestError: _render_error,
            ContextLengthExceeded: partial(_render_too_long, served),
            HTTPException: _render_http_exception,
            ClientGone: _render_nothing,
            Exception: _render_fault,
        },
    )
    return _shown_to_pages(app, server.allowed_origins) if server.allowed_origins else app


def _shown_to_pages(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Lets browsers send what pages of these origins ask for, and show them the replies, also those of errors.

    Around everything, as browsers ask first, and send no key with that. Of a stream only head and end pass here.
    """
    return CORSMiddleware(app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])


async def _refuse_route(request: Request) -> Response:
    raise UnsupportedFeature(
        f"{request.url.path} is not supported in this release, which answers /v1/chat/completions, /v1/completions "
        "and /generate"
    )


async def _render_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error)


async def _render_too_long(served: Served, request: Request, error: Exception) -> Response:
    """With the pool, where that is what limits: what raises it knows the limit only."""
    assert isinstance(error, ContextLengthExceeded)
    if served.narrowness is None:
        return error_response(error)
    return error_response(ContextLengthExceeded(f"{error} ({served.narrowness})", param=error.param))


async def _render_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return error_response(
            RouteNotFound("there is no such path; OpenAI's begin with /v1, such as /v1/chat/completions")
        )
    if error.status_code == 405:
        allowed = ", ".join(sorted((error.headers or {})["Allow"].split(", ")))
        refusal = error_response(MethodNotAllowed(f"this path does not take {request.method}; use {allowed}"))
        refusal.headers["Allow"] = allowed
        return refusal
    return error_response(InvalidRequest(error.detail))


async def _render_nothing(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _render_fault(request: Request, error: Exception) -> Response:
    reply = error_response(RequestError("the server failed on this request; its log says why"))
    reply.headers["Connection"] = "close"  # as uvicorn does now, without a word to clients that would use it again
    return reply
