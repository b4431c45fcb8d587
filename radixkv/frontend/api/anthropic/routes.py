"""Anthropic's endpoints."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from radixkv.frontend.answers import open_answer, respond
from radixkv.frontend.api.anthropic.diagnostics import message_fingerprint, message_id
from radixkv.frontend.api.anthropic.response import MessageWriter
from radixkv.frontend.api.anthropic.schema import (
    CountTokensRequest,
    MessagesRequest,
    parse_count_tokens,
    parse_messages,
)
from radixkv.frontend.api.anthropic.translation import prompt_chat, to_chat
from radixkv.frontend.arrival import Arrival, tenant_of
from radixkv.frontend.cache_diagnostics.diagnosis import CacheDiagnostics
from radixkv.frontend.chat import MAX_COUNTED_CHARACTERS, count_tokens
from radixkv.frontend.engine_client import EngineClient
from radixkv.frontend.http.disconnect import cancel_on_disconnect
from radixkv.frontend.http.openapi import DocumentedApp
from radixkv.frontend.served_model import ServedModel


def add_messages_routes(
    app: DocumentedApp, client: EngineClient, served_model: ServedModel, diagnostics: CacheDiagnostics
) -> None:
    """Adds the routes ``/v1/messages`` and ``/v1/messages/count_tokens``."""

    @app.post("/v1/messages", openapi_extra=app.json_body(MessagesRequest))
    async def messages(request: Request) -> Response:
        """Anthropic's messages."""
        arrived = Arrival.of(request)
        body = await app.read_body(request, parse_messages, served_model.max_prompt_and_answer)
        model = served_model.named(body.model)
        chat = to_chat(body)
        answer = await open_answer(request, chat, client, model, arrived)
        diagnosis = None
        if body.diagnostics is not None:
            fingerprint = message_fingerprint(body, chat, answer, model)
            diagnosis = diagnostics.open(arrived.tenant, message_id(answer), fingerprint, body.compared_id)
        writer = MessageWriter(
            answer,
            model.name,
            diagnosis,
            explains_cache=bool(body.explain_cache),
            reports_edits=body.context_management is not None,
        )
        return await respond(request, writer, streams=bool(body.stream), end=b"")

    @app.post("/v1/messages/count_tokens", openapi_extra=app.json_body(CountTokensRequest))
    async def count(request: Request) -> Response:
        """The number of tokens that the prompt of a message would have."""
        body = await app.read_body(request, parse_count_tokens, MAX_COUNTED_CHARACTERS)
        model = served_model.named(body.model)
        counting = count_tokens(prompt_chat(body), model, tenant_of(request))
        n_tokens = await cancel_on_disconnect(request.receive, counting)
        edits = (
            {} if body.context_management is None else {"context_management": {"original_input_tokens": n_tokens}}
        )
        return JSONResponse({"input_tokens": n_tokens, **edits})
