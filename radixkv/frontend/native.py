"""Routes that are radixkv's own or common to engines: health, metrics, cache."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from radixkv.frontend.client import Client
from radixkv.frontend.metrics import Metrics


def native_routes(client: Client, metrics: Metrics) -> APIRouter:
    """``/health``, ``/metrics``, ``/flush_cache``."""
    router = APIRouter()

    @router.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        return Response(status_code=200 if client.refusal is None else 503)

    @router.get("/metrics")
    async def render_metrics() -> Response:
        return Response(metrics.render(await client.stats()), media_type="text/plain; version=0.0.4; charset=utf-8")

    @router.api_route("/flush_cache", methods=["GET", "POST"])
    async def flush_cache() -> Response:
        flushed = await client.flush()
        return JSONResponse({"pages_freed": flushed.n_pages_freed, "pages_held": flushed.n_pages_leased})

    return router
