"""The route ``/v1/responses``."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from radixkv.frontend.answers import open_answer, respond
from radixkv.frontend.api.responses.diagnostics import response_fingerprint, response_id
from radixkv.frontend.api.responses.response import ResponsesWriter
from radixkv.frontend.api.responses.schema import ResponsesRequest, parse_responses
from radixkv.frontend.api.responses.translation import to_chat
from radixkv.frontend.arrival import Arrival
from radixkv.frontend.cache_diagnostics.diagnosis import CacheDiagnostics
from radixkv.frontend.engine_client import EngineClient
from radixkv.frontend.http.openapi import DocumentedApp
from radixkv.frontend.served_model import ServedModel


def add_responses_route(
    app: DocumentedApp, client: EngineClient, served_model: ServedModel, diagnostics: CacheDiagnostics
) -> None:
    """Adds the route ``/v1/responses``."""

    @app.post("/v1/responses", openapi_extra=app.json_body(ResponsesRequest))
    async def responses(request: Request) -> Response:
        """OpenAI's responses, without a store."""
        arrived = Arrival.of(request)
        body = await app.read_body(request, parse_responses, served_model.max_prompt_and_answer)
        model = served_model.named(body.model)
        chat = to_chat(body)
        answer = await open_answer(request, chat, client, model, arrived)
        fingerprint = response_fingerprint(body, chat, answer, model)
        diagnosis = diagnostics.open(arrived.tenant, response_id(answer), fingerprint, body.compared_id)
        writer = ResponsesWriter(body, answer, model.name, diagnosis)
        return await respond(request, writer, streams=bool(body.stream), end=b"")
