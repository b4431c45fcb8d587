"""The route ``/v1/responses``."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from radixkv.frontend.api.responses.response import ResponsesWriter
from radixkv.frontend.api.responses.schema import ResponsesRequest, parse_responses
from radixkv.frontend.api.responses.translation import answer_chat
from radixkv.frontend.chat import chat_prompt
from radixkv.frontend.client import RuntimeClient
from radixkv.frontend.http.body import BodyReader
from radixkv.frontend.http.disconnect import cancel_on_disconnect
from radixkv.frontend.http.openapi import DocumentedApp
from radixkv.frontend.http.sse import EventStream
from radixkv.frontend.served_model import ServedModel
from radixkv.frontend.single_answer import SingleAnswer


def add_responses_route(
    app: DocumentedApp, client: RuntimeClient, served_model: ServedModel, body_reader: BodyReader
) -> None:
    """Adds the route ``/v1/responses``."""

    @app.post("/v1/responses", openapi_extra=app.json_body(ResponsesRequest))
    async def responses(request: Request) -> Response:
        """OpenAI's responses, without a store."""
        arrived = time.monotonic()
        body = await body_reader.read(request, parse_responses, served_model.max_prompt_and_answer)
        served_model.check_name(body.model)
        chat = answer_chat(body)
        prompt = await cancel_on_disconnect(request.receive, chat_prompt(chat, served_model))
        answer = SingleAnswer(chat, prompt, served_model, arrived=arrived)
        writer = ResponsesWriter(body, answer, served_model.name)
        if body.stream:
            return EventStream(writer.events(client), end=b"")
        whole = await cancel_on_disconnect(request.receive, writer.whole(client))
        return Response(whole, media_type="application/json")
