"""The settings: frozen dataclasses that validate their fields when they are made."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from typing import Literal, get_args

from radixkv.errors import ConfigError, shortened
from radixkv.settings.checks import (
    MAX_PRIORITY,
    MAX_SECONDS,
    MIN_PRIORITY,
    check_api_key,
    check_at_least,
    check_at_most,
    check_bool,
    check_bytes,
    check_cache_url,
    check_priority_range,
    check_seconds,
    check_text,
    is_number,
)
from radixkv.settings.tenants import TenantConfig, Tenants, check_rows, check_tenants

MAX_SEED = (1 << 63) - 1
MAX_BUFFER_STEPS = 1_000_000
"""Most batches of events that are kept for replays; a request for one looks at all of them."""
MAX_TOPIC_BYTES = 256
MAX_GHOST_CAPACITY = 1_000_000.0
MIN_HEARTBEAT_TIMEOUT_S = 2.0
"""Four times the interval at which a healthy runtime sends heartbeats."""

_IPC_ENDPOINT = re.compile(r"ipc://[^\0*][^\0]*")
"""ZeroMQ would replace a path of ``*`` with one that nobody knows."""
_TCP_ENDPOINT = re.compile(r"tcp://(\*|\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]*]+):([0-9]{1,5})")
_ORIGIN_PATTERN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9._\[\]:-]+")
"""An origin as browsers send it: in lower case, without a path."""

Device = Literal["cpu", "cuda"]
SchedulePolicy = Literal["lpm", "fcfs"]
LoadFormat = Literal["auto", "dummy"]
WritePolicy = Literal["through", "selective"]
LoadPolicy = Literal["auto", "always", "never"]
EvictionPolicyName = Literal["lru", "lfuda", "adaptive"]
KVCacheDtype = Literal["auto", "fp8", "fp8_e4m3"]
MetricsCompat = Literal["vllm", "sglang"]
GrammarBackend = Literal["xgrammar", "none"]
AttentionBackend = Literal["auto", "flashinfer", "triton"]


@dataclass(frozen=True)
class ModelConfig:
    """Which checkpoint to serve, how to read its weights, and on which device to compute."""

    model: str = "tiny"
    """A folder, a hub name, or ``tiny`` for the embedded model."""
    revision: str | None = None
    dtype: str = "auto"
    """The dtype of activations: ``float32`` (CPU only), ``bfloat16``, ``float16`` (CUDA only) or ``auto``.
    ``auto`` is float32 on the CPU; on CUDA it is the checkpoint's dtype if that has 16 bits, else bfloat16."""
    max_model_len: int | None = None
    """Maximum of prompt and output together, in tokens; None takes the checkpoint's own limit."""
    load_format: LoadFormat = "auto"
    """``dummy``: random weights in the shapes that ``config.json`` implies; no weights are read."""
    tokenizer: str | None = None
    """The folder or hub name whose tokenizer and chat template are used; None takes the model's."""
    device: Device | Literal["auto"] = "auto"
    """``auto``: CUDA if there is a GPU that runs the checkpoint, else the CPU."""
    enforce_eager: bool = False
    """Whether to capture no CUDA graphs: a faster start, but slower steps. No effect on the CPU."""
    quantization: str | None = None
    """``fp8``: round the layers' matrices to FP8, on CUDA. None, or the name of the checkpoint's own format: the
    weights stay as the checkpoint has them."""
    grammar_backend: GrammarBackend = "xgrammar"
    """What compiles grammars of structured outputs. ``none`` refuses structured outputs, and a server starts
    without the process that compiles them, which takes 4 s of processor time and 300 MB."""
    attention_backend: AttentionBackend = "auto"
    """What computes the attention of prompts on CUDA: ``flashinfer``, whose kernels are prebuilt or compiled by
    ``nvcc``; ``triton``, a kernel that needs neither; or ``auto``: FlashInfer where it can be had."""

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
        if self.grammar_backend not in get_args(GrammarBackend):
            raise ConfigError(f"grammar_backend {shortened(self.grammar_backend)} is unknown; use xgrammar or none")
        if self.attention_backend not in get_args(AttentionBackend):
            raise ConfigError(
                f"attention_backend {shortened(self.attention_backend)} is not supported; use auto, flashinfer or "
                "triton"
            )
        check_bool("enforce_eager", self.enforce_eager)
        check_text("quantization", self.quantization, "fp8")
        check_text("revision", self.revision, "a branch, tag or commit")
        check_text("tokenizer", self.tokenizer, "a folder or a hub name")
        if self.max_model_len is not None:
            check_at_least(1, "max_model_len", self.max_model_len)


