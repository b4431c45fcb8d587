"""The ASGI app: all HTTP routes, the access check before them, and the rendering of their errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from radixkv.errors import ContextLengthExceeded, InvalidRequest, RequestError, UnsupportedFeature
from radixkv.frontend.adapter_loads import AdapterLoads
from radixkv.frontend.api.adapters import add_adapter_routes
from radixkv.frontend.api.admin import add_admin_routes
from radixkv.frontend.api.anthropic.routes import add_messages_routes
from radixkv.frontend.api.anthropic.translation import parse_messages_prompt
from radixkv.frontend.api.doctor import add_doctor_route
from radixkv.frontend.api.embeddings.routes import add_embeddings_route
from radixkv.frontend.api.explain import add_explain_route
from radixkv.frontend.api.lifetimes import add_lifetime_routes
from radixkv.frontend.api.match import add_match_route
from radixkv.frontend.api.openai.routes import add_models_routes, add_openai_routes
from radixkv.frontend.api.rerank.routes import add_rerank_routes
from radixkv.frontend.api.responses.routes import add_responses_route
from radixkv.frontend.api.responses.translation import parse_responses_prompt
from radixkv.frontend.api.server_info import add_server_info_routes
from radixkv.frontend.api.sglang.routes import add_generate_route
from radixkv.frontend.api.tables import add_tables_route
from radixkv.frontend.api.tokenize import add_tokenize_routes
from radixkv.frontend.api.ui.routes import add_ui_routes
from radixkv.frontend.cache_diagnostics.diagnosis import CacheDiagnostics
from radixkv.frontend.engine_client import EngineClient
from radixkv.frontend.http.auth import ApiKeyRequired, LocalOnly
from radixkv.frontend.http.body import BodyReader, name_misspelt_fields
from radixkv.frontend.http.disconnect import ClientDisconnected
from radixkv.frontend.http.error_response import error_response
from radixkv.frontend.http.errors import MethodNotAllowed, RouteNotFound
from radixkv.frontend.http.open_requests import NotedRequests
from radixkv.frontend.http.openapi import DocumentedApp
from radixkv.frontend.http.request_ids import REQUEST_ID_HEADER, RequestIds
from radixkv.frontend.metrics.aliases import MetricAliases
from radixkv.frontend.metrics.prometheus import Metrics
from radixkv.frontend.served_model import ServedModel
from radixkv.settings.compat import Place, Refusal, refusals
from radixkv.settings.config import Task
from radixkv.settings.server_config import MetricsCompat
from radixkv.version import __version__

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that left; nobody reads it."""

ROUTES_OF_TASKS: Mapping[Task, Sequence[str]] = {
    "generate": (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/generate",
    ),
    "embed": ("/v1/embeddings",),
    "score": ("/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score"),
}
"""The routes that a server has only with one task."""


