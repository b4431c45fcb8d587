"""The settings of the events of the cache, which a flag takes as JSON."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, fields
from typing import Any

import msgspec

from radixkv.errors import ConfigError, shortened
from radixkv.settings.checks import check_at_least, check_bool

MAX_BUFFER_STEPS = 1_000_000
"""Most batches of events that are kept for replays; a request for one looks at all of them."""
MAX_TOPIC_BYTES = 256

_IPC_ENDPOINT = re.compile(r"ipc://[^\0*][^\0]*")
"""ZeroMQ would replace a path of ``*`` with one that nobody knows."""
_TCP_ENDPOINT = re.compile(r"tcp://(\*|\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]*]+):([0-9]{1,5})")


@dataclass(frozen=True)
class KVEventsConfig:
    """Where events of the cache are published, under vLLM's and SGLang's names."""

    endpoint: str = "tcp://127.0.0.1:5557"
    """The ZeroMQ endpoint to bind for subscribers."""
    replay_endpoint: str | None = None
    """The endpoint to bind for replays and snapshots; None: there are none."""
    buffer_steps: int = 10_000
    """How many of the last batches can be replayed."""
    hwm: int = 100_000
    """Batches that wait for a subscriber to read them; one that is further behind loses some."""
    topic: str = ""
    """The first frame of each message, by which subscribers choose."""
    allow_remote: bool = False
    """Whether other machines may reach the endpoints. Events have the tokens of prompts, and there is no key."""
    salted_token_ids: bool = False
    """Whether events of prompts with a ``cache_salt`` have their tokens, too."""

    def __post_init__(self) -> None:
        check_bool("allow_remote", self.allow_remote)
        check_bool("salted_token_ids", self.salted_token_ids)
        _check_endpoint("endpoint", self.endpoint, allow_remote=self.allow_remote)
        if self.replay_endpoint is not None:
            _check_endpoint("replay_endpoint", self.replay_endpoint, allow_remote=self.allow_remote)
        if self.endpoint == self.replay_endpoint:
            raise ConfigError(f"replay_endpoint {shortened(self.endpoint)} is the endpoint, too; give it another")
        check_at_least(1, "buffer_steps", self.buffer_steps, MAX_BUFFER_STEPS)
        check_at_least(1, "hwm", self.hwm)
        if not isinstance(self.topic, str):
            raise ConfigError(f"topic {shortened(self.topic)} must be a text")
        if (n_bytes := len(self.topic.encode("utf-8", "surrogatepass"))) > MAX_TOPIC_BYTES:
            raise ConfigError(f"topic has {n_bytes} bytes; at most {MAX_TOPIC_BYTES}")


def parse_kv_events(text: str) -> KVEventsConfig | None:
    """Reads the configuration of events as JSON; returns None if it turns them off. Raises ``ConfigError``.

    vLLM turns them on by ``enable_kv_cache_events``, SGLang by ``publisher``.
    """
    try:
        given: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError):
        raise ConfigError(f"{shortened(text)} is not a JSON object") from None
    publisher, is_on = given.pop("publisher", None), given.pop("enable_kv_cache_events", None)
    if publisher not in (None, "zmq", "null"):
        raise ConfigError(f"publisher {shortened(publisher)} is unknown; use zmq or null")
    if is_on is not None and not isinstance(is_on, bool):
        raise ConfigError(f"enable_kv_cache_events {shortened(is_on)} must be true or false")
    given.pop("max_queue_size", None)  # vLLM's, of a queue that there is not
    known = {one.name for one in fields(KVEventsConfig)}
    if unknown := given.keys() - known:
        raise ConfigError(
            f"{shortened(min(unknown))} is no field of it; there are {', '.join(sorted(known))}, publisher and "
            "enable_kv_cache_events"
        )
    config = KVEventsConfig(**given)
    if is_on is None and publisher is None:
        raise ConfigError("it does not turn events on; add enable_kv_cache_events with true")
    return config if is_on is not False and publisher != "null" else None


def _check_endpoint(name: str, endpoint: object, *, allow_remote: bool) -> None:
    """Refuses what is no ZeroMQ endpoint to bind, and addresses that others can reach unless they may."""
    if isinstance(endpoint, str) and _IPC_ENDPOINT.fullmatch(endpoint):
        return
    parts = _TCP_ENDPOINT.fullmatch(endpoint) if isinstance(endpoint, str) else None
    if parts is None or not 0 < int(parts[2]) < 1 << 16:
        raise ConfigError(
            f"{name} {shortened(endpoint)} is no endpoint to bind; give one such as tcp://127.0.0.1:5557 or ipc://PATH"
        )
    host = parts[1]
    try:
        is_local = host == "localhost" or (host != "*" and ipaddress.ip_address(host.strip("[]")).is_loopback)
    except ValueError:
        raise ConfigError(
            f"{name} {shortened(endpoint)} has no IP address, and names are not looked up; use tcp://127.0.0.1:5557"
        ) from None
    if not (is_local or allow_remote):
        raise ConfigError(
            f"{name} {shortened(endpoint)}: other machines could read the tokens of all prompts there, without a "
            "key; use 127.0.0.1, or set allow_remote to true"
        )
