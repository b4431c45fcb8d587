"""Routes that describe the server: its settings, its model and its load."""

from __future__ import annotations

import importlib.metadata
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from radixkv.config import EngineConfig, ServerConfig
from radixkv.errors import InvalidRequest, UnsupportedFeature
from radixkv.frontend.client import Client
from radixkv.frontend.http.route import route
from radixkv.frontend.metrics.prometheus import Metrics
from radixkv.frontend.served_model import Served
from radixkv.wire import Stats


def about_routes(
    client: Client, served: Served, metrics: Metrics, engine: EngineConfig, server: ServerConfig
) -> list[Route]:
    """``/version``, ``/server_info``, ``/model_info`` (both also with ``get_``) and ``/v1/loads``."""
    # The package itself cannot be imported here: it stands for the engine, which brings torch.
    version = importlib.metadata.version("radixkv")

    async def show_version(request: Request) -> Response:
        return JSONResponse({"version": version})

    async def server_info(request: Request) -> Response:
        state = msgspec.structs.asdict(await client.stats()) | _rates(metrics)
        del state["id"]
        info = _settings(engine, server) | {
            "served_model_name": served.name,
            "max_model_len": served.ready.max_model_len,
            "max_req_len": served.max_prompt_and_answer,
            "max_total_num_tokens": served.ready.n_pages * served.ready.page_size,
            "max_num_seqs": served.ready.max_num_seqs,
            "max_num_batched_tokens": served.ready.max_num_batched_tokens,
            "explain_contents": server.may_explain_contents,
            "device": served.ready.device,
            "dtype": served.ready.dtype,
            "version": version,
            "internal_states": [state],
        }
        return JSONResponse(info)

    async def model_info(request: Request) -> Response:
        return JSONResponse(
            {
                "model_path": served.root,
                "tokenizer_path": engine.model.tokenizer or served.root,
                "is_generation": True,
                "preferred_sampling_params": dict(served.default_sampling) or None,
                "max_model_len": served.max_prompt_and_answer,
                "vocab_size": served.ready.vocab_size,
                "eos_token_ids": sorted(served.eos_token_ids),
                "has_tokenizer": served.tokenizer is not None,
                "has_chat_template": served.chat_template is not None,
            }
        )

    async def loads(request: Request) -> Response:
        _check_query(request)
        load = _load(await client.stats(), served, metrics)
        return JSONResponse(
            {
                "timestamp": datetime.now(UTC).isoformat(),
                "version": version,
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

    return [
        route("/version", show_version, "GET"),
        route("/server_info", server_info, "GET"),
        route("/get_server_info", server_info, "GET"),
        route("/model_info", model_info, "GET"),
        route("/get_model_info", model_info, "GET"),
        route("/v1/loads", loads, "GET"),
    ]


def _settings(engine: EngineConfig, server: ServerConfig) -> dict[str, Any]:
    """All settings in one object, by their names in ``config``; whether there is a key, but not the key."""
    settings = {"model_path": engine.model.model, "seed": engine.seed, "needs_api_key": server.api_key is not None}
    for part in (engine.model, engine.cache, engine.scheduler, server):
        settings |= asdict(part)
    del settings["model"], settings["api_key"]
    return settings


def _rates(metrics: Metrics) -> dict[str, float]:
    """Of the last interval that was looked at."""
    interval = metrics.interval
    return {
        "last_gen_throughput": 0.0 if interval is None else interval.generation_tokens_per_s,
        "last_cache_hit_rate": 0.0 if interval is None else interval.hit_rate or 0.0,
    }


def _check_query(request: Request) -> None:
    if request.query_params.get("dp_rank", "0") != "0":
        raise InvalidRequest("dp_rank must be 0: this server is one engine", param="dp_rank")
    if request.query_params.get("format", "json") != "json":
        raise UnsupportedFeature("format can be json only; /metrics is in Prometheus' format", param="format")


def _load(stats: Stats, served: Served, metrics: Metrics) -> dict[str, Any]:
    n_used = stats.n_pages - stats.n_pages_free - stats.n_pages_evictable
    rates, most = _rates(metrics), served.ready.max_num_seqs
    return {
        "dp_rank": 0,
        "num_running_reqs": stats.n_running,
        "num_waiting_reqs": stats.n_waiting,
        "num_used_tokens": n_used * served.ready.page_size,
        "max_total_num_tokens": stats.n_pages * served.ready.page_size,
        "token_usage": n_used / stats.n_pages,
        "gen_throughput": rates["last_gen_throughput"],
        "cache_hit_rate": rates["last_cache_hit_rate"],
        "utilization": stats.n_running / most,
        "max_running_requests": most,
    }