def build_app(
    client: EngineClient,
    served_model: ServedModel,
    adapter_loads: AdapterLoads,
    metrics: Metrics,
    body_reader: BodyReader,
    *,
    api_key: str | None,
    tenant_keys: Mapping[str, str],
    allowed_origins: Sequence[str],
    metrics_compat: MetricsCompat | None,
    explain_contents: bool,
    settings: Mapping[str, Any],
) -> ASGIApp:
    """Builds the app with all routes on one runtime client, behind the key check or the local-only check.

    Args:
        client: sends the requests.
        served_model: the one model.
        adapter_loads: loads and unloads its adapters.
        metrics: what ``/metrics`` and ``/v1/loads`` show.
        body_reader: reads all request bodies.
        api_key: the key that clients must send, or with tenants the operator's.
        tenant_keys: the name of the tenant that has a key, by key. Without any key only programs of this machine
            are admitted.
        allowed_origins: web sites whose pages may use the server.
        metrics_compat: the engine under whose names metrics are exported in addition.
        explain_contents: whether ``/cache/explain`` and ``/cache/tree`` reveal which tokens are cached.
        settings: what ``/server_info`` shows, as ``public_settings`` returns it.
    """
    if api_key is None and not tenant_keys:
        access_check = Middleware(LocalOnly, origins=allowed_origins)
    else:
        access_check = Middleware(ApiKeyRequired, key=api_key, tenant_keys=tenant_keys)
    page_size = served_model.ready.page_size
    aliases = None if metrics_compat is None else MetricAliases(metrics_compat, served_model.name, page_size)
    answered = f"this server answers {', '.join(ROUTES_OF_TASKS[served_model.task])}"
    app = DocumentedApp(
        body_reader,
        title="radixkv",
        version=__version__,
        description="A server with an API key needs the header Authorization: Bearer KEY.",
        redirect_slashes=False,
        around_all=[
            Middleware(RequestIds),
            *([_cors(allowed_origins)] if allowed_origins else ()),
        ],
        middleware=[access_check, Middleware(NotedRequests, requests=adapter_loads.requests)],
        exception_handlers={
            RequestError: _render_error,
            ContextLengthExceeded: partial(_render_too_long, served_model),
            HTTPException: partial(_render_http_exception, answered),
            ClientDisconnected: _render_nothing,
            Exception: _render_fault,
        },
    )
    diagnostics = CacheDiagnostics(served_model.ready.state_block_tokens)
    add_models_routes(app, served_model)
    match served_model.task:
        case "generate":
            add_openai_routes(app, client, served_model)
            add_responses_route(app, client, served_model, diagnostics)
            add_messages_routes(app, client, served_model, diagnostics)
            add_generate_route(app, client, served_model)
        case "embed":
            add_embeddings_route(app, client, served_model)
        case "score":
            add_rerank_routes(app, client, served_model)
    add_admin_routes(app, client, served_model, metrics, aliases, diagnostics.counts)
    add_adapter_routes(app, adapter_loads)
    add_tokenize_routes(app, served_model)
    chats = {"/v1/messages": parse_messages_prompt, "/v1/responses": parse_responses_prompt}
    add_explain_route(app, client, served_model, chats, explain_contents=explain_contents)
    add_match_route(app, client, served_model)
    add_doctor_route(app, client, served_model)
    add_tables_route(app, client, served_model)
    add_ui_routes(app, client, served_model, explain_contents=explain_contents)
    add_lifetime_routes(app, client, served_model)
    add_server_info_routes(app, client, served_model, metrics, settings)
    for task, paths in ROUTES_OF_TASKS.items():
        if task != served_model.task:
            refuse = partial(_refuse_task, task, served_model.task)
            for path in paths:
                app.add_api_route(path, refuse, methods=["POST"], include_in_schema=False)
    for path, refusal in refusals(Place.ROUTE, answered).items():
        app.add_api_route(path, partial(_refuse_route, refusal), methods=["GET", "POST"], include_in_schema=False)
    return app


def _cors(origins: Sequence[str]) -> Middleware:
    """Allows web pages of these origins to send requests and to read the responses, errors included.

    It wraps the access check because a browser sends its preflight request without the key. Of a stream, only the
    head and the end pass through it: ``Connection.write_part`` writes the rest.
    """
    return Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=[REQUEST_ID_HEADER],
    )


async def _refuse_route(refusal: Refusal, request: Request) -> Response:
    error = refusal.error()
    error.param = None  # a path is no field
    raise error


async def _refuse_task(needed: Task, task: Task, request: Request) -> Response:
    raise UnsupportedFeature(
        f"{request.url.path} is not supported by this server, which runs with --task {task}; start one with "
        f"--task {needed}"
    )


async def _render_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return name_misspelt_fields(request, error_response(error, request.url.path))


async def _render_too_long(served_model: ServedModel, request: Request, error: Exception) -> Response:
    """Adds that the pool is the limit, where it is: most code that raises the error knows only the number."""
    assert isinstance(error, ContextLengthExceeded)
    if error.reason is None and error.limit != served_model.ready.max_model_len:
        error.reason = served_model.ready.pool_limit
    return name_misspelt_fields(request, error_response(error, request.url.path))


async def _render_http_exception(answered: str, request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return error_response(RouteNotFound(f"there is no such path; {answered}"), request.url.path)
    if error.status_code == 405:
        allowed = ", ".join(sorted((error.headers or {})["Allow"].split(", ")))
        not_allowed = MethodNotAllowed(f"this path does not take this method; use {allowed}")
        response = error_response(not_allowed, request.url.path)
        response.headers["Allow"] = allowed
        return response
    return error_response(InvalidRequest(error.detail), request.url.path)


async def _render_nothing(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _render_fault(request: Request, error: Exception) -> Response:
    response = error_response(RequestError("the server failed on this request; its log says why"), request.url.path)
    response.headers["Connection"] = "close"  # uvicorn closes it now; without the header clients would reuse it
    return response
