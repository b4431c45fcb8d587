"""The route ``/v1/responses``."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from radixkv.frontend.answers import open_answer, respond
from radixkv.frontend.api.responses.response import ResponsesWriter
from radixkv.frontend.api.responses.schema import ResponsesRequest, parse_responses
from radixkv.frontend.api.responses.translation import to_chat
from radixkv.frontend.arrival import Arrival
from radixkv.frontend.engine_client import EngineClient
from radixkv.frontend.http.openapi import DocumentedApp
from radixkv.frontend.served_model import ServedModel


def add_responses_route(app: DocumentedApp, client: EngineClient, served_model: ServedModel) -> None:
    """Adds the route ``/v1/responses``."""

    @app.post("/v1/responses", openapi_extra=app.json_body(ResponsesRequest))
    async def responses(request: Request) -> Response:
        """OpenAI's responses, without a store."""
        arrived = Arrival.of(request)
        body = await app.read_body(request, parse_responses, served_model.max_prompt_and_answer)
        served_model.check_name(body.model)
        answer = await open_answer(request, to_chat(body), client, served_model, arrived)
        writer = ResponsesWriter(body, answer, served_model.name)
        return await respond(request, writer, streams=bool(body.stream), end=b"")
