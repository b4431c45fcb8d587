"""The HTTP routes: parse, hand to the client, render."""

from __future__ import annotations

import time

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from radixkv.errors import InvalidRequest, RequestError, UnsupportedFeature
from radixkv.frontend.bodies import Bodies
from radixkv.frontend.client import Client
from radixkv.frontend.completion import Completion
from radixkv.frontend.failure import MethodNotAllowed, RouteNotFound, error_response
from radixkv.frontend.guard import LocalOnly
from radixkv.frontend.metrics import Metrics
from radixkv.frontend.native import native_routes
from radixkv.frontend.openai import Served, to_prompts
from radixkv.frontend.schema import parse_completion
from radixkv.frontend.streaming import ClientGone, EventStream, unless_gone

CLIENT_CLOSED_REQUEST = 499

NOT_BUILT = (
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/loads",
    "/generate",
    "/reset_prefix_cache",
    "/server_info",
    "/get_server_info",
    "/model_info",
    "/get_model_info",
    "/tokenize",
    "/detokenize",
    "/version",
)


def build_app(client: Client, served: Served, metrics: Metrics, bodies: Bodies) -> FastAPI:
    """All routes over one client."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    app.add_middleware(LocalOnly)
    app.include_router(native_routes(client, metrics))
    app.add_exception_handler(RequestError, _render_error)
    app.add_exception_handler(HTTPException, _render_http_exception)
    app.add_exception_handler(ClientGone, _render_nothing)
    app.add_exception_handler(Exception, _render_fault)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        arrived = time.monotonic()
        asked = parse_completion(await bodies.read_json(request), served.max_prompt_and_answer)
        prompts = await unless_gone(request.receive, to_prompts(asked, served))
        completion = Completion(asked, served, prompts, arrived=arrived)
        if asked.stream:
            return EventStream(completion.events(client))
        reply = await unless_gone(request.receive, completion.whole(client))
        return Response(msgspec.json.encode(reply), media_type="application/json")

    @app.get("/v1/models")
    async def models() -> Response:
        model = {
            "id": served.name,
            "object": "model",
            "created": served.created,
            "owned_by": "radixkv",
            "root": served.root,
            "max_model_len": served.ready.max_model_len,
        }
        return JSONResponse({"object": "list", "data": [model]})

    for path in NOT_BUILT:
        app.add_api_route(path, _refuse_route, methods=["GET", "POST"])
    return app


async def _refuse_route(request: Request) -> Response:
    raise UnsupportedFeature(f"{request.url.path} is not supported in this release; use /v1/completions")


async def _render_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error)


async def _render_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return error_response(RouteNotFound("there is no such path"))
    if error.status_code == 405:
        return error_response(MethodNotAllowed(f"this path does not take {request.method}"))
    return error_response(InvalidRequest(error.detail))


async def _render_nothing(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _render_fault(request: Request, error: Exception) -> Response:
    return error_response(RequestError("the server failed on this request; its log says why"))
