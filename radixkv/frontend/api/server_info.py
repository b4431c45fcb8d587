"""Routes that describe the server: its settings, its model and its load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from radixkv.errors import InvalidRequest, UnsupportedFeature
from radixkv.frontend.engine_client import EngineClient
from radixkv.frontend.http.openapi import DocumentedApp
from radixkv.frontend.metrics.prometheus import Metrics
from radixkv.frontend.served_model import ServedModel
from radixkv.settings.config import EngineConfig
from radixkv.settings.server_config import ServerConfig
from radixkv.version import __version__
from radixkv.wire.stats import Stats


def public_settings(engine: EngineConfig, server: ServerConfig) -> dict[str, Any]:
    """Returns all settings that clients may see, by their names in ``config``: no API key."""
    settings = {"model_path": engine.model.model, "seed": engine.seed, "needs_api_key": server.needs_key}
    for part in (engine.model, engine.cache, engine.scheduler, server):
        settings |= asdict(part)
    del settings["model"], settings["api_key"], settings["tenants"]
    settings["tenants"] = [asdict(tenant) for tenant in engine.tenants]
    settings["kv_events"] = None if engine.kv_events is None else asdict(engine.kv_events)
    return settings | {"explain_contents": server.may_explain_contents, "priority_range": server.allowed_priorities}


def add_server_info_routes(
    app: DocumentedApp,
    client: EngineClient,
    served_model: ServedModel,
    metrics: Metrics,
    settings: Mapping[str, Any],
) -> None:
    """Adds the routes ``/version``, ``/server_info``, ``/model_info`` and ``/v1/loads``.

    The second and third also exist with the prefix ``get_``. ``settings`` are those of ``public_settings``.
    """

    @app.get("/version")
    async def show_version(request: Request) -> Response:
        """The version of radixkv."""
        return JSONResponse({"version": __version__})

    @app.get("/get_server_info")
    @app.get("/server_info")
    async def server_info(request: Request) -> Response:
        """Settings and counters."""
        state = _counters(await client.stats()) | _rates(metrics)
        info = {
            **settings,
            "served_model_name": served_model.name,
            "max_model_len": served_model.ready.max_model_len,
            "max_req_len": served_model.max_prompt_and_answer,
            "max_total_num_tokens": served_model.ready.n_pages * served_model.ready.page_size,
            "max_num_seqs": served_model.ready.max_num_seqs,
            "max_num_batched_tokens": served_model.ready.max_num_batched_tokens,
            "device": served_model.ready.devices,
            "tensor_parallel_size": served_model.ready.tensor_parallel_size,
            "dtype": served_model.ready.dtype,
            "kv_cache_dtype": served_model.ready.kv_cache_dtype or served_model.ready.dtype,
            "version": __version__,
            "internal_states": [state],
        }
        return JSONResponse(info)

    @app.get("/get_model_info")
    @app.get("/model_info")
    async def model_info(request: Request) -> Response:
        """The checkpoint: sizes, end-of-sequence ids, default sampling."""
        return JSONResponse(
            {
                "model_path": served_model.root,
                "tokenizer_path": settings["tokenizer"] or served_model.root,
                "is_generation": served_model.task == "generate",
                "preferred_sampling_params": dict(served_model.default_sampling) or None,
                "max_model_len": served_model.max_prompt_and_answer,
                "vocab_size": served_model.ready.vocab_size,
                "eos_token_ids": sorted(served_model.eos_token_ids),
                "has_tokenizer": served_model.tokenizer is not None,
                "has_chat_template": served_model.chat_template is not None,
            }
        )

    @app.get("/v1/loads")
    async def loads(request: Request) -> Response:
        """Running and waiting requests, and use of the pool."""
        _check_query(request)
        load = _load(await client.stats(), served_model, metrics)
        return JSONResponse(
            {
                "timestamp": datetime.now(UTC).isoformat(),
                "version": __version__,
                "dp_rank_count": 1,
                "loads": [load],
                "aggregate": {
                    "total_running_reqs": load["num_running_reqs"],
                    "total_waiting_reqs": load["num_waiting_reqs"],
                    "total_reqs": load["num_running_reqs"] + load["num_waiting_reqs"],
                    "avg_token_usage": load["token_usage"],
                    "avg_throughput": load["gen_throughput"],
                    "avg_utilization": load["utilization"],
                },
            }
        )


def _counters(stats: Stats) -> dict[str, Any]:
    """Returns counters and gauges by name, with the hits of each tier beside its other counters."""
    state: dict[str, Any] = msgspec.to_builtins(stats)
    use = stats.cache_use
    del state["id"], state["type"], state["cache_use"]
    state |= {"prefix_hits_total": use.n_cached, "prefix_hits_copied_total": use.n_copied}
    hits = {"host": use.n_loaded, "disk": use.n_fetched - use.n_shared, "shared_store": use.n_shared}
    for tier, n_hits in hits.items():
        if state[tier] is not None:
            state[tier]["prefix_hits_total"] = n_hits
    return state


def _rates(metrics: Metrics) -> dict[str, float]:
    """Returns rates over the last ``StatsDelta``."""
    stats_delta = metrics.stats_delta
    return {
        "last_gen_throughput": 0.0 if stats_delta is None else stats_delta.generation_tokens_per_s,
        "last_cache_hit_rate": 0.0 if stats_delta is None else stats_delta.hit_rate or 0.0,
    }


def _check_query(request: Request) -> None:
    if request.query_params.get("dp_rank", "0") != "0":
        raise InvalidRequest("dp_rank must be 0: all replicas are shown as one", param="dp_rank")
    if request.query_params.get("format", "json") != "json":
        raise UnsupportedFeature("format must be json; use /metrics for Prometheus' format", param="format")


def _load(stats: Stats, served_model: ServedModel, metrics: Metrics) -> dict[str, Any]:
    n_used = stats.n_pages - stats.n_pages_free - stats.n_pages_evictable
    rates, max_num_seqs = _rates(metrics), served_model.ready.max_num_seqs
    return {
        "dp_rank": 0,
        "num_running_reqs": stats.n_running,
        "num_waiting_reqs": stats.n_waiting,
        "num_used_tokens": n_used * served_model.ready.page_size,
        "max_total_num_tokens": stats.n_pages * served_model.ready.page_size,
        "token_usage": n_used / stats.n_pages,
        "gen_throughput": rates["last_gen_throughput"],
        "cache_hit_rate": rates["last_cache_hit_rate"],
        "utilization": stats.n_running / max_num_seqs,
        "max_running_requests": max_num_seqs,
    }
