"""The routes ``/v1/rerank``, ``/v2/rerank`` and ``/v1/score``, and vLLM's names of the first and the last."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from radixkv.errors import InvalidRequest
from radixkv.frontend.api.rerank.response import cohere_meta, rerank_response, score_response
from radixkv.frontend.api.rerank.schema import PairFields, RerankRequest, ScoreRequest, parse_rerank, parse_score
from radixkv.frontend.arrival import Arrival
from radixkv.frontend.engine_client import EngineClient
from radixkv.frontend.field_names import naming_fields
from radixkv.frontend.http.disconnect import cancel_on_disconnect
from radixkv.frontend.http.openapi import DocumentedApp
from radixkv.frontend.pooled_prompts import MAX_POOLED, PooledPrompts, pool_prompts
from radixkv.frontend.prompt_encoding import PromptEncoder
from radixkv.frontend.served_model import ServedModel
from radixkv.generation.reranking import reranker_prompt, text_pairs


def add_rerank_routes(app: DocumentedApp, client: EngineClient, served_model: ServedModel) -> None:
    """Adds the routes ``/v1/rerank``, ``/v2/rerank`` and ``/v1/score``, and two of them without a version."""

    async def pooled_pairs(
        request: Request, body: PairFields, pairs: Sequence[tuple[str, str]], field: str
    ) -> PooledPrompts:
        arrived = Arrival.of(request)
        served_model.named(body.model)
        served_model.check_request(body.priority, body.cache_salt, None)
        if len(pairs) > MAX_POOLED:
            raise InvalidRequest(f"{len(pairs)} {field}; at most {MAX_POOLED} a request", param=field)
        encoder = PromptEncoder(
            served_model=served_model, tenant=arrived.tenant, field=field, adds_special_tokens=False
        )
        texts = [reranker_prompt(query, document, body.instruction_text) for query, document in pairs]
        with naming_fields(lambda name: field if name == "prompt" else name):
            prompts = await cancel_on_disconnect(request.receive, encoder.prompts(texts))
            return await pool_prompts(
                request,
                prompts,
                client,
                served_model,
                arrived,
                field=field,
                cache_salt=body.cache_salt,
                priority=body.priority,
            )

    async def reranked(request: Request, *, is_cohere: bool) -> Response:
        body = await app.read_body(request, parse_rerank, served_model.max_prompt_and_answer)
        documents = body.texts
        pairs = text_pairs(body.query, documents, ("query", "documents"))
        pooled = await pooled_pairs(request, body, pairs, "documents")
        returned = body.return_documents
        response = rerank_response(
            pooled,
            served_model,
            documents,
            n_best=body.top_n or len(documents),
            has_documents=not is_cohere if returned is None else returned,
        )
        if is_cohere:
            response |= cohere_meta(pooled)
        return Response(msgspec.json.encode(response), media_type="application/json")

    @app.post("/rerank", openapi_extra=app.json_body(RerankRequest))
    @app.post("/v1/rerank", openapi_extra=app.json_body(RerankRequest))
    async def rerank(request: Request) -> Response:
        """Jina's and vLLM's reranking of documents."""
        return await reranked(request, is_cohere=False)

    @app.post("/v2/rerank", openapi_extra=app.json_body(RerankRequest))
    async def rerank_of_cohere(request: Request) -> Response:
        """Cohere's reranking of documents."""
        return await reranked(request, is_cohere=True)

    @app.post("/score", openapi_extra=app.json_body(ScoreRequest))
    @app.post("/v1/score", openapi_extra=app.json_body(ScoreRequest))
    async def score(request: Request) -> Response:
        """vLLM's scores of pairs of texts."""
        body = await app.read_body(request, parse_score, served_model.max_prompt_and_answer)
        pairs = text_pairs(body.text_1, body.text_2, ("text_1", "text_2"))
        response = score_response(await pooled_pairs(request, body, pairs, "text_2"), served_model)
        return Response(msgspec.json.encode(response), media_type="application/json")
