"""``radixkv serve``: the HTTP server."""

from __future__ import annotations

import argparse
from dataclasses import replace

from radixkv.errors import RadixKVError, shortened
from radixkv.settings.arguments import Parser, add_always_on_flags, add_engine_flags, add_flags, engine_config
from radixkv.settings.client_flags import add_key_flags, api_key
from radixkv.settings.compat import Place
from radixkv.settings.config import EngineConfig
from radixkv.settings.server_config import ServerConfig
from radixkv.settings.setting import from_values, settings_of
from radixkv.settings.tenants import OPERATOR, TenantConfig, Tenants, read_tenants


def add(commands: argparse._SubParsersAction[Parser], summary: str) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "serve",
        help=summary,
        description="Serve a model over HTTP with OpenAI's API.",
    )
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="the same as --model")
    http = parser.add_argument_group("HTTP")
    engine = settings_of(EngineConfig)
    for name, one in settings_of(ServerConfig).items():
        if name == "api_key":
            add_key_flags(http, one.help)
        elif name == "request_log":
            _add_log_flags(http)
        else:
            add_flags(http, {name: one})
        if name == "stats_interval_s":
            http.add_argument(
                "--disable-log-stats",
                dest=name,
                action="store_const",
                const=None,
                help="log no statistics, the same as --stats-interval 0",
            )
    parser.set_defaults(tenants=None)  # not read yet
    add_flags(http, {"kv_events": engine["kv_events"]})
    add_always_on_flags(parser, Place.SERVE_FLAG)
    add_engine_flags(parser)
    add_flags(parser, {"seed": engine["seed"]})
    parser.set_defaults(parser=parser, run=run)


def _add_log_flags(http: argparse._ArgumentGroup) -> None:
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
    add_flags(requests, {"request_log": settings_of(ServerConfig)["request_log"]})
    requests.add_argument(
        "--disable-log-requests",
        "--no-enable-log-requests",
        action="store_const",
        dest="request_log",
        const=None,
        help=argparse.SUPPRESS,
    )


def run(args: argparse.Namespace) -> int:
    """Serves until a termination signal; returns the exit code."""
    server = server_config(args)
    engine = _with_server_settings(engine_config(args, model=args.positional_model, seed=args.seed), args, server)
    if server.canary_interval_s is not None and not engine.cache.enable_prefix_caching:
        args.parser.error("canary_interval_s needs enable_prefix_caching: there is no cache to check without it")
    if server.canary_interval_s is not None and engine.model.task != "generate":
        args.parser.error("canary_interval_s needs task generate: the canary compares answers")
    from radixkv.frontend.process import serve  # imported here because other commands need no web server

    return serve(engine, server)


def server_config(args: argparse.Namespace) -> ServerConfig:
    """Returns the configuration that the flags describe; wrong values end as wrong usage."""
    parser: Parser = args.parser
    try:
        special = {
            "served_model_name": _served_model_name(args),
            "api_key": api_key(args),
            "tenants": Tenants() if args.tenants is None else read_tenants(args.tenants),
        }
        return from_values(ServerConfig, vars(args) | special)
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


def _with_server_settings(engine: EngineConfig, args: argparse.Namespace, server: ServerConfig) -> EngineConfig:
    """Returns the configuration with what only a server has: events and tenants."""
    parser: Parser = args.parser
    tenants = server.tenants.configs
    if tenants and (server.api_key is not None or server.canary_interval_s is not None):
        tenants += (TenantConfig(OPERATOR, cache_salt="request"),)
    try:
        return replace(engine, kv_events=args.kv_events, tenants=tenants)
    except RadixKVError as error:
        parser.error(str(error))