@dataclass(frozen=True)
class CacheConfig:
    """The size of the KV pool and of its pages."""

    page_size: int = 16
    """Tokens per page."""
    kv_cache_memory_bytes: int | None = None
    """Size of the KV pool. None: 1 GiB on the CPU; on CUDA what ``gpu_memory_utilization`` leaves."""
    max_total_tokens: int | None = None
    """Size of the KV pool in tokens, instead of ``kv_cache_memory_bytes``; None: that one decides."""
    enable_prefix_caching: bool = True
    gpu_memory_utilization: float | None = None
    """The fraction of the GPU's memory for weights, pool and workspace together. None: 0.9. No effect on the
    CPU. A pool whose size is set may exceed it."""
    host_memory_bytes: int | None = None
    """Size of the host tier, which keeps copies of pages in host memory; None: no host tier."""
    cache_dir: str | None = None
    """A folder for the disk tier, which keeps what enters the host tier over restarts; None: no disk tier."""
    cache_dir_bytes: int | None = None
    """Maximum size of the files in ``cache_dir``. None: 64 GiB."""
    cache_url: str | None = None
    """A store that several servers share, instead of ``cache_dir``: ``s3://BUCKET/PREFIX`` or
    ``mooncake://HOST:PORT``; None: no shared store."""
    write_policy: WritePolicy = "through"
    """Which pages the host tier gets: ``through``: all computed ones; ``selective``: those that a second request
    has used."""
    load_policy: LoadPolicy = "auto"
    """What to do for a prompt whose pages are in the host tier: ``always`` load them, ``never``, or ``auto``: what
    is faster by measured rates, loading or computing."""
    eviction_policy: EvictionPolicyName = "lru"
    """Which pages are evicted first, on the device and in the host tier: ``lru``: the least recently used;
    ``lfuda``: those with the fewest uses, with aging; ``adaptive``: those that promise the fewest hits, as learnt
    from the traffic."""
    ghost_capacity: float = 4.0
    """How many evicted pages ``adaptive`` remembers in each tier, as a multiple of the pages cached."""
    pin_budget: float = 0.25
    """Fraction of each tier's pages that the pins of one ``cache_salt`` cover at most; 0: nothing is pinned."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """The dtype of K and V: ``auto``: that of activations; ``fp8`` and ``fp8_e4m3``: 8 bits with 4 of exponent, in
    which a pool of the same size holds twice the tokens of 16 bits. CUDA needs compute capability 8.9 for it."""

    def __post_init__(self) -> None:
        check_at_least(1, "page_size", self.page_size)
        if self.kv_cache_memory_bytes is not None:
            check_bytes("kv_cache_memory_bytes", self.kv_cache_memory_bytes)
        if self.max_total_tokens is not None:
            check_at_least(1, "max_total_tokens", self.max_total_tokens)
        if self.kv_cache_dtype not in get_args(KVCacheDtype):
            raise ConfigError(
                f"kv_cache_dtype {shortened(self.kv_cache_dtype)} is not supported; use auto, fp8 or fp8_e4m3"
            )
        check_bool("enable_prefix_caching", self.enable_prefix_caching)
        share = self.gpu_memory_utilization
        if share is not None and not (is_number(share) and 0 < share <= 1):  # also catches NaN
            raise ConfigError(f"gpu_memory_utilization {shortened(share)} must be above 0 and at most 1")
        if self.host_memory_bytes is not None:
            check_bytes("host_memory_bytes", self.host_memory_bytes)
            if not self.enable_prefix_caching:
                raise ConfigError(
                    "host_memory_bytes needs enable_prefix_caching: the host tier keeps pages of the prefix cache"
                )
        check_text("cache_dir", self.cache_dir, "a folder")
        if self.cache_dir_bytes is not None:
            check_bytes("cache_dir_bytes", self.cache_dir_bytes)
            if self.cache_dir is None:
                raise ConfigError(
                    f"cache_dir_bytes {self.cache_dir_bytes} needs cache_dir: without a folder there is no disk "
                    "tier; set --cache-dir"
                )
        check_cache_url(self.cache_url)
        if self.cache_url is not None and self.cache_dir is not None:
            places = f"cache_url {shortened(self.cache_url)} and cache_dir {shortened(self.cache_dir)}"
            raise ConfigError(f"{places} are both for what is behind the host tier; give one of them")
        for name, place in (("cache_dir", self.cache_dir), ("cache_url", self.cache_url)):
            if place is not None and self.host_memory_bytes is None:
                why = "pages go there and come back through the host tier; set --host-memory"
                raise ConfigError(f"{name} {shortened(place)} needs host_memory_bytes: {why}")
        if self.write_policy not in ("through", "selective"):
            raise ConfigError(
                f"write_policy {shortened(self.write_policy)} is unknown; use 'through' or 'selective'"
            )
        if self.load_policy not in ("auto", "always", "never"):
            raise ConfigError(
                f"load_policy {shortened(self.load_policy)} is unknown; use 'auto', 'always' or 'never'"
            )
        if self.eviction_policy not in get_args(EvictionPolicyName):
            raise ConfigError(
                f"eviction_policy {shortened(self.eviction_policy)} is unknown; use 'lru', 'lfuda' or 'adaptive'"
            )
        capacity = self.ghost_capacity
        if not (is_number(capacity) and 0 <= capacity <= MAX_GHOST_CAPACITY):  # also catches NaN
            raise ConfigError(
                f"ghost_capacity {shortened(capacity)} must be a number of at least 0, and of at most "
                f"{MAX_GHOST_CAPACITY:.0f}"
            )
        if not (is_number(self.pin_budget) and 0 <= self.pin_budget <= 1):  # also catches NaN
            raise ConfigError(f"pin_budget {shortened(self.pin_budget)} must be a number between 0 and 1")


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of steps and of the waiting queue, and the order of admission."""

    max_num_seqs: int | None = None
    """Maximum rows of a step. None: 256 on the CPU, 512 on CUDA; fewer if ``max_num_batched_tokens`` is small."""
    max_num_batched_tokens: int | None = None
    """Maximum tokens of a step. None: 2048 on the CPU, 8192 on CUDA; more if ``max_num_seqs`` needs them."""
    schedule_policy: SchedulePolicy = "lpm"
    """``lpm``: longest cached prefix first; ``fcfs``: oldest first. Both within a priority."""
    max_queued_requests: int = 4096
    """Maximum requests that wait for their first step; further ones are refused. As many others may wait for their
    grammars to be compiled."""
    lpm_window: int = 256
    """How many of the oldest waiting requests ``lpm`` ranks by cached prefix."""
    lpm_max_passes: int = 64
    """A request that was passed over this many times goes first."""
    queue_timeout_s: float | None = None
    """A request that waits longer for its first step fails. None: no limit."""
    target_itl_ms: float | None = 50.0
    """Milliseconds between the tokens of running answers, by which a step's tokens of prompts are limited while
    answers run; at least 256 are computed. None: no target."""
    num_reserved_decode_tokens: int = 64
    """Tokens of the KV pool that an admission leaves free for each running answer, which will soon need them; 0:
    none. More: fewer preemptions, but later first tokens."""
    max_reserved_decode_share: float = 1 / 16
    """The fraction of the KV pool that ``num_reserved_decode_tokens`` reserves at most."""

    def __post_init__(self) -> None:
        if self.max_num_seqs is not None:
            check_at_least(1, "max_num_seqs", self.max_num_seqs)
        if self.max_num_batched_tokens is not None:
            check_at_least(1, "max_num_batched_tokens", self.max_num_batched_tokens)
        check_at_least(1, "max_queued_requests", self.max_queued_requests)
        check_at_least(1, "lpm_window", self.lpm_window)
        check_at_least(1, "lpm_max_passes", self.lpm_max_passes)
        check_seconds("queue_timeout_s", self.queue_timeout_s)
        check_seconds("target_itl_ms", self.target_itl_ms, "milliseconds")
        check_at_least(0, "num_reserved_decode_tokens", self.num_reserved_decode_tokens)
        share = self.max_reserved_decode_share
        if not (is_number(share) and 0 <= share <= 1):  # also catches NaN
            raise ConfigError(f"max_reserved_decode_share {shortened(share)} must be a number between 0 and 1")
        if self.schedule_policy not in ("lpm", "fcfs"):
            raise ConfigError(f"schedule_policy {shortened(self.schedule_policy)} is unknown; use 'lpm' or 'fcfs'")


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


