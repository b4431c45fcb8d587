"""Settings: frozen, validated once when made, passed on as the fields that each part needs."""

from __future__ import annotations

import ipaddress
import math
import re
from dataclasses import dataclass, field, replace
from typing import Literal

from radixkv.errors import ConfigError, shortened

MAX_SEED = (1 << 63) - 1
MIN_HEARTBEAT_TIMEOUT_S = 2.0
"""Four times what a healthy runtime takes between two signs of life."""

MAX_KEY_CHARACTERS = 1024
_KEY = re.compile(rf"[!-~]{{1,{MAX_KEY_CHARACTERS}}}")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9._\[\]:-]+")
"""As browsers write one: in lower case, and without a path."""

Device = Literal["cpu", "cuda"]
SchedulePolicy = Literal["lpm", "fcfs"]
LoadFormat = Literal["auto", "dummy"]
MetricsCompat = Literal["vllm", "sglang"]

_ROWS: dict[Device, int] = {"cpu": 256, "cuda": 512}
_TOKENS: dict[Device, int] = {"cpu": 2048, "cuda": 8192}
_POOL_BYTES: dict[Device, int | None] = {"cpu": 1 << 30, "cuda": None}
_GPU_MEMORY_UTILIZATION = 0.9


def _whole_number(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} {shortened(value)} must be a whole number")
    return value


def _at_least(least: int, name: str, value: object) -> None:
    if _whole_number(name, value) < least:
        raise ConfigError(f"{name} {shortened(value)} must be at least {least}")


def _at_most(most: int, shown: str, name: str, value: object) -> None:
    if not 0 <= _whole_number(name, value) <= most:
        raise ConfigError(f"{name} {shortened(value)} is not between 0 and {shown}")


def _truth(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} {shortened(value)} must be True or False")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _seconds(name: str, value: float | None) -> None:
    if value is not None and not (_is_number(value) and 0 < value < math.inf):  # also catches NaN
        raise ConfigError(f"{name} {shortened(value)} must be a number of seconds above 0")


def _text(name: str, value: str | None, what: str) -> None:
    if value is not None and (not isinstance(value, str) or not value):
        is_what = "empty" if value == "" else shortened(value)
        raise ConfigError(f"{name} is {is_what}; give {what}, or leave it out")


