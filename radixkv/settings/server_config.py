"""The settings of the HTTP server: a frozen dataclass that checks its fields when it is made."""

from __future__ import annotations

import ipaddress
import math
import re
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import msgspec

from radixkv.errors import ConfigError, shortened
from radixkv.settings.checks import (
    MAX_PRIORITY,
    MAX_SECONDS,
    MIN_PRIORITY,
    check_api_key,
    check_at_most,
    check_number,
    check_priority_range,
    check_seconds,
    check_text,
)
from radixkv.settings.setting import (
    COUNT,
    SECONDS,
    SIZE,
    SWITCH,
    Kind,
    check_settings,
    choice,
    setting,
    text,
    whole_number,
)
from radixkv.settings.tenants import Tenants
from radixkv.settings.values import parse_number, parse_whole_number

MIN_HEARTBEAT_TIMEOUT_S = 2.0
"""Four times the interval at which a healthy runtime sends heartbeats."""

_ORIGIN_PATTERN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9._\[\]:-]+")
"""An origin as browsers send it: in lower case, without a path."""

MetricsCompat = Literal["vllm", "sglang"]


def _check_names(name: str, names: object) -> None:
    for one in names if isinstance(names, tuple) else (names,):
        check_text("a name", name, one)


def _check_collector(name: str, url: object) -> None:
    if not re.match(r"https?://[^/]", str(url)):
        raise ConfigError(
            f"{name} {shortened(url)} is no URL of a collector; give one for HTTP, such as "
            "http://127.0.0.1:4318/v1/traces"
        )


def _parse_origins(text: str) -> tuple[str, ...]:
    try:
        return msgspec.json.decode(text, type=tuple[str, ...])
    except (msgspec.MsgspecError, UnicodeError):
        raise ConfigError(
            f"{shortened(text)} is not a JSON list of origins, such as '[\"https://app.example\"]'"
        ) from None


def _parse_priorities(text: str) -> tuple[int, ...]:
    return tuple(parse_whole_number(part) for part in text.split(","))


def _parse_interval(text: str) -> float | None:
    value = parse_number(text)
    if not 0 <= value < math.inf:
        raise ConfigError(f"{shortened(text)} must be a number of seconds, or 0 for never")
    return value or None


