"""``radixkv serve``: the HTTP server."""

from __future__ import annotations

import argparse
import dataclasses
import math
from dataclasses import replace
from typing import Any

import msgspec

from radixkv.errors import RadixKVError, shortened
from radixkv.settings.arguments import Parser, add_engine_flags, byte_size, engine_config, number, whole_number
from radixkv.settings.compat import Place
from radixkv.settings.compat_flags import add_always_on_flags, spellings
from radixkv.settings.config import EngineConfig, KVEventsConfig, ServerConfig
from radixkv.settings.server_flags import add_key_flags, api_key
from radixkv.settings.tenants import OPERATOR, TenantConfig, Tenants, read_tenants


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP with OpenAI's API",
        description="Serve a model over HTTP with OpenAI's API.",
    )
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="the same as --model")
    defaults = ServerConfig()
    http = parser.add_argument_group("HTTP")
    http.add_argument(
        "--host",
        default=defaults.host,
        help="address to listen on; one that other machines can reach needs --api-key (default: %(default)s)",
    )
    http.add_argument(
        "--port",
        type=whole_number,
        default=defaults.port,
        help="port to listen on; 0 for any free port (default: %(default)s)",
    )
    http.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="the model's name in the API, or several that requests may use; replies and metrics have the first "
        "(default: --model)",
    )
    add_key_flags(http, "key that clients must send as 'Authorization: Bearer KEY'")
    http.add_argument(
        "--tenants",
        metavar="FILE",
        help="TOML file of tenants with their keys, weights and shares of rows and pages, see docs/tenants.md; "
        "--api-key is then the operator's key (default: none)",
    )
    http.add_argument(
        "--allowed-origins",
        type=_origins,
        default=defaults.allowed_origins,
        metavar="ORIGINS",
        help="JSON list of the web sites whose pages may call the server (CORS), such as "
        "'[\"https://app.example\"]'; '[\"*\"]' for all sites needs --api-key (default: none)",
    )
    http.add_argument(
        "--explain-contents",
        action=argparse.BooleanOptionalAction,
        help="whether /cache/explain shows cached tokens to every client, including those of other cache salts "
        "(default: only without --api-key)",
    )
    http.add_argument(
        "--keep-nonces",
        action="store_true",
        help="leave texts in system messages that are known to differ from request to request, such as the billing "
        "header of Claude Code; they end every cached prefix (default: they are removed)",
    )
    http.add_argument(
        "--return-tokens-as-token-ids",
        action="store_true",
        help="name tokens by their ids in logprobs, such as token_id:123; a request's field of this name wins "
        "(default: by their texts)",
    )
    http.add_argument(
        "--priority-range",
        type=_priority_range,
        metavar="MIN,MAX",
        help="lowest and highest priority that a request may have, such as --priority-range=-5,5 (default: any "
        "with --api-key, only 0 without)",
    )
    http.add_argument(
        "--chat-template",
        metavar="FILE",
        help="file with a chat template, or name of one of the tokenizer's, such as tool_use (default: the "
        "tokenizer's, as Transformers chooses)",
    )
    http.add_argument(
        "--tool-call-parser",
        metavar="NAME",
        help="format of tool calls: hermes, llama3_json, mistral, qwen3_coder, an alias of vLLM or SGLang, or none "
        "(default: what the checkpoint or its chat template shows)",
    )
    http.add_argument(
        "--reasoning-parser",
        metavar="NAME",
        help="format of reasoning: qwen3, deepseek_r1 or none (default: what the checkpoint or its chat template "
        "shows)",
    )
    http.add_argument(
        "--metrics-compat",
        metavar="ENGINE",
        help="vllm or sglang: export the metrics under that engine's names, too (default: only radixkv's names)",
    )
    http.add_argument(
        "--stats-interval",
        type=_stats_interval,
        default=defaults.stats_interval_s,
        metavar="SECONDS",
        help="seconds between log lines with statistics while there is work; 0 for none (default: %(default)s)",
    )
    http.add_argument(
        "--disable-log-stats",
        dest="stats_interval",
        action="store_const",
        const=0.0,
        help="log no statistics, the same as --stats-interval 0",
    )
    requests = http.add_mutually_exclusive_group()
    requests.add_argument(
        "--log-requests",
        "--enable-log-requests",
        action="store_const",
        dest="request_log",
        const="-",
        help="write a line of JSON to standard error for each request that ends: lengths, times and the finish "
        "reason, without texts (default: no lines)",
    )
    requests.add_argument(
        "--request-log", metavar="FILE", help="append these lines to a file instead of standard error"
    )
    requests.add_argument(
        "--disable-log-requests",
        "--no-enable-log-requests",
        action="store_const",
        dest="request_log",
        const=None,
        help=argparse.SUPPRESS,
    )
    http.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="collector of OpenTelemetry that gets traces of requests by OTLP over HTTP, such as "
        "http://127.0.0.1:4318/v1/traces; needs radixkv[otel] (default: no traces)",
    )
    http.add_argument(
        "--heartbeat-timeout",
        type=number,
        default=defaults.heartbeat_timeout_s,
        metavar="SECONDS",
        help="seconds without a sign of life after which the runtime process counts as hung (default: %(default)s)",
    )
    http.add_argument(
        "--restart-runtime",
        action="store_true",
        help="start the runtime process again when it dies or hangs: requests in flight fail, and new ones get a "
        "503 until it is ready; the server ends when it dies after 5 restarts without 10 minutes of service "
        "(default: the server ends at once)",
    )
    http.add_argument(
        "--canary-interval",
        type=number,
        metavar="SECONDS",
        help="seconds between two checks of the cache: a known prompt is answered from it and without it, and an "
        "answer that differs is logged and counted, and its pages are dropped (default: no checks)",
    )
    http.add_argument(
        "--max-body-bytes",
        type=byte_size,
        default=defaults.max_body_bytes,
        metavar="SIZE",
        help="maximum size of a request body, such as 32MiB (default: %(default)s)",
    )
    http.add_argument(
        "--kv-events-config",
        type=_kv_events,
        metavar="JSON",
        help="publish which pages the cache has over ZeroMQ, for routers; fields as in vLLM and SGLang, such as "
        '\'{"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:5557"}\' (default: no events)',
    )
    add_always_on_flags(parser, Place.SERVE_FLAG)
    add_engine_flags(parser)
    parser.add_argument(
        *spellings("seed"),
        type=whole_number,
        default=0,
        metavar="SEED",
        help="determines the seeds of requests without a seed (default: 0)",
    )
    parser.set_defaults(parser=parser, run=run)


