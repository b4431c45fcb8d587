"""The route ``/v1/embeddings``."""

from __future__ import annotations

import asyncio
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from radixkv.frontend.api.embeddings.response import embedding_response
from radixkv.frontend.api.embeddings.schema import EmbeddingRequest, parse_embedding
from radixkv.frontend.arrival import Arrival
from radixkv.frontend.engine_client import EngineClient
from radixkv.frontend.field_names import naming_fields
from radixkv.frontend.http.disconnect import cancel_on_disconnect
from radixkv.frontend.http.openapi import DocumentedApp
from radixkv.frontend.pooled_prompts import MAX_POOLED, pool_prompts
from radixkv.frontend.prompt_encoding import PromptEncoder, split_prompts
from radixkv.frontend.served_model import ServedModel
from radixkv.generation.vectors import check_dimensions


def add_embeddings_route(app: DocumentedApp, client: EngineClient, served_model: ServedModel) -> None:
    """Adds the route ``/v1/embeddings``."""

    @app.post("/v1/embeddings", openapi_extra=app.json_body(EmbeddingRequest))
    async def embeddings(request: Request) -> Response:
        """OpenAI's embeddings of one or several inputs."""
        arrived = Arrival.of(request)
        body = await app.read_body(request, parse_embedding, served_model.max_prompt_and_answer)
        served_model.named(body.model)
        served_model.check_request(body.priority, body.cache_salt, None)
        check_dimensions(body.dimensions, served_model.hidden_size)
        inputs = split_prompts(body.input, "input", MAX_POOLED)
        encoder = PromptEncoder(
            served_model=served_model,
            tenant=arrived.tenant,
            field="input",
            adds_special_tokens=body.add_special_tokens is not False,
        )
        with naming_fields(lambda name: "input" if name == "prompt" else name):
            prompts = await cancel_on_disconnect(request.receive, encoder.prompts(inputs))
            pooled = await pool_prompts(
                request,
                prompts,
                client,
                served_model,
                arrived,
                field="input",
                cache_salt=body.cache_salt,
                priority=body.priority,
            )
        render = partial(
            embedding_response,
            pooled,
            served_model,
            dimensions=body.dimensions,
            is_base64=body.encoding_format == "base64",
        )
        return Response(await asyncio.to_thread(render), media_type="application/json")