@dataclass(frozen=True)
class ServerConfig:
    """The settings of the HTTP server."""

    host: str = setting(
        "127.0.0.1",
        "address to listen on; one that other machines can reach needs --api-key (default: %(default)s)",
        Kind(),
    )
    port: int = setting(
        8000,
        "port to listen on; 0 for any free port (default: %(default)s)",
        whole_number(partial(check_at_most, 65535, "65535")),
    )
    served_model_name: str | tuple[str, ...] | None = setting(
        None,
        "the model's name in the API, or several that requests may use; replies and metrics have the first "
        "(default: --model)",
        Kind(_check_names, nargs="+"),
        "NAME",
    )
    api_key: str | None = setting(
        None, "key that clients must send as 'Authorization: Bearer KEY'", Kind(check_api_key), "KEY", repr=False
    )
    """None: no key, and ``host`` must be a loopback address. With ``tenants`` it is the key of the operator, and
    without it nobody may use the operator's routes."""
    tenants: Tenants = setting(
        Tenants(),
        "TOML file of tenants with their keys, weights and shares of rows and pages, see docs/tenants.md; "
        "--api-key is then the operator's key (default: none)",
        Kind(),
        "FILE",
    )
    """Without tenants all who have ``api_key`` may use the server."""
    allowed_origins: tuple[str, ...] = setting(
        (),
        "JSON list of the web sites whose pages may call the server (CORS), such as "
        "'[\"https://app.example\"]'; '[\"*\"]' for all sites needs --api-key (default: none)",
        Kind(parse=_parse_origins),
        "ORIGINS",
    )
    explain_contents: bool | None = setting(
        None,
        "whether /cache/explain shows cached tokens to every client, including those of other cache salts "
        "(default: only without --api-key)",
        SWITCH,
    )
    """Without a key all clients are programs of this machine."""
    keep_nonces: bool = setting(
        False,
        "leave texts in system messages that are known to differ from request to request, such as the billing "
        "header of Claude Code; they end every cached prefix (default: they are removed)",
        SWITCH,
    )
    learn_pauses: bool = setting(
        True,
        "learn how long tools and users take between the turns of a chat, and keep the KV of chats that are "
        "expected back soon (the default)",
        SWITCH,
        opposites="no_learn_pauses",
        opposites_help="evict what was not used for longest, whoever is expected back",
    )
    return_tokens_as_token_ids: bool = setting(
        False,
        "name tokens by their ids in logprobs, such as token_id:123; a request's field of this name wins (default: "
        "by their texts)",
        SWITCH,
    )
    priority_range: tuple[int, int] | None = setting(
        None,
        "lowest and highest priority that a request may have, such as --priority-range=-5,5 (default: any with "
        "--api-key, only 0 without)",
        Kind(check_priority_range, parse=_parse_priorities),
        "MIN,MAX",
    )
    """Without a key any program of this machine could go before all others."""
    chat_template: str | None = setting(
        None,
        "file with a chat template, or name of one of the tokenizer's, such as tool_use (default: the tokenizer's, "
        "as Transformers chooses)",
        text("a file"),
        "FILE",
    )
    tool_call_parser: str | None = setting(
        None,
        "format of tool calls: hermes, gemma4, llama3_json, mistral, qwen3_coder, an alias of vLLM or SGLang, or "
        "none (default: what the checkpoint or its chat template shows)",
        text("a name"),
        "NAME",
    )
    reasoning_parser: str | None = setting(
        None,
        "format of reasoning: qwen3, deepseek_r1, gemma4 or none (default: what the checkpoint or its chat "
        "template shows)",
        text("a name"),
        "NAME",
    )
    metrics_compat: MetricsCompat | None = setting(
        None,
        "vllm or sglang: export the metrics under that engine's names, too (default: only radixkv's names)",
        choice(get_args(MetricsCompat)),
        "ENGINE",
    )
    stats_interval_s: float | None = setting(
        10.0,
        "seconds between log lines with statistics while there is work; 0 for none (default: %(default)s)",
        Kind(check_seconds, parse=_parse_interval),
        "SECONDS",
        flag="stats_interval",
    )
    """None: there are no lines."""
    request_log: str | None = setting(
        None, "append these lines to a file instead of standard error", text("a file"), "FILE"
    )
    """A file to which each request that ends adds a line, or ``-`` for standard error; None: there are no lines."""
    otlp_traces_endpoint: str | None = setting(
        None,
        "collector of OpenTelemetry that gets traces of requests by OTLP over HTTP, such as "
        "http://127.0.0.1:4318/v1/traces; needs radixkv[otel] (default: no traces)",
        Kind(_check_collector),
        "URL",
    )
    heartbeat_timeout_s: float = setting(
        60.0,
        "seconds without a sign of life after which the runtime process counts as hung (default: %(default)s)",
        Kind(
            partial(
                check_number,
                MIN_HEARTBEAT_TIMEOUT_S,
                MAX_SECONDS,
                f"at least {MIN_HEARTBEAT_TIMEOUT_S:g}, and at most {MAX_SECONDS:.0f}: a healthy runtime sends a "
                "heartbeat every half second",
            ),
            parse=parse_number,
        ),
        "SECONDS",
        flag="heartbeat_timeout",
    )
    data_parallel_size: int = setting(
        1,
        "run so many replicas of the model, each with --tensor-parallel-size GPUs and a cache of its own; a prompt "
        "goes where most of it is cached, unless that replica is busy, see docs/replicas.md (default: %(default)s)",
        COUNT,
        "REPLICAS",
        aliases="dp_size dp -dp",
    )
    restart_runtime: bool = setting(
        False,
        "start the runtime process again when it dies or hangs: requests in flight fail, and new ones get a 503 "
        "until it is ready; the server ends when it dies after 5 restarts without 10 minutes of service (default: "
        "the server ends at once; with several replicas, they are started again always)",
        SWITCH,
    )
    canary_interval_s: float | None = setting(
        None,
        "seconds between two checks of the cache: a known prompt is answered from it and without it, and an answer "
        "that differs is logged and counted, and its pages are dropped (default: no checks)",
        SECONDS,
        "SECONDS",
        flag="canary_interval",
    )
    lora_dir: str | None = setting(
        None,
        "folder inside which clients may have adapters loaded by /v1/load_lora_adapter; needs --enable-lora "
        "(default: none are loaded over HTTP)",
        text("a folder"),
        "DIR",
    )
    max_body_bytes: int = setting(
        8 << 20, "maximum size of a request body, such as 32MiB (default: %(default)s)", SIZE, "SIZE"
    )

    def __post_init__(self) -> None:
        check_settings(self)
        _check_host(self.host, has_key=self.needs_key)
        _check_origins(self.allowed_origins, has_key=self.needs_key)
        if self.tenants.names:
            self._check_beside_tenants()

    @property
    def served_model_names(self) -> tuple[str, ...]:
        """The names of ``served_model_name``, each once; none for the model's own."""
        names = self.served_model_name
        return tuple(dict.fromkeys(names)) if isinstance(names, tuple) else () if names is None else (names,)

    @property
    def needs_key(self) -> bool:
        """Whether clients must send a key: the server's, or that of a tenant."""
        return self.api_key is not None or bool(self.tenants.names)

    @property
    def may_explain_contents(self) -> bool:
        """``explain_contents`` with its default filled in."""
        return not self.needs_key if self.explain_contents is None else self.explain_contents

    @property
    def allowed_priorities(self) -> tuple[int, int]:
        """``priority_range`` with its default filled in."""
        if self.priority_range is not None:
            return self.priority_range
        return (MIN_PRIORITY, MAX_PRIORITY) if self.needs_key else (0, 0)

    def _check_beside_tenants(self) -> None:
        """Refuses settings that contradict tenants. The error contains no key."""
        if self.api_key is not None and (name := self.tenants.names.get(self.api_key)) is not None:
            raise ConfigError(f"api_key is also a key of tenant {name!r}; the operator needs a key of its own")
        if self.explain_contents:
            raise ConfigError("explain_contents shows tenants what others have cached; leave it out with tenants")
        if self.priority_range is not None:
            raise ConfigError("priority_range is each tenant's own with tenants; set it in their file")


