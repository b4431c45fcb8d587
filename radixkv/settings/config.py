"""The settings of the runtime process: frozen dataclasses that check their fields when they are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from radixkv.errors import ConfigError, shortened
from radixkv.settings.adapters import LoraModule, as_lora_modules, check_lora_modules
from radixkv.settings.checks import (
    MAX_LORA_RANK,
    check_apart,
    check_at_least,
    check_at_most,
    check_cache_url,
    check_number,
    check_seconds,
)
from radixkv.settings.kv_events import KVEventsConfig, parse_kv_events
from radixkv.settings.setting import (
    COUNT,
    FRACTION,
    SECONDS,
    SIZE,
    SWITCH,
    Kind,
    Setting,
    check_settings,
    choice,
    from_values,
    setting,
    settings_of,
    text,
    whole_number,
)
from radixkv.settings.speculative import DEFAULT_SPECULATION, SpeculativeConfig, as_speculative
from radixkv.settings.tenants import TenantConfig, check_rows, check_tenants
from radixkv.settings.values import (
    as_count,
    as_text,
    attention_backend_name,
    dtype_name,
    parse_number,
    task_name,
    write_policy_name,
)

MAX_SEED = (1 << 63) - 1
MAX_GHOST_CAPACITY = 1_000_000.0
MIN_BUDGET_PAGES = 2
"""Fewest pages of a ``kv_budget``: the one that was filled last, and the one that is being filled."""

Device = Literal["cpu", "cuda"]
SchedulePolicy = Literal["lpm", "fcfs"]
AdmissionPolicy = Literal["expected", "reserved"]
LoadFormat = Literal["auto", "dummy"]
WritePolicy = Literal["through", "selective"]
LoadPolicy = Literal["auto", "always", "never"]
EvictionPolicyName = Literal["lru", "lfuda", "adaptive"]
KVCacheDtype = Literal["auto", "fp8", "fp8_e4m3"]
KVEvictionName = Literal["none", "paged"]
GrammarBackend = Literal["xgrammar", "none"]
AttentionBackend = Literal["auto", "flashinfer", "triton"]
Task = Literal["generate", "embed", "score"]


def _check_model(name: str, model: object) -> None:
    if not isinstance(model, str) or not model:
        raise ConfigError(f"{name} is {shortened(model)}; give a folder, a hub name or 'tiny'")


@dataclass(frozen=True)
class ModelConfig:
    """Which checkpoint to serve, how to read its weights, and on which device to compute."""

    model: str = setting(
        "tiny",
        "a folder, a hub name, or 'tiny' for the embedded model (default: tiny)",
        Kind(_check_model, as_text),
        "MODEL",
        aliases="model_path",
    )
    revision: str | None = setting(
        None,
        "branch, tag or commit of the model's hub repository (default: main)",
        text("a branch, tag or commit"),
    )
    tokenizer: str | None = setting(
        None,
        "folder or hub name of another tokenizer (default: the model's)",
        text("a folder or a hub name"),
        "TOKENIZER",
        aliases="tokenizer_path",
    )
    """Its chat template is used, too."""
    dtype: str = setting(
        "auto",
        "type of weights and activations: float32 (CPU only), bfloat16, float16 (CUDA only), or auto for float32 "
        "on the CPU and a 16-bit type on CUDA (default: auto)",
        choice(("auto", "float32", "bfloat16", "float16"), "not supported", dtype_name),
    )
    """On CUDA ``auto`` is the checkpoint's dtype if that has 16 bits, else bfloat16."""
    quantization: str | None = setting(
        None,
        "fp8 rounds the weights to FP8 as they are loaded, on CUDA (default: the checkpoint's own format)",
        text("fp8"),
        "FORMAT",
        aliases="-q",
    )
    """With the name of the checkpoint's own format the weights stay as the checkpoint has them, too."""
    device: Device | Literal["auto"] = setting(
        "auto",
        "cpu, cuda, or auto for CUDA if there is a GPU that can run the model (default: auto)",
        choice(("auto", "cpu", "cuda")),
    )
    tensor_parallel_size: int = setting(
        1,
        "compute the model on so many ranks, each with a part of it on its own GPU or CPU (default: %(default)s)",
        COUNT,
        "RANKS",
        aliases="tp_size tp -tp",
    )
    max_model_len: int | None = setting(
        None,
        "maximum length of a prompt plus its answer, in tokens (default: the checkpoint's)",
        COUNT,
        "TOKENS",
        aliases="context_length",
    )
    load_format: LoadFormat = setting(
        "auto",
        "auto, or dummy for random weights of the shapes in config.json (default: auto)",
        choice(get_args(LoadFormat), "not supported"),
        "FORMAT",
    )
    enforce_eager: bool = setting(
        False,
        "run without CUDA graphs: a quicker start, but slower steps",
        SWITCH,
        aliases="disable_cuda_graph",
    )
    """No effect on the CPU."""
    grammar_backend: GrammarBackend = setting(
        "xgrammar",
        "what compiles structured outputs: xgrammar, or none to refuse them, which saves 4 s of processor time at "
        "the start of a server (default: %(default)s)",
        choice(get_args(GrammarBackend)),
        "BACKEND",
    )
    """Without it a server starts without the process that compiles grammars, which takes 300 MB."""
    attention_backend: AttentionBackend = setting(
        "auto",
        "what computes the attention of prompts on CUDA: flashinfer, triton (needs no nvcc and no prebuilt "
        "kernels), or auto for flashinfer where it can be had (default: %(default)s)",
        choice(get_args(AttentionBackend), "not supported", attention_backend_name),
        "BACKEND",
    )

    task: Task = setting(
        "generate",
        "what the model is for: generate for answers, embed for embeddings of texts, score for how well documents "
        "match a query, by a reranker (default: %(default)s)",
        choice(get_args(Task), "not supported", task_name),
        "TASK",
    )

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True)
class CacheConfig:
    """The size of the KV pool and of its pages, the tiers behind it, and what stays in them."""

    page_size: int = setting(
        16, "tokens per page of the KV cache (default: %(default)s)", COUNT, "TOKENS", aliases="block_size"
    )
    kv_cache_memory_bytes: int | None = setting(
        None,
        "size of the KV cache, such as 4GiB (default: 1 GiB on the CPU; on CUDA what --gpu-memory-utilization "
        "leaves)",
        SIZE,
        "SIZE",
    )
    max_total_tokens: int | None = setting(
        None, "size of the KV cache in tokens, instead of --kv-cache-memory-bytes", COUNT, "TOKENS"
    )
    kv_cache_dtype: KVCacheDtype = setting(
        "auto",
        "type of the KV cache: auto for that of --dtype, or fp8 (the same as fp8_e4m3), which takes half the "
        "memory of a 16-bit type (default: %(default)s)",
        choice(get_args(KVCacheDtype), "not supported"),
        "TYPE",
    )
    """``fp8`` has 4 bits of exponent. CUDA needs compute capability 8.9 for it."""
    gpu_memory_utilization: float | None = setting(
        None,
        "share of the GPU's memory for weights, KV cache and workspace together (default: 0.9)",
        Kind(
            partial(check_number, 0, 1, "above 0 and at most 1", excludes_low=True),
            parse=parse_number,
        ),
        "SHARE",
        aliases="mem_fraction_static",
    )
    """No effect on the CPU. A pool whose size is set may exceed it."""
    enable_prefix_caching: bool = setting(
        True,
        "reuse the KV of common prompt prefixes (the default)",
        SWITCH,
        opposites="no_enable_prefix_caching disable_radix_cache",
        opposites_help="compute every prompt in full, without the prefix cache",
    )
    host_memory_bytes: int | None = setting(
        None,
        "size of the host tier, such as 64GiB: host memory that keeps KV which no longer fits; "
        "--kv-offloading-size takes a number of GiB, --hicache-size of GB (default: none)",
        SIZE,
        "SIZE",
        flag="host_memory",
        aliases="host_memory_bytes kv_offloading_size hicache_size",
    )
    state_memory_bytes: int | None = setting(
        None,
        "memory for the states of recurrent layers that the prefix cache keeps, such as 4GiB; only for models with "
        "such layers (default: 1GiB on the CPU, a fifth of what the weights leave on CUDA)",
        SIZE,
        "SIZE",
        flag="state_memory",
        aliases="state_memory_bytes",
    )
    cache_dir: str | None = setting(
        None,
        "folder of the disk tier, which keeps KV over restarts; it holds the prompts' tokens (default: none)",
        text("a folder"),
        "FOLDER",
    )
    """It keeps what enters the host tier."""
    cache_dir_bytes: int | None = setting(
        None, "maximum size of the files in --cache-dir (default: 64GiB)", SIZE, "SIZE", flag="cache_dir_size"
    )
    cache_url: str | None = setting(
        None,
        "a store in which servers share KV, alone or beside --cache-dir: s3://BUCKET/PREFIX (needs radixkv[s3]), "
        "mooncake://HOST:PORT (needs radixkv[mooncake]), file:///FOLDER, shm://NAME?size=SIZE or "
        "shm://NAME?size=SIZE&folder=FOLDER; it holds the prompts' tokens (default: none)",
        Kind(check_cache_url),
        "URL",
    )
    load_ahead: bool = setting(
        False,
        "copy what waiting requests will need from lower tiers before it is their turn: shorter waits for most "
        "requests, longer ones for the last (default: when it is their turn)",
        SWITCH,
    )
    """What conversations need that are expected back is copied before they are, in any case."""
    write_policy: WritePolicy = setting(
        "through",
        "what the host tier gets: through for all that is computed, or selective for what a second request has "
        "used (default: %(default)s)",
        choice(get_args(WritePolicy), convert=write_policy_name, show=repr),
        "POLICY",
        aliases="hicache_write_policy",
    )
    load_policy: LoadPolicy = setting(
        "auto",
        "for prompts whose KV the host tier has: auto for loading or computing, whichever is faster by measured "
        "rates, always load, or never (default: %(default)s)",
        choice(get_args(LoadPolicy), show=repr),
        "POLICY",
    )
    eviction_policy: EvictionPolicyName = setting(
        "lru",
        "which KV is evicted first: lru for the least recently used, lfuda for what had the fewest uses, with "
        "aging, or adaptive for what promises the fewest hits, as learnt from the traffic (default: %(default)s)",
        choice(get_args(EvictionPolicyName), show=repr),
        "POLICY",
        aliases="radix_eviction_policy",
    )
    """On the device and in the host tier."""
    ghost_capacity: float = setting(
        4.0,
        "with --eviction-policy adaptive, how many evicted pages are remembered, as a multiple of the pages cached "
        "(default: %(default)s)",
        Kind(
            partial(
                check_number,
                0,
                MAX_GHOST_CAPACITY,
                f"a number of at least 0, and of at most {MAX_GHOST_CAPACITY:.0f}",
            ),
            parse=parse_number,
        ),
        "FACTOR",
    )
    """In each tier."""
    kv_eviction: KVEvictionName = setting(
        "none",
        "paged lets answers go on without the pages of low scores once they read --kv-budget tokens: faster and "
        "smaller, but approximate; none, or a request's own kv_budget (default: %(default)s)",
        choice(get_args(KVEvictionName), show=repr),
        "METHOD",
    )
    """See docs/paged-eviction.md."""
    kv_budget: int | None = setting(
        None,
        "with --kv-eviction paged, the most tokens whose KV each step of an answer reads (default: none)",
        COUNT,
        "TOKENS",
    )
    pin_budget: float = setting(
        0.25,
        "fraction of each tier that the pinned prompts of one cache_salt may cover, 0 for none (default: "
        "%(default)s)",
        FRACTION,
        "FRACTION",
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.host_memory_bytes is not None and not self.enable_prefix_caching:
            raise ConfigError(
                "host_memory_bytes needs enable_prefix_caching: the host tier keeps pages of the prefix cache"
            )
        if self.state_memory_bytes is not None and not self.enable_prefix_caching:
            raise ConfigError("state_memory_bytes needs enable_prefix_caching: the prefix cache keeps the states")
        if (self.kv_budget is None) != (self.kv_eviction == "none"):
            raise ConfigError(
                f"kv_eviction is {self.kv_eviction} and kv_budget {self.kv_budget}; set both, such as "
                "--kv-eviction paged --kv-budget 2048, or neither"
            )
        if self.kv_budget is not None and self.kv_budget < MIN_BUDGET_PAGES * self.page_size:
            raise ConfigError(
                f"kv_budget {self.kv_budget} is less than {MIN_BUDGET_PAGES} pages of page_size {self.page_size}; "
                f"set it to at least {MIN_BUDGET_PAGES * self.page_size}"
            )
        if self.cache_dir_bytes is not None and self.cache_dir is None:
            raise ConfigError(
                f"cache_dir_bytes {self.cache_dir_bytes} needs cache_dir: without a folder there is no disk tier; "
                "set --cache-dir"
            )
        if self.cache_url is not None and self.cache_dir is not None:
            check_apart(self.cache_dir, self.cache_url)
        for name, place in (("cache_dir", self.cache_dir), ("cache_url", self.cache_url)):
            if place is not None and self.host_memory_bytes is None:
                why = "pages go there and come back through the host tier; set --host-memory"
                raise ConfigError(f"{name} {shortened(place)} needs host_memory_bytes: {why}")


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of steps and of the waiting queue, and the order of admission."""

    max_num_seqs: int | None = setting(
        None,
        "maximum number of sequences in a step (default: 256 on the CPU, 512 on CUDA)",
        COUNT,
        "SEQUENCES",
        aliases="max_running_requests",
    )
    """The default is less if ``max_num_batched_tokens`` is small."""
    max_num_batched_tokens: int | None = setting(
        None,
        "maximum number of tokens in a step (default: 2048 on the CPU, 8192 on CUDA)",
        COUNT,
        "TOKENS",
        aliases="chunked_prefill_size",
    )
    """The default is more if ``max_num_seqs`` needs them."""
    schedule_policy: SchedulePolicy = setting(
        "lpm",
        "order of waiting requests: lpm for longest cached prefix first, or fcfs for first come, first served "
        "(default: %(default)s)",
        choice(get_args(SchedulePolicy), show=repr),
        "POLICY",
        aliases="scheduling_policy",
    )
    """Either order applies within one priority."""
    admission: AdmissionPolicy = setting(
        "reserved",
        "when a waiting request is admitted. expected: when running answers will have the pages that they are "
        "expected to need, by the lengths of answers before; reserved: when so many pages are free as "
        "--num-reserved-decode-tokens says (default: %(default)s)",
        choice(get_args(AdmissionPolicy), show=repr),
        "POLICY",
    )
    num_reserved_decode_tokens: int = setting(
        64,
        "tokens of the KV cache that an admission leaves free for each running answer: with more there are fewer "
        "preemptions, but first tokens come later (default: %(default)s)",
        Kind(partial(check_at_least, 0), as_count),
        "TOKENS",
    )
    max_reserved_decode_share: float = setting(
        1 / 16,
        "fraction of the KV cache that --num-reserved-decode-tokens reserves at most (default: %(default)s)",
        FRACTION,
        "FRACTION",
    )
    max_queued_requests: int = setting(
        4096,
        "maximum number of waiting requests; more are rejected (default: %(default)s)",
        COUNT,
        "REQUESTS",
        needs_queue=True,
    )
    """Counts only requests that wait for their first step. As many others may wait for their grammars."""
    queue_timeout_s: float | None = setting(
        None,
        "a request that waits longer than this for its first step fails (default: no limit)",
        SECONDS,
        "SECONDS",
        flag="queue_timeout",
        needs_queue=True,
    )
    target_itl_ms: float | None = setting(
        50.0,
        "while answers run, compute so many tokens of new prompts in a step that there are about this many "
        "milliseconds between the tokens of an answer; off: no limit (default: %(default)g)",
        Kind(
            partial(check_seconds, unit="milliseconds"),
            lambda value: None if value == "off" else value,
            parse_number,
        ),
        "MS",
        needs_queue=True,
    )
    """At least 256 tokens of prompts are computed."""
    lpm_window: int = setting(
        256,
        "number of oldest waiting requests that --schedule-policy lpm ranks by prefix (default: %(default)s)",
        COUNT,
        "REQUESTS",
        needs_queue=True,
    )
    lpm_max_passes: int = setting(
        64,
        "with --schedule-policy lpm, a request that others overtook this often goes first (default: %(default)s)",
        COUNT,
        "TIMES",
        needs_queue=True,
    )

    speculative_config: SpeculativeConfig | None = setting(
        DEFAULT_SPECULATION,
        "guess tokens of answers from the cache, the request's own text and recent answers, and check several in a "
        "step where that is measured to pay; fields as in vLLM; off: no guesses (default: %(default)s)",
        Kind(convert=as_speculative),
        "JSON",
    )

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True)
class AdapterConfig:
    """The adapters of the model, and their limits."""

    enable_lora: bool = setting(
        False,
        "serve LoRA adapters: those of --lora-modules, which turn it on themselves, and others that are loaded "
        "later (default: off)",
        SWITCH,
    )
    lora_modules: tuple[LoraModule, ...] = setting(
        (),
        "LoRA adapters in PEFT's format, each as NAME=FOLDER; requests with NAME as their model use it, see "
        "docs/adapters.md (default: none)",
        Kind(check_lora_modules, as_lora_modules, nargs="+"),
        "NAME=FOLDER",
        aliases="lora_paths",
    )
    max_loras: int | None = setting(
        None,
        "maximum number of adapters in a step; requests of others wait for their turn (default: on a GPU, which "
        "has memory for so many, 8, or --max-cpu-loras if that is less; no limit on the CPU)",
        COUNT,
        "ADAPTERS",
        aliases="max_loras_per_batch",
    )
    max_lora_rank: int = setting(
        16,
        f"maximum rank of an adapter, to {MAX_LORA_RANK} (default: %(default)s)",
        Kind(partial(check_at_least, 1, maximum=MAX_LORA_RANK), as_count),
        "RANK",
    )
    max_cpu_loras: int | None = setting(
        None,
        "maximum number of adapters that are loaded at once, in host memory; one more is refused (default: no "
        "limit on the CPU; on a GPU 64, or --max-loras or the number of --lora-modules if that is more)",
        COUNT,
        "ADAPTERS",
        aliases="max_loaded_loras",
    )

    def __post_init__(self) -> None:
        check_settings(self)
        n_adapters = len(self.lora_modules)
        if self.max_cpu_loras is not None and self.max_cpu_loras < n_adapters:
            raise ConfigError(
                f"max_cpu_loras {self.max_cpu_loras} is less than the {n_adapters} adapters of lora_modules, which "
                "are all kept in host memory; set it higher, or give fewer adapters"
            )
        if self.max_loras is not None and self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ConfigError(
                f"max_cpu_loras {self.max_cpu_loras} is less than max_loras {self.max_loras}, and all adapters are "
                "in host memory; set it higher"
            )

    @property
    def has_adapters(self) -> bool:
        """Whether requests may have adapters."""
        return self.enable_lora or bool(self.lora_modules)


@dataclass(frozen=True)
class EngineConfig:
    """The settings of the runtime process."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    seed: int = setting(
        0,
        "determines the seeds of requests without a seed (default: 0)",
        whole_number(partial(check_at_most, MAX_SEED, "2**63 - 1")),
        "SEED",
        aliases="random_seed",
    )
    kv_events: KVEventsConfig | None = setting(
        None,
        "publish which pages the cache has over ZeroMQ, for routers; fields as in vLLM and SGLang, such as "
        '\'{"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:5557"}\' (default: no events)',
        Kind(parse=parse_kv_events),
        "JSON",
        flag="kv_events_config",
    )
    """Only the runtime process publishes them."""
    adapters: AdapterConfig = AdapterConfig()
    tenants: tuple[TenantConfig, ...] = ()
    """Who may use a server, the operator included; none: all clients are one. Only a server has tenants."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> EngineConfig:
        """Returns the configuration of values by the names of ``ENGINE_SETTINGS``; other names are ignored.

        Raises:
            ConfigError: a value is wrong.
        """
        model, cache = from_values(ModelConfig, values), from_values(CacheConfig, values)
        scheduler, adapters = from_values(SchedulerConfig, values), from_values(AdapterConfig, values)
        return cls(model, cache, scheduler, values.get("seed", 0), adapters=adapters)

    def __post_init__(self) -> None:
        check_tenants(self.tenants)
        if self.scheduler.max_num_seqs is not None:  # else the device has a default, and the runtime checks it
            check_rows(self.tenants, self.scheduler.max_num_seqs)
        check_settings(self)
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


ENGINE_SETTINGS: Mapping[str, Setting] = {
    **settings_of(ModelConfig),
    **settings_of(CacheConfig),
    **settings_of(SchedulerConfig),
    **settings_of(AdapterConfig),
    "seed": settings_of(EngineConfig)["seed"],
}
"""The settings that ``LLM`` and a server have in common, by name."""
