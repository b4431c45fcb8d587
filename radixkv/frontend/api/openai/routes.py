"""OpenAI's endpoints."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from radixkv.frontend.answers import respond
from radixkv.frontend.api.openai.chat_format import ChatFormat
from radixkv.frontend.api.openai.completion_format import CompletionFormat
from radixkv.frontend.api.openai.response import ResponseWriter
from radixkv.frontend.api.openai.schema import (
    ChatRequest,
    CompletionRequest,
    parse_chat,
    parse_completion,
)
from radixkv.frontend.api.openai.translation import completion_prompts, echoed_texts, to_chat
from radixkv.frontend.arrival import Arrival
from radixkv.frontend.chat import chat_prompt
from radixkv.frontend.engine_client import EngineClient
from radixkv.frontend.http.disconnect import cancel_on_disconnect
from radixkv.frontend.http.openapi import DocumentedApp
from radixkv.frontend.served_model import ServedModel


def add_openai_routes(app: DocumentedApp, client: EngineClient, served_model: ServedModel) -> None:
    """Adds the routes ``/v1/completions`` and ``/v1/chat/completions``."""

    @app.post("/v1/completions", openapi_extra=app.json_body(CompletionRequest))
    async def completions(request: Request) -> Response:
        """OpenAI's completions of one or several prompts."""
        arrived = Arrival.of(request)
        body = await app.read_body(request, parse_completion, served_model.max_prompt_and_answer)
        model = served_model.named(body.model)
        prompts = await cancel_on_disconnect(request.receive, completion_prompts(body, model, arrived.tenant))
        echoed = await echoed_texts(body, model, prompts) if body.echo else None
        response_format = CompletionFormat(body, model, prompts[0].id)
        writer = ResponseWriter(body, response_format, model, prompts, client, echoed=echoed, arrived=arrived)
        return await respond(request, writer, streams=bool(body.stream))

    @app.post("/v1/chat/completions", openapi_extra=app.json_body(ChatRequest, ["echo"]))
    async def chat_completions(request: Request) -> Response:
        """OpenAI's chat completions."""
        arrived = Arrival.of(request)
        body = await app.read_body(request, parse_chat, served_model.max_prompt_and_answer)
        model = served_model.named(body.model)
        encoding = chat_prompt(to_chat(body), model, arrived.tenant)
        prompt = await cancel_on_disconnect(request.receive, encoding)
        response_format = ChatFormat(body, model, prompt.submit.id)
        writer = ResponseWriter(body, response_format, model, [prompt.submit], client, chat=prompt, arrived=arrived)
        return await respond(request, writer, streams=bool(body.stream))


def add_models_routes(app: DocumentedApp, served_model: ServedModel) -> None:
    """Adds the routes ``/v1/models``."""

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        """The served model, in a list with an entry for each of its names, and for each adapter."""
        names = (*served_model.names, *served_model.adapted)
        entries = [_model(served_model.named(name), name) for name in names]
        return JSONResponse({"object": "list", "data": entries})

    parameter = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}

    @app.get("/v1/models/{name:path}", openapi_extra={"parameters": [parameter]})
    async def model(request: Request) -> Response:
        """The served model, or one with an adapter."""
        name = request.path_params["name"]
        return JSONResponse(_model(served_model.named(name), name))


def _model(served_model: ServedModel, name: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": served_model.created,
        "owned_by": "radixkv",
        "root": served_model.root,
        "max_model_len": served_model.max_prompt_and_answer,
    } | ({} if served_model.parent is None else {"parent": served_model.parent})