@dataclass(frozen=True)
class ModelConfig:
    """Which checkpoint, how its weights are read, and what computes it."""

    model: str = "tiny"
    """A folder, a hub name, or ``tiny`` for the embedded model."""
    revision: str | None = None
    dtype: str = "auto"
    """What the device computes and keeps KV in: ``float32``, ``bfloat16``, ``float16`` (CUDA only), or ``auto``,
    which is float32 on the CPU, and on CUDA the checkpoint's own if that has 16 bits, else bfloat16."""
    max_model_len: int | None = None
    """Longest prompt and answer together, in tokens; None takes the checkpoint's own limit."""
    load_format: LoadFormat = "auto"
    """``dummy``: random weights of the shapes that ``config.json`` asks for; no weights are read."""
    tokenizer: str | None = None
    """The folder or hub name whose tokenizer and chat template are used; None takes the model's."""
    device: Device | Literal["auto"] = "auto"
    """``auto``: CUDA if there is a GPU that runs the checkpoint, else the CPU."""
    enforce_eager: bool = False
    """On CUDA no graphs are captured: a quicker start, and slower steps. The CPU has none anyway."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model is {shortened(self.model)}; give a folder, a hub name or 'tiny'")
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ConfigError(
                f"dtype {shortened(self.dtype)} is not supported; use auto, float32, bfloat16 or float16"
            )
        if self.load_format not in ("auto", "dummy"):
            raise ConfigError(f"load_format {shortened(self.load_format)} is not supported; use auto or dummy")
        if self.device not in ("auto", "cpu", "cuda"):
            raise ConfigError(f"device {shortened(self.device)} is unknown; use auto, cpu or cuda")
        _truth("enforce_eager", self.enforce_eager)
        _text("revision", self.revision, "a branch, tag or commit")
        _text("tokenizer", self.tokenizer, "a folder or a hub name")
        if self.max_model_len is not None:
            _at_least(1, "max_model_len", self.max_model_len)


@dataclass(frozen=True)
class CacheConfig:
    """How large the pool is and how it is cut."""

    page_size: int = 16
    """Tokens a page."""
    kv_cache_memory_bytes: int | None = None
    """None: 1 GiB on the CPU; on CUDA what ``gpu_memory_utilization`` leaves."""
    max_total_tokens: int | None = None
    """The pool in tokens instead; None lets ``kv_cache_memory_bytes`` decide."""
    enable_prefix_caching: bool = True
    gpu_memory_utilization: float | None = None
    """Of the GPU's memory, what all of this may take: weights, pool, workspace. None: 0.9. CUDA only. A pool whose
    size is given may take more."""

    def __post_init__(self) -> None:
        _at_least(1, "page_size", self.page_size)
        if self.kv_cache_memory_bytes is not None:
            _at_least(1, "kv_cache_memory_bytes", self.kv_cache_memory_bytes)
        if self.max_total_tokens is not None:
            _at_least(1, "max_total_tokens", self.max_total_tokens)
        _truth("enable_prefix_caching", self.enable_prefix_caching)
        share = self.gpu_memory_utilization
        if share is not None and not (_is_number(share) and 0 < share <= 1):  # also catches NaN
            raise ConfigError(f"gpu_memory_utilization {shortened(share)} must be above 0 and at most 1")


@dataclass(frozen=True)
class SchedulerConfig:
    """How requests become steps."""

    max_num_seqs: int | None = None
    """Most rows a step; None: 256 on the CPU, 512 on CUDA, fewer if ``max_num_batched_tokens`` is that small."""
    max_num_batched_tokens: int | None = None
    """Most tokens a step computes; None: 2048 on the CPU, 8192 on CUDA, more if ``max_num_seqs`` needs them."""
    schedule_policy: SchedulePolicy = "lpm"
    max_queued_requests: int = 4096
    """Most requests that wait; one more is refused."""
    lpm_window: int = 256
    """How many of the oldest waiting requests ``lpm`` ranks by cached prefix."""
    lpm_max_passes: int = 64
    """A request that was passed over this often goes first."""
    queue_timeout_s: float | None = None
    """A request that waits longer for its first step fails; None: it may wait for ever."""

    def __post_init__(self) -> None:
        if self.max_num_seqs is not None:
            _at_least(1, "max_num_seqs", self.max_num_seqs)
        if self.max_num_batched_tokens is not None:
            _at_least(1, "max_num_batched_tokens", self.max_num_batched_tokens)
        _at_least(1, "max_queued_requests", self.max_queued_requests)
        _at_least(1, "lpm_window", self.lpm_window)
        _at_least(1, "lpm_max_passes", self.lpm_max_passes)
        _seconds("queue_timeout_s", self.queue_timeout_s)
        if self.schedule_policy not in ("lpm", "fcfs"):
            raise ConfigError(f"schedule_policy {shortened(self.schedule_policy)} is unknown; use 'lpm' or 'fcfs'")


@dataclass(frozen=True)
class EngineConfig:
    """All that the runtime process needs to start."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    seed: int = 0
    """Seeds the requests that bring no seed of their own."""

    def __post_init__(self) -> None:
        _at_most(MAX_SEED, "2**63 - 1", "seed", self.seed)
        n_rows, n_tokens = self.scheduler.max_num_seqs or 1, self.scheduler.max_num_batched_tokens
        least = n_rows - 1 + self.cache.page_size
        if n_tokens is not None and n_tokens < least:
            raise ConfigError(
                f"max_num_batched_tokens {n_tokens} is less than {least}: a step must hold a token of each of "
                f"max_num_seqs {n_rows} running requests and one page ({self.cache.page_size} tokens) of a prompt"
            )


def with_defaults(config: EngineConfig, device: Device) -> EngineConfig:
    """The same with what was left out filled in, as far as it depends on the device; what was given stays.

    What was filled in may come again.

    Raises:
        ConfigError: a setting was given that the device does not have, or the pool's size twice.
    """
    cache, scheduler = config.cache, config.scheduler
    _check_pool(cache, device)
    n_rows, n_tokens = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
    if n_rows is None:
        n_rows = _ROWS[device] if n_tokens is None else min(_ROWS[device], n_tokens + 1 - cache.page_size)
    if n_tokens is None:
        n_tokens = max(_TOKENS[device], n_rows - 1 + cache.page_size)
    return EngineConfig(
        replace(config.model, device=device),
        _pool_of_cpu(cache) if device == "cpu" else _pool_of_cuda(cache),
        replace(scheduler, max_num_seqs=n_rows, max_num_batched_tokens=n_tokens),
        config.seed,
    )


def _check_pool(cache: CacheConfig, device: Device) -> None:
    n_bytes, n_tokens = cache.kv_cache_memory_bytes, cache.max_total_tokens
    if n_tokens is not None and n_bytes not in (None, _POOL_BYTES[device]):  # a default was filled in before
        raise ConfigError(
            f"kv_cache_memory_bytes {n_bytes} and max_total_tokens {n_tokens} both size the KV pool; set only one "
            "of them"
        )


