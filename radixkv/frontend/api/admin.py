"""Routes that operate the engine: liveness, metrics, the cache."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from radixkv.errors import RequestError, UnsupportedFeature
from radixkv.frontend.client import Client
from radixkv.frontend.http.route import route
from radixkv.frontend.in_flight import Prompt
from radixkv.frontend.metrics.aliases import Repeat
from radixkv.frontend.metrics.prometheus import Metrics
from radixkv.sampling import SamplingParams
from radixkv.wire import Flushed, pack_tokens

GENERATED_WITHIN_S = 20.0
"""SGLang's: an engine that gives no token for so long counts as ill."""
_ONE_TOKEN = Prompt(pack_tokens([0]), SamplingParams(max_tokens=1), reads_cache=False, priority=-(1 << 31))
"""A request that goes before all others that wait."""


def native_routes(client: Client, metrics: Metrics, repeat: Repeat | None) -> list[Route]:
    """``/health``, ``/ping`` and ``/health_generate``, ``/metrics``, ``/flush_cache`` and ``/reset_prefix_cache``.

    Args:
        repeat: under whose names metrics come a second time.
    """

    async def health(request: Request) -> Response:
        return Response(status_code=200 if client.refusal is None else 503)

    async def health_generate(request: Request) -> Response:
        try:
            async with asyncio.timeout(GENERATED_WITHIN_S):
                batch = client.batch([_ONE_TOKEN], arrived=time.monotonic(), streams=False)
                async with batch, aclosing(batch.deltas()) as deltas:
                    async for delta in deltas:
                        if delta.finish_reason is not None:
                            batch.end(delta, delta.finish_reason)
        except (RequestError, TimeoutError):
            return Response(status_code=503)
        return Response(status_code=200)

    async def render_metrics(request: Request) -> Response:
        text = metrics.render(await client.stats(), repeat)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def flush_cache(request: Request) -> Response:
        return JSONResponse(_what_was_done(await client.flush()))

    async def reset_prefix_cache(request: Request) -> Response:
        for name in ("reset_running_requests", "reset_connector"):
            if request.query_params.get(name, "false").lower() not in ("false", "0"):
                raise UnsupportedFeature(f"{name} is not supported in this release; leave it out", param=name)
        return JSONResponse(_what_was_done(await client.flush()))

    return [
        route("/health", health, "GET", "HEAD"),
        route("/ping", health, "GET", "HEAD", "POST"),
        route("/health_generate", health_generate, "GET"),
        route("/metrics", render_metrics, "GET"),
        route("/flush_cache", flush_cache, "GET", "POST"),
        route("/reset_prefix_cache", reset_prefix_cache, "POST"),
    ]


def _what_was_done(flushed: Flushed) -> dict[str, Any]:
    held = flushed.n_pages_leased
    later = f"; running requests still hold {held} pages, which are free once those end" if held else ""
    return {
        "pages_freed": flushed.n_pages_freed,
        "pages_held": held,
        "message": f"nothing is cached any more{later}",
    }
