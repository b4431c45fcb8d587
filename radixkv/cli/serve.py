"""``radixkv serve``: the HTTP server."""

from __future__ import annotations

import argparse
import math
import signal
from collections.abc import Sequence
from typing import Any

import msgspec

from radixkv.cli.arguments import Parser, add_engine_flags, engine_config, number, whole_number
from radixkv.cli.compat_flags import add_always_on
from radixkv.config import ServerConfig
from radixkv.errors import RadixKVError, shortened

_ALWAYS_ON = (
    "--enable-metrics",
    "--enable-cache-report",
    "--enable-prompt-tokens-details",
    "--disable-log-requests",
    "--no-enable-log-requests",
)
"""Flags that ask a server for what is so anyway."""


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP, as OpenAI's API",
        description="Serve a model over HTTP, as OpenAI's API.",
        formatter_class=_Help,
    )
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="the same as --model")
    plain = ServerConfig()
    http = parser.add_argument_group("HTTP")
    http.add_argument(
        "--host",
        default=plain.host,
        help="address to listen on; one that other machines reach needs --api-key (default: %(default)s)",
    )
    http.add_argument(
        "--port", type=whole_number, default=plain.port, help="port, 0 for any free one (default: %(default)s)"
    )
    http.add_argument(
        "--served-model-name",
        action=_OneName,
        metavar="NAME",
        help="the name clients use, one only (default: the model's)",
    )
    http.add_argument(
        "--api-key", metavar="KEY", help="clients must send it as 'Authorization: Bearer KEY' (default: no key)"
    )
    http.add_argument(
        "--allowed-origins",
        type=_origins,
        default=plain.allowed_origins,
        metavar="ORIGINS",
        help="JSON list of the web sites whose pages may use the server, such as '[\"https://app.example\"]'; "
        "all sites, '[\"*\"]', need --api-key (default: none)",
    )
    http.add_argument(
        "--explain-contents",
        action=argparse.BooleanOptionalAction,
        help="whether /cache/explain tells any client which tokens are cached, also of other salts "
        "(default: only without --api-key)",
    )
    http.add_argument(
        "--chat-template", metavar="FILE", help="used instead of the tokenizer's own template for chats"
    )
    http.add_argument(
        "--metrics-compat", metavar="ENGINE", help="repeat the metrics under the names of vllm or sglang"
    )
    http.add_argument(
        "--stats-interval",
        type=_interval,
        default=plain.stats_interval_s,
        metavar="SECONDS",
        help="between lines of figures on standard error while there is work; 0: never (default: %(default)s)",
    )
    http.add_argument(
        "--disable-log-stats",
        dest="stats_interval",
        action="store_const",
        const=0.0,
        help="the same as --stats-interval 0",
    )
    http.add_argument(
        "--heartbeat-timeout",
        type=number,
        default=plain.heartbeat_timeout_s,
        metavar="SECONDS",
        help="a runtime that is silent for longer counts as hung (default: %(default)s)",
    )
    http.add_argument(
        "--max-body-bytes",
        type=whole_number,
        default=plain.max_body_bytes,
        metavar="BYTES",
        help="largest request body (default: %(default)s)",
    )
    add_always_on(parser, _ALWAYS_ON)
    add_engine_flags(parser)
    parser.add_argument(
        "--seed", type=whole_number, default=0, help="for requests without a seed of their own (default: 0)"
    )
    parser.set_defaults(parser=parser, run=run)


def run(args: argparse.Namespace) -> int:
    """Serves until told to stop; the exit code."""
    engine = engine_config(args, model=args.positional_model, seed=args.seed)
    server = server_config(args)
    from radixkv.frontend.process import serve  # only now: other commands need no web server

    # Until the server takes its signals: both end the start in order, as Ctrl-C does.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    return serve(engine, server)


def server_config(args: argparse.Namespace) -> ServerConfig:
    """What the flags say; wrong values end as wrong usage."""
    parser: Parser = args.parser
    try:
        return ServerConfig(
            host=args.host,
            port=args.port,
            served_model_name=args.served_model_name,
            heartbeat_timeout_s=args.heartbeat_timeout,
            max_body_bytes=args.max_body_bytes,
            api_key=args.api_key,
            explain_contents=args.explain_contents,
            chat_template=args.chat_template,
            metrics_compat=args.metrics_compat,
            stats_interval_s=args.stats_interval or None,
            allowed_origins=args.allowed_origins,
        )
    except RadixKVError as error:
        parser.error(str(error))


class _OneName(argparse.Action):
    """Takes all the words that follow, as other engines do, so that none of them is the model unawares."""

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, nargs="+", **kwargs)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        name, *more = values
        if more:
            parser.error(
                f"{option_string} takes one name, not {shortened(more[0])} as well; a model comes before the flags"
            )
        setattr(namespace, self.dest, name)


class _Help(argparse.HelpFormatter):
    """Shows of a flag what it takes, and not what it takes only to refuse it."""

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        if isinstance(action, _OneName):
            return str(action.metavar)
        return super()._format_args(action, default_metavar)


def _origins(text: str) -> tuple[str, ...]:
    try:
        return msgspec.json.decode(text, type=tuple[str, ...])
    except (msgspec.MsgspecError, UnicodeError):
        raise argparse.ArgumentTypeError(
            f"{shortened(text)} is no JSON list of origins, such as '[\"https://app.example\"]'"
        ) from None


def _interval(text: str) -> float:
    value = number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{shortened(text)} must be a number of seconds, or 0 for never")
    return value