def _check_host(host: str, *, has_key: bool) -> None:
    if host == "localhost":
        return
    try:
        address = ipaddress.ip_address(str(host))
    except ValueError:
        raise ConfigError(
            f"host {shortened(host)} is neither an IP address nor 'localhost', and names are not looked up; "
            "use 127.0.0.1"
        ) from None
    if not (has_key or address.is_loopback):
        raise ConfigError(
            f"host {shortened(host)}: an address that other machines can reach needs --api-key; set one, or use "
            "127.0.0.1"
        )


def _check_origins(origins: object, *, has_key: bool) -> None:
    """Refuses strings that no browser sends as an origin, and ``*`` without an API key.

    With ``*`` and no key, any web page that somebody on this machine opens could use the server.
    """
    if not isinstance(origins, tuple):
        raise ConfigError(f"allowed_origins {shortened(origins)} must be a tuple of origins")
    for origin in origins:
        if origin == "*":
            if not has_key:
                raise ConfigError(
                    "allowed_origins '*': pages of every site may use the server only with --api-key; set one, or "
                    "list the sites"
                )
        elif not (isinstance(origin, str) and _ORIGIN_PATTERN.fullmatch(origin)):
            raise ConfigError(
                f"allowed_origins {shortened(origin)} is not an origin as browsers send it; write it in lower case "
                "and without a path, as https://app.example"
            )