def run(args: argparse.Namespace) -> int:
    """Serves until a termination signal; returns the exit code."""
    server = server_config(args)
    engine = _with_server_settings(engine_config(args, model=args.positional_model, seed=args.seed), args, server)
    if server.canary_interval_s is not None and not engine.cache.enable_prefix_caching:
        args.parser.error("canary_interval_s needs enable_prefix_caching: there is no cache to check without it")
    from radixkv.frontend.process import serve  # imported here because other commands need no web server

    return serve(engine, server)


def server_config(args: argparse.Namespace) -> ServerConfig:
    """Returns the configuration that the flags describe; wrong values end as wrong usage."""
    parser: Parser = args.parser
    try:
        return ServerConfig(
            host=args.host,
            port=args.port,
            served_model_name=_served_model_name(args),
            heartbeat_timeout_s=args.heartbeat_timeout,
            restart_runtime=args.restart_runtime,
            canary_interval_s=args.canary_interval,
            max_body_bytes=args.max_body_bytes,
            api_key=api_key(args),
            explain_contents=args.explain_contents,
            keep_nonces=args.keep_nonces,
            return_tokens_as_token_ids=args.return_tokens_as_token_ids,
            chat_template=args.chat_template,
            tool_call_parser=args.tool_call_parser,
            reasoning_parser=args.reasoning_parser,
            metrics_compat=args.metrics_compat,
            stats_interval_s=args.stats_interval or None,
            request_log=args.request_log,
            otlp_traces_endpoint=args.otlp_traces_endpoint,
            allowed_origins=args.allowed_origins,
            priority_range=args.priority_range,
            tenants=Tenants() if args.tenants is None else read_tenants(args.tenants),
        )
    except RadixKVError as error:
        parser.error(str(error))


def _served_model_name(args: argparse.Namespace) -> str | tuple[str, ...] | None:
    """Returns the values of ``--served-model-name``: as in other engines, all words after it.

    Ends as wrong usage for several names without a model: the last one may be meant as the model.
    """
    names = args.served_model_name
    if names is None or len(names) == 1:
        return None if names is None else str(names[0])
    if args.positional_model is None and args.model is None:
        parser: Parser = args.parser
        parser.error(
            f"--served-model-name takes all words after it, also {shortened(names[-1])}; give the model before the "
            "flags or with --model"
        )
    return tuple(names)


def _origins(text: str) -> tuple[str, ...]:
    try:
        return msgspec.json.decode(text, type=tuple[str, ...])
    except (msgspec.MsgspecError, UnicodeError):
        raise argparse.ArgumentTypeError(
            f"{shortened(text)} is not a JSON list of origins, such as '[\"https://app.example\"]'"
        ) from None


def _with_server_settings(engine: EngineConfig, args: argparse.Namespace, server: ServerConfig) -> EngineConfig:
    """Returns the configuration with what only a server has: events and tenants."""
    parser: Parser = args.parser
    tenants = server.tenants.configs
    if tenants and (server.api_key is not None or server.canary_interval_s is not None):
        tenants += (TenantConfig(OPERATOR, cache_salt="request"),)
    try:
        return replace(engine, kv_events=args.kv_events_config, tenants=tenants)
    except RadixKVError as error:
        parser.error(str(error))


def _kv_events(text: str) -> KVEventsConfig | None:
    """Parses the configuration of events; None if it turns them off.

    vLLM turns them on by ``enable_kv_cache_events``, SGLang by ``publisher``.
    """
    try:
        fields: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError):
        raise argparse.ArgumentTypeError(f"{shortened(text)} is not a JSON object") from None
    publisher, is_on = fields.pop("publisher", None), fields.pop("enable_kv_cache_events", None)
    if publisher not in (None, "zmq", "null"):
        raise argparse.ArgumentTypeError(f"publisher {shortened(publisher)} is unknown; use zmq or null")
    if is_on is not None and not isinstance(is_on, bool):
        raise argparse.ArgumentTypeError(f"enable_kv_cache_events {shortened(is_on)} must be true or false")
    fields.pop("max_queue_size", None)  # vLLM's, of a queue that there is not
    known = {field.name for field in dataclasses.fields(KVEventsConfig)}
    if unknown := fields.keys() - known:
        raise argparse.ArgumentTypeError(
            f"{shortened(min(unknown))} is no field of it; there are {', '.join(sorted(known))}, publisher and "
            "enable_kv_cache_events"
        )
    try:
        config = KVEventsConfig(**fields)
    except RadixKVError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if is_on is None and publisher is None:
        raise argparse.ArgumentTypeError("it does not turn events on; add enable_kv_cache_events with true")
    return config if is_on is not False and publisher != "null" else None


def _priority_range(text: str) -> tuple[int, ...]:
    return tuple(whole_number(part) for part in text.split(","))


def _stats_interval(text: str) -> float:
    value = number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{shortened(text)} must be a number of seconds, or 0 for never")
    return value
