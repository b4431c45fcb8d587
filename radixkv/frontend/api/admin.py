"""Routes for operators: health, metrics and the cache."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from radixkv.errors import RequestError, UnsupportedFeature
from radixkv.frontend.answers import Answers, PromptAnswers
from radixkv.frontend.arrival import Arrival
from radixkv.frontend.engine_client import EngineClient
from radixkv.frontend.http.error_response import retry_after
from radixkv.frontend.http.errors import RuntimeSilent
from radixkv.frontend.http.openapi import DocumentedApp
from radixkv.frontend.http.response_docs import EMPTY_OR_REASON, EMPTY_OR_REPLICAS
from radixkv.frontend.metrics.aliases import MetricAliases
from radixkv.frontend.metrics.prometheus import Metrics
from radixkv.frontend.served_model import ServedModel
from radixkv.settings.checks import MIN_PRIORITY
from radixkv.wire.cache_messages import Flushed
from radixkv.wire.messages import Submit, pack_tokens
from radixkv.wire.sampling import SamplingParams

HEALTH_GENERATE_TIMEOUT_S = 20.0
"""After this long without a token ``/health_generate`` answers 503; SGLang's value."""


def add_admin_routes(
    app: DocumentedApp,
    client: EngineClient,
    served_model: ServedModel,
    metrics: Metrics,
    aliases: MetricAliases | None,
    comparisons: Mapping[str, int],
) -> None:
    """Adds the routes for health checks, ``/metrics``, ``/flush_cache`` and ``/reset_prefix_cache``.

    Args:
        app: gets the routes.
        client: of the runtime; counts cache misses.
        served_model: counts answers in the history of chats.
        metrics: shown by ``/metrics``.
        aliases: repeats the metrics under another engine's names; None for no repetition.
        comparisons: counts requests that were compared with earlier ones, by the result.
    """

    documented: dict[str, Any] = {"response_class": Response, "responses": EMPTY_OR_REASON}

    @app.api_route("/ping", methods=["GET", "HEAD", "POST"], **documented)
    @app.api_route("/ready", methods=["GET", "HEAD"], **documented)
    @app.api_route("/health", methods=["GET", "HEAD"], **documented)
    async def health(request: Request) -> Response:
        """200, or 503 with the reason while requests are refused; needs no key."""
        refusal = client.refusal
        if refusal is None:
            return Response(status_code=200)
        return JSONResponse({"status": refusal.code}, 503, headers=retry_after(refusal))

    @app.get("/health_generate", response_class=Response, responses=EMPTY_OR_REPLICAS)
    async def health_generate(request: Request) -> Response:
        """Generates one token in each replica, before all waiting requests: 200, or 503 if one fails."""
        codes = await asyncio.gather(*(_try_token(runtime, served_model) for runtime in client.runtimes))
        failed = {str(number): code for number, code in enumerate(codes) if code is not None}
        if failed and len(codes) > 1:
            return JSONResponse({"replicas": failed}, 503)
        return Response(status_code=503 if failed else 200)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def render_metrics(request: Request) -> Response:
        """Metrics in Prometheus' text format."""
        text = metrics.render(
            await client.stats(),
            aliases,
            served_model.kept_answers,
            client.misses,
            client.n_restarts,
            served_model.ready.tensor_parallel_size,
            comparisons,
        )
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.api_route("/flush_cache", methods=["GET", "POST"])
    async def flush_cache(request: Request) -> Response:
        """Empties the prefix cache."""
        return JSONResponse(_flush_report(await client.flush()))

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache(request: Request) -> Response:
        """Empties the prefix cache; vLLM's name."""
        for name in ("reset_running_requests", "reset_connector"):
            if request.query_params.get(name, "false").lower() not in ("false", "0"):
                raise UnsupportedFeature(f"{name} is not supported in this release; leave it out", param=name)
        return JSONResponse(_flush_report(await client.flush()))


async def _try_token(client: EngineClient, served_model: ServedModel) -> str | None:
    """Generates one token; returns the code of the error if none comes."""
    try:
        async with asyncio.timeout(HEALTH_GENERATE_TIMEOUT_S):
            prompt: PromptAnswers[None] = PromptAnswers(_one_token(), served_model)
            answers = Answers([prompt], client, Arrival(time.monotonic()))
            async with aclosing(answers.deltas_and_outputs(streams=False)) as outputs:
                async for _ in outputs:
                    pass
    except RequestError as error:
        return error.code
    except TimeoutError:
        return RuntimeSilent.code
    return None


def _one_token() -> Submit:
    """Returns the request of ``/health_generate``; its priority, whatever clients may use, puts it
    before waiting requests."""
    sampling = SamplingParams(max_tokens=1)
    return Submit(uuid.uuid4().hex, pack_tokens([0]), sampling, reads_cache=False, priority=MIN_PRIORITY)


def _flush_report(flushed: Flushed) -> dict[str, Any]:
    n_leased = flushed.n_pages_leased
    later = f"; running requests still hold {n_leased} pages, which are freed when they end" if n_leased else ""
    return {
        "pages_freed": flushed.n_pages_freed,
        "pages_held": n_leased,
        "message": f"the cache is empty{later}",
    }
