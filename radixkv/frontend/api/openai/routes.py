"""OpenAI's endpoints: parse, hand to the client, render."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from radixkv.frontend.api.openai.chat import ChatShape
from radixkv.frontend.api.openai.completion import CompletionShape
from radixkv.frontend.api.openai.prompts import chat_prompt, completion_prompts, echoed_texts
from radixkv.frontend.api.openai.response import Reply
from radixkv.frontend.api.openai.schema import parse_chat, parse_completion
from radixkv.frontend.client import Client
from radixkv.frontend.http.body import Bodies
from radixkv.frontend.http.disconnect import unless_gone
from radixkv.frontend.http.route import route
from radixkv.frontend.http.sse import EventStream
from radixkv.frontend.request_limits import check_model
from radixkv.frontend.served_model import Served


def openai_routes(client: Client, served: Served, bodies: Bodies) -> list[Route]:
    """``/v1/models``, ``/v1/completions`` and ``/v1/chat/completions``."""

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model(served)]})

    async def model(request: Request) -> Response:
        check_model(request.path_params["name"], served)
        return JSONResponse(_model(served))

    async def completions(request: Request) -> Response:
        arrived = time.monotonic()
        asked = await bodies.read(request, parse_completion, served.max_prompt_and_answer)
        prompts = await unless_gone(request.receive, completion_prompts(asked, served))
        echoed = await echoed_texts(asked, served, prompts) if asked.echo else None
        shape = CompletionShape(asked, served.name)
        reply = Reply(asked, shape, served, prompts, echoed=echoed, arrived=arrived)
        return await _response(request, reply, client, streams=bool(asked.stream))

    async def chat_completions(request: Request) -> Response:
        arrived = time.monotonic()
        asked = await bodies.read(request, parse_chat, served.max_prompt_and_answer)
        prompt = await unless_gone(request.receive, chat_prompt(asked, served))
        reply = Reply(asked, ChatShape(asked, served.name), served, [prompt], arrived=arrived)
        return await _response(request, reply, client, streams=bool(asked.stream))

    return [
        route("/v1/completions", completions, "POST"),
        route("/v1/chat/completions", chat_completions, "POST"),
        route("/v1/models", models, "GET"),
        route("/v1/models/{name:path}", model, "GET"),
    ]


async def _response(request: Request, reply: Reply, client: Client, *, streams: bool) -> Response:
    if streams:
        return EventStream(reply.events(client))
    whole = await unless_gone(request.receive, reply.whole(client))
    return Response(whole, media_type="application/json")


def _model(served: Served) -> dict[str, object]:
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "radixkv",
        "root": served.root,
        "max_model_len": served.max_prompt_and_answer,
    }