@dataclass(frozen=True)
class EngineConfig:
    """The settings of the runtime process."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    seed: int = 0
    """Seed of the generator that draws seeds for requests without one."""
    kv_events: KVEventsConfig | None = None
    """None: no events are published. Only the runtime process publishes them."""
    tenants: tuple[TenantConfig, ...] = ()
    """Who may use a server, the operator included; none: all clients are one. Only a server has tenants."""

    def __post_init__(self) -> None:
        check_tenants(self.tenants)
        if self.scheduler.max_num_seqs is not None:  # else the device has a default, and the runtime checks it
            check_rows(self.tenants, self.scheduler.max_num_seqs)
        check_at_most(MAX_SEED, "2**63 - 1", "seed", self.seed)
        if self.kv_events is not None and not self.cache.enable_prefix_caching:
            raise ConfigError(
                "kv_events_config needs enable_prefix_caching: events are about pages of the prefix cache"
            )
        max_rows, max_tokens = self.scheduler.max_num_seqs or 1, self.scheduler.max_num_batched_tokens
        minimum = max_rows - 1 + self.cache.page_size
        if max_tokens is not None and max_tokens < minimum:
            raise ConfigError(
                f"max_num_batched_tokens {max_tokens} is less than {minimum}: with max_num_seqs {max_rows} a step "
                f"must hold {max_rows - 1} decode tokens and one page ({self.cache.page_size} tokens) of a prompt"
            )


@dataclass(frozen=True)
class ServerConfig:
    """The settings of the HTTP server."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | tuple[str, ...] | None = None
    """The model names that clients may use, of which replies have the first; None takes the model's own."""
    heartbeat_timeout_s: float = 60.0
    """A runtime process that sends nothing for longer counts as hung."""
    max_body_bytes: int = 8 << 20
    """Maximum size of a request body."""
    api_key: str | None = field(default=None, repr=False)
    """Clients must send it as ``Authorization: Bearer``. None: no key, and ``host`` must be a loopback address.
    With ``tenants`` it is the operator's, and None: nobody may use the operator's routes."""
    chat_template: str | None = None
    """A file with a chat template to use instead of the tokenizer's own, or the name of one of the tokenizer's."""
    metrics_compat: MetricsCompat | None = None
    """The engine under whose names metrics are exported in addition; None: under radixkv's own only."""
    stats_interval_s: float | None = 10.0
    """Interval at which a line of statistics is logged while requests are in flight; None: never."""
    explain_contents: bool | None = None
    """Whether ``/cache/explain`` reveals which tokens are cached, and what other salts have cached. None: only
    without an API key, because then all clients are programs of this machine."""
    allowed_origins: tuple[str, ...] = ()
    """Web sites whose pages may use the server, such as ``https://app.example``; ``*`` for all needs an API key."""
    priority_range: tuple[int, int] | None = None
    """Lowest and highest ``priority`` that a request may have. None: all with an API key; only 0 without one,
    because then any program of this machine could go before all others."""
    tool_call_parser: str | None = None
    """The format of tool calls, or ``none``; None finds it out from the checkpoint."""
    reasoning_parser: str | None = None
    """The format of reasoning, or ``none``; None finds it out from the checkpoint."""
    keep_nonces: bool = False
    """Whether system messages keep texts that are known to differ from request to request."""
    request_log: str | None = None
    """A file to which each request that ends adds a line, or ``-`` for standard error; None: there are no lines."""
    otlp_traces_endpoint: str | None = None
    """URL of a collector that gets traces of requests, as OTLP over HTTP; None: there are no traces."""
    restart_runtime: bool = False
    """Whether a runtime process that dies or hangs is started again; otherwise the server ends."""
    canary_interval_s: float | None = None
    """Interval at which a known prompt is answered from the cache and without it, to compare the answers; None:
    never."""
    tenants: Tenants = field(default_factory=Tenants)
    """Who may use the server, by their keys; none: all who have ``api_key``."""
    return_tokens_as_token_ids: bool = False
    """Whether logprobs of completions and chats name tokens by their ids, in requests that do not say."""

    def __post_init__(self) -> None:
        check_at_most(65535, "65535", "port", self.port)
        check_api_key(self.api_key)
        _check_host(self.host, has_key=self.needs_key)
        _check_origins(self.allowed_origins, has_key=self.needs_key)
        if self.tenants.names:
            self._check_beside_tenants()
        if self.explain_contents is not None:
            check_bool("explain_contents", self.explain_contents)
        check_bool("keep_nonces", self.keep_nonces)
        check_bool("return_tokens_as_token_ids", self.return_tokens_as_token_ids)
        check_bool("restart_runtime", self.restart_runtime)
        check_priority_range(self.priority_range)
        for name in self.served_model_names:
            check_text("served_model_name", name, "a name")
        check_text("chat_template", self.chat_template, "a file")
        check_text("request_log", self.request_log, "a file")
        if self.otlp_traces_endpoint is not None and not re.match(r"https?://[^/]", str(self.otlp_traces_endpoint)):
            raise ConfigError(
                f"otlp_traces_endpoint {shortened(self.otlp_traces_endpoint)} is no URL of a collector; give one "
                "for HTTP, such as http://127.0.0.1:4318/v1/traces"
            )
        check_text("tool_call_parser", self.tool_call_parser, "a name")
        check_text("reasoning_parser", self.reasoning_parser, "a name")
        if self.metrics_compat not in (None, "vllm", "sglang"):
            raise ConfigError(f"metrics_compat {shortened(self.metrics_compat)} is unknown; use vllm or sglang")
        check_seconds("stats_interval_s", self.stats_interval_s)
        check_seconds("canary_interval_s", self.canary_interval_s)
        timeout_s = self.heartbeat_timeout_s
        if not (is_number(timeout_s) and MIN_HEARTBEAT_TIMEOUT_S <= timeout_s <= MAX_SECONDS):  # also catches NaN
            raise ConfigError(
                f"heartbeat_timeout_s {shortened(timeout_s)} must be at least {MIN_HEARTBEAT_TIMEOUT_S:g}, and at "
                f"most {MAX_SECONDS:.0f}: a healthy runtime sends a heartbeat every half second"
            )
        check_bytes("max_body_bytes", self.max_body_bytes)

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