def _pool_of_cpu(cache: CacheConfig) -> CacheConfig:
    if cache.gpu_memory_utilization is not None:
        raise ConfigError(
            f"gpu_memory_utilization {cache.gpu_memory_utilization:g} is of no use on the CPU, which this runs on; "
            "size the pool with kv_cache_memory_bytes or max_total_tokens"
        )
    n_bytes = cache.kv_cache_memory_bytes
    return replace(cache, kv_cache_memory_bytes=_POOL_BYTES["cpu"] if n_bytes is None else n_bytes)


def _pool_of_cuda(cache: CacheConfig) -> CacheConfig:
    share = cache.gpu_memory_utilization
    return replace(cache, gpu_memory_utilization=_GPU_MEMORY_UTILIZATION if share is None else share)


@dataclass(frozen=True)
class ServerConfig:
    """The HTTP side."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    """The name clients use; None takes the model's own."""
    heartbeat_timeout_s: float = 60.0
    """A runtime that is silent for longer counts as hung."""
    max_body_bytes: int = 8 << 20
    api_key: str | None = field(default=None, repr=False)
    """Clients must show it as ``Authorization: Bearer``; None: no key, and this machine only."""
    chat_template: str | None = None
    """A file with the chat template that is used instead of the tokenizer's own."""
    metrics_compat: MetricsCompat | None = None
    """Whose names metrics are repeated under."""
    stats_interval_s: float | None = 10.0
    """How often a line of figures is logged while there is work; None: never."""
    explain_contents: bool | None = None
    """Whether ``/cache/explain`` tells which tokens are cached, and what other salts have. None: only without a
    key, where all who ask are programs of this machine."""
    allowed_origins: tuple[str, ...] = ()
    """Web sites whose pages may use the server, such as ``https://app.example``; ``*``, all, needs a key."""

    def __post_init__(self) -> None:
        _at_most(65535, "65535", "port", self.port)
        _check_key(self.api_key)
        _check_host(self.host, has_key=self.api_key is not None)
        _check_origins(self.allowed_origins, has_key=self.api_key is not None)
        if self.explain_contents is not None:
            _truth("explain_contents", self.explain_contents)
        _text("served_model_name", self.served_model_name, "a name")
        _text("chat_template", self.chat_template, "a file")
        if self.metrics_compat not in (None, "vllm", "sglang"):
            raise ConfigError(f"metrics_compat {shortened(self.metrics_compat)} is unknown; use vllm or sglang")
        _seconds("stats_interval_s", self.stats_interval_s)
        if not self.heartbeat_timeout_s >= MIN_HEARTBEAT_TIMEOUT_S:  # also catches NaN
            raise ConfigError(
                f"heartbeat_timeout_s {self.heartbeat_timeout_s:g} must be at least {MIN_HEARTBEAT_TIMEOUT_S:g}: "
                "a healthy runtime gives a sign of life every half second"
            )
        _at_least(1, "max_body_bytes", self.max_body_bytes)

    @property
    def may_explain_contents(self) -> bool:
        """``explain_contents``, decided."""
        return self.api_key is None if self.explain_contents is None else self.explain_contents


def _check_key(key: str | None) -> None:
    """Refuses what no client can send. No message holds a key."""
    if key is not None and not (isinstance(key, str) and _KEY.fullmatch(key)):
        raise ConfigError(
            f"api_key must be 1 to {MAX_KEY_CHARACTERS} visible ASCII characters, without spaces; choose another"
        )


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
            f"host {shortened(host)}: an address that other machines reach needs --api-key; give one, or use "
            "127.0.0.1"
        )


def _check_origins(origins: object, *, has_key: bool) -> None:
    """Refuses what no browser sends, and all sites at once without a key: any page that somebody on this machine
    looks at could then use the server."""
    if not isinstance(origins, tuple):
        raise ConfigError(f"allowed_origins {shortened(origins)} must be a tuple of origins")
    for origin in origins:
        if origin == "*":
            if not has_key:
                raise ConfigError(
                    "allowed_origins '*': pages of every site may use a server with --api-key only; give one, or "
                    "name the sites"
                )
        elif not (isinstance(origin, str) and _ORIGIN.fullmatch(origin)):
            raise ConfigError(
                f"allowed_origins {shortened(origin)} is no origin as browsers send it; write it in lower case and "
                "without a path, as https://app.example"
            )
