"""Flags shared by several commands, with the aliases of other engines."""

from __future__ import annotations

import argparse
import difflib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

from radixkv.errors import ConfigError, RadixKVError, shortened
from radixkv.settings.compat import Place, attention_backend_name, dtype_name, in_bytes, renamed, write_policy_name
from radixkv.settings.compat_flags import add_always_on_flags, add_refused_flags, check_implied_flags, spellings
from radixkv.settings.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from radixkv.settings.sizes import parse_bytes, parse_count

ValueT = TypeVar("ValueT")

QUEUE_SETTINGS = ("max_queued_requests", "queue_timeout_s", "target_itl_ms", "lpm_window", "lpm_max_passes")
"""Fields of ``SchedulerConfig`` that only commands with a request queue have flags for."""


_FLAGS = re.compile(r"--[\w-]+(?:/--?[\w-]+)*")
"""A flag, or argparse's list of the flags of one setting."""


class Parser(argparse.ArgumentParser):
    """A parser that reports wrong usage in one line and exits with code 2. Flags cannot be abbreviated."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)
        self._aliases: dict[str, str] = {}
        """By setting, by its first flag and by argparse's list of its flags: the alias that the user typed."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Does what argparse does, but rejects unknown flags first, so their values never pass for positionals."""
        typed: dict[str, str] = {}
        for flag in self._flags_before_subcommand(args or ()):
            action = self._option_string_actions.get(flag)
            if action is None:
                close = difflib.get_close_matches(flag, self._option_string_actions, n=1, cutoff=0.8)
                self.error(f"unknown flag {flag}{f'; did you mean {close[0]}?' if close else ''}")
            ours = action.option_strings[0]
            if typed.setdefault(ours, flag) != flag and not isinstance(action, argparse.BooleanOptionalAction):
                self._aliases.clear()  # the text has both spellings as typed
                self.error(f"{typed[ours]} and {flag} are the same setting; give one of them")
            if flag != ours:
                self._aliases |= dict.fromkeys((action.dest, ours, "/".join(action.option_strings)), flag)
        return super().parse_known_args(args, namespace)

    def _flags_before_subcommand(self, args: Sequence[str]) -> Iterator[str]:
        """Yields the flags before a subcommand, which parses its own."""
        below = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        for arg in args:
            if arg == "--" or any(arg in action.choices for action in below):
                return
            if arg.startswith("--") and " " not in arg:  # argparse treats an argument with a space as a positional
                yield arg.partition("=")[0]

    def with_typed_flags(self, message: str) -> str:
        """Returns an error message as one line, with settings replaced by the aliases that the user typed."""
        text = re.sub(_FLAGS, lambda flags: self._aliases.get(flags[0], flags[0]), " ".join(message.split()))
        return renamed(text, self._aliases)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {self.with_typed_flags(message)}; see '{self.prog} --help'\n")


def whole_number(text: str) -> int:
    """Parses the value of an integer flag."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{shortened(text)} is not a whole number") from None


def number(text: str) -> float:
    """Parses the value of a float flag."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise argparse.ArgumentTypeError(f"{shortened(text)} is not a number")
    return value


def _target_itl_ms(text: str) -> float | None:
    return None if text == "off" else number(text)


def count(text: str) -> int:
    """Parses the value of a flag for a number of tokens or other things, such as ``4096`` or ``4k``."""
    return _of_flag(parse_count, text)


def byte_size(text: str) -> int:
    """Parses the value of a flag for a size in bytes, such as ``64GiB``, ``500MB`` or ``1048576``."""
    return _of_flag(parse_bytes, text)


def _of_flag(parse: Callable[[str], ValueT], text: str) -> ValueT:
    try:
        return parse(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


class _ByteSize(argparse.Action):
    """Takes a size such as ``64GiB``, or under another engine's flag also a number in its unit."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        alias = str(option_string).removeprefix("--").replace("-", "_")
        try:
            setattr(namespace, self.dest, in_bytes(alias, values))
        except ConfigError as error:
            raise argparse.ArgumentError(self, str(error)) from None


def add_engine_flags(parser: Parser, *, has_queue: bool = True) -> None:
    """Adds the flags of the model, the page pool and the scheduler, which ``engine_config`` reads.

    Args:
        parser: the command's parser.
        has_queue: whether the command has a request queue and therefore its flags.
    """
    model = parser.add_argument_group("model")
    model.add_argument(
        *spellings("model"),
        metavar="MODEL",
        help="a folder, a hub name, or 'tiny' for the embedded model (default: tiny)",
    )
    model.add_argument("--revision", help="branch, tag or commit of the model's hub repository (default: main)")
    model.add_argument(
        *spellings("tokenizer"),
        metavar="TOKENIZER",
        help="folder or hub name of another tokenizer (default: the model's)",
    )
    model.add_argument(
        "--dtype",
        type=dtype_name,
        default="auto",
        help="type of weights and activations: float32 (CPU only), bfloat16, float16 (CUDA only), or auto for "
        "float32 on the CPU and a 16-bit type on CUDA (default: auto)",
    )
    model.add_argument(
        "--quantization",
        "-q",
        metavar="FORMAT",
        help="fp8 rounds the weights to FP8 as they are loaded, on CUDA (default: the checkpoint's own format)",
    )
    model.add_argument(
        "--device",
        default="auto",
        help="cpu, cuda, or auto for CUDA if there is a GPU that can run the model (default: auto)",
    )
    model.add_argument(
        *spellings("max_model_len"),
        type=count,
        metavar="TOKENS",
        help="maximum length of a prompt plus its answer, in tokens (default: the checkpoint's)",
    )
    model.add_argument(
        "--load-format",
        default="auto",
        metavar="FORMAT",
        help="auto, or dummy for random weights of the shapes in config.json (default: auto)",
    )
    model.add_argument(
        *spellings("enforce_eager"),
        action="store_true",
        help="run without CUDA graphs: a quicker start, but slower steps",
    )
    model.add_argument(
        "--grammar-backend",
        default=ModelConfig.grammar_backend,
        metavar="BACKEND",
        help="what compiles structured outputs: xgrammar, or none to refuse them, which saves 4 s of processor "
        "time at the start of a server (default: %(default)s)",
    )
    model.add_argument(
        "--attention-backend",
        type=attention_backend_name,
        default=ModelConfig.attention_backend,
        metavar="BACKEND",
        help="what computes the attention of prompts on CUDA: flashinfer, triton (needs no nvcc and no prebuilt "
        "kernels), or auto for flashinfer where it can be had (default: %(default)s)",
    )
    _add_cache_flags(parser.add_argument_group("prefix cache and memory"))
    scheduler = parser.add_argument_group("scheduler")
    _add_scheduler_flags(scheduler)
    if has_queue:
        _add_queue_flags(scheduler)
    add_always_on_flags(parser, Place.FLAG)
    add_refused_flags(parser)


def engine_config(args: argparse.Namespace, *, model: str | None = None, seed: int = 0) -> EngineConfig:
    """Returns the configuration that the flags describe. Wrong values end as wrong usage, with exit code 2.

    Args:
        args: the parsed flags.
        model: the command's positional model, if it has one.
        seed: the engine's seed.
    """
    parser: Parser = args.parser
    if model is not None and args.model is not None:
        parser.error(f"the model is given twice, as {model!r} and as --model {args.model!r}; give it once")
    given = model if model is not None else args.model
    if args.host_memory_bytes is None:
        check_implied_flags(parser, args, "host_memory_bytes")
    try:
        return EngineConfig(
            model=ModelConfig(
                model="tiny" if given is None else given,
                revision=args.revision,
                dtype=args.dtype,
                max_model_len=args.max_model_len,
                load_format=args.load_format,
                tokenizer=args.tokenizer,
                device=args.device,
                quantization=args.quantization,
                enforce_eager=args.enforce_eager,
                grammar_backend=args.grammar_backend,
                attention_backend=args.attention_backend,
            ),
            cache=CacheConfig(
                page_size=args.page_size,
                kv_cache_memory_bytes=args.kv_cache_memory_bytes,
                max_total_tokens=args.max_total_tokens,
                kv_cache_dtype=args.kv_cache_dtype,
                enable_prefix_caching=args.enable_prefix_caching,
                gpu_memory_utilization=args.gpu_memory_utilization,
                host_memory_bytes=args.host_memory_bytes,
                cache_dir=args.cache_dir,
                cache_dir_bytes=args.cache_dir_size,
                cache_url=args.cache_url,
                write_policy=args.write_policy,
                load_policy=args.load_policy,
                eviction_policy=args.eviction_policy,
                ghost_capacity=args.ghost_capacity,
                pin_budget=args.pin_budget,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=args.max_num_seqs,
                max_num_batched_tokens=args.max_num_batched_tokens,
                schedule_policy=args.schedule_policy,
                num_reserved_decode_tokens=args.num_reserved_decode_tokens,
                max_reserved_decode_share=args.max_reserved_decode_share,
                **{name: vars(args)[name] for name in QUEUE_SETTINGS if name in args},
            ),
            seed=seed,
        )
    except RadixKVError as error:
        parser.error(str(error))


def engine_flags(config: EngineConfig) -> list[str]:
    """Returns flags that reproduce a configuration, but for events and tenants. Default values are left out."""
    model, cache, scheduler = config.model, config.cache, config.scheduler
    defaults = EngineConfig()
    values = (
        ("--model", model.model, defaults.model.model),
        ("--revision", model.revision, defaults.model.revision),
        ("--dtype", model.dtype, defaults.model.dtype),
        ("--max-model-len", model.max_model_len, defaults.model.max_model_len),
        ("--load-format", model.load_format, defaults.model.load_format),
        ("--tokenizer", model.tokenizer, defaults.model.tokenizer),
        ("--device", model.device, defaults.model.device),
        ("--quantization", model.quantization, defaults.model.quantization),
        ("--grammar-backend", model.grammar_backend, defaults.model.grammar_backend),
        ("--attention-backend", model.attention_backend, defaults.model.attention_backend),
        ("--page-size", cache.page_size, defaults.cache.page_size),
        ("--kv-cache-memory-bytes", cache.kv_cache_memory_bytes, defaults.cache.kv_cache_memory_bytes),
        ("--max-total-tokens", cache.max_total_tokens, defaults.cache.max_total_tokens),
        ("--kv-cache-dtype", cache.kv_cache_dtype, defaults.cache.kv_cache_dtype),
        ("--gpu-memory-utilization", cache.gpu_memory_utilization, defaults.cache.gpu_memory_utilization),
        ("--host-memory", cache.host_memory_bytes, defaults.cache.host_memory_bytes),
        ("--cache-dir", cache.cache_dir, defaults.cache.cache_dir),
        ("--cache-dir-size", cache.cache_dir_bytes, defaults.cache.cache_dir_bytes),
        ("--cache-url", cache.cache_url, defaults.cache.cache_url),
        ("--write-policy", cache.write_policy, defaults.cache.write_policy),
        ("--load-policy", cache.load_policy, defaults.cache.load_policy),
        ("--eviction-policy", cache.eviction_policy, defaults.cache.eviction_policy),
        ("--ghost-capacity", cache.ghost_capacity, defaults.cache.ghost_capacity),
        ("--pin-budget", cache.pin_budget, defaults.cache.pin_budget),
        ("--max-num-seqs", scheduler.max_num_seqs, defaults.scheduler.max_num_seqs),
        ("--max-num-batched-tokens", scheduler.max_num_batched_tokens, defaults.scheduler.max_num_batched_tokens),
        ("--schedule-policy", scheduler.schedule_policy, defaults.scheduler.schedule_policy),
        (
            "--num-reserved-decode-tokens",
            scheduler.num_reserved_decode_tokens,
            defaults.scheduler.num_reserved_decode_tokens,
        ),
        (
            "--max-reserved-decode-share",
            scheduler.max_reserved_decode_share,
            defaults.scheduler.max_reserved_decode_share,
        ),
        ("--max-queued-requests", scheduler.max_queued_requests, defaults.scheduler.max_queued_requests),
        ("--queue-timeout", scheduler.queue_timeout_s, defaults.scheduler.queue_timeout_s),
        ("--target-itl-ms", scheduler.target_itl_ms or "off", defaults.scheduler.target_itl_ms),
        ("--lpm-window", scheduler.lpm_window, defaults.scheduler.lpm_window),
        ("--lpm-max-passes", scheduler.lpm_max_passes, defaults.scheduler.lpm_max_passes),
    )
    flags = [f"{flag}={value}" for flag, value, default in values if value != default]
    switches = (
        ("--enforce-eager", model.enforce_eager),
        ("--no-enable-prefix-caching", not cache.enable_prefix_caching),
    )
    return flags + [flag for flag, is_on in switches if is_on]


def _add_cache_flags(group: argparse._ArgumentGroup) -> None:
    defaults = CacheConfig()
    group.add_argument(
        *spellings("page_size"),
        type=count,
        default=defaults.page_size,
        metavar="TOKENS",
        help="tokens per page of the KV cache (default: %(default)s)",
    )
    group.add_argument(
        "--kv-cache-memory-bytes",
        type=byte_size,
        metavar="SIZE",
        help="size of the KV cache, such as 4GiB (default: 1 GiB on the CPU; on CUDA what "
        "--gpu-memory-utilization leaves)",
    )
    group.add_argument(
        "--max-total-tokens",
        type=count,
        metavar="TOKENS",
        help="size of the KV cache in tokens, instead of --kv-cache-memory-bytes",
    )
    group.add_argument(
        "--kv-cache-dtype",
        default=defaults.kv_cache_dtype,
        metavar="TYPE",
        help="type of the KV cache: auto for that of --dtype, or fp8 (the same as fp8_e4m3), which takes half the "
        "memory of a 16-bit type (default: %(default)s)",
    )
    group.add_argument(
        *spellings("gpu_memory_utilization"),
        type=number,
        metavar="SHARE",
        help="share of the GPU's memory for weights, KV cache and workspace together (default: 0.9)",
    )
    group.add_argument(
        "--enable-prefix-caching",
        action="store_true",
        default=True,
        help="reuse the KV of common prompt prefixes (the default)",
    )
    group.add_argument(
        *spellings("no_enable_prefix_caching"),
        dest="enable_prefix_caching",
        action="store_false",
        help="compute every prompt in full, without the prefix cache",
    )
    group.add_argument(
        "--host-memory",
        *spellings("host_memory_bytes"),
        dest="host_memory_bytes",
        action=_ByteSize,
        metavar="SIZE",
        help="size of the host tier, such as 64GiB: host memory that keeps KV which no longer fits; "
        "--kv-offloading-size takes a number of GiB, --hicache-size of GB (default: none)",
    )
    group.add_argument(
        "--cache-dir",
        metavar="FOLDER",
        help="folder of the disk tier, which keeps KV over restarts; it holds the prompts' tokens (default: none)",
    )
    group.add_argument(
        "--cache-dir-size",
        type=byte_size,
        metavar="SIZE",
        help="maximum size of the files in --cache-dir (default: 64GiB)",
    )
    group.add_argument(
        "--cache-url",
        metavar="URL",
        help="a store in which servers share KV, instead of --cache-dir: s3://BUCKET/PREFIX (needs radixkv[s3]) or "
        "mooncake://HOST:PORT (needs radixkv[mooncake]); it holds the prompts' tokens (default: none)",
    )
    group.add_argument(
        *spellings("write_policy"),
        type=write_policy_name,
        default=defaults.write_policy,
        metavar="POLICY",
        help="what the host tier gets: through for all that is computed, or selective for what a second request "
        "has used (default: %(default)s)",
    )
    group.add_argument(
        "--load-policy",
        default=defaults.load_policy,
        metavar="POLICY",
        help="for prompts whose KV the host tier has: auto for loading or computing, whichever is faster by "
        "measured rates, always load, or never (default: %(default)s)",
    )
    group.add_argument(
        *spellings("eviction_policy"),
        default=defaults.eviction_policy,
        metavar="POLICY",
        help="which KV is evicted first: lru for the least recently used, lfuda for what had the fewest uses, with "
        "aging, or adaptive for what promises the fewest hits, as learnt from the traffic (default: %(default)s)",
    )
    group.add_argument(
        "--ghost-capacity",
        type=number,
        default=defaults.ghost_capacity,
        metavar="FACTOR",
        help="with --eviction-policy adaptive, how many evicted pages are remembered, as a multiple of the pages "
        "cached (default: %(default)s)",
    )
    group.add_argument(
        "--pin-budget",
        type=number,
        default=defaults.pin_budget,
        metavar="FRACTION",
        help="fraction of each tier that the pinned prompts of one cache_salt may cover, 0 for none (default: "
        "%(default)s)",
    )


def _add_scheduler_flags(group: argparse._ArgumentGroup) -> None:
    defaults = SchedulerConfig()
    group.add_argument(
        *spellings("max_num_seqs"),
        type=count,
        metavar="SEQUENCES",
        help="maximum number of sequences in a step (default: 256 on the CPU, 512 on CUDA)",
    )
    group.add_argument(
        *spellings("max_num_batched_tokens"),
        type=count,
        metavar="TOKENS",
        help="maximum number of tokens in a step (default: 2048 on the CPU, 8192 on CUDA)",
    )
    group.add_argument(
        *spellings("schedule_policy"),
        default=defaults.schedule_policy,
        metavar="POLICY",
        help="order of waiting requests: lpm for longest cached prefix first, or fcfs for first come, first served "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--num-reserved-decode-tokens",
        type=count,
        default=defaults.num_reserved_decode_tokens,
        metavar="TOKENS",
        help="tokens of the KV cache that an admission leaves free for each running answer: with more there are "
        "fewer preemptions, but first tokens come later (default: %(default)s)",
    )
    group.add_argument(
        "--max-reserved-decode-share",
        type=number,
        default=defaults.max_reserved_decode_share,
        metavar="FRACTION",
        help="fraction of the KV cache that --num-reserved-decode-tokens reserves at most (default: %(default)s)",
    )


def _add_queue_flags(group: argparse._ArgumentGroup) -> None:
    defaults = SchedulerConfig()
    group.add_argument(
        "--max-queued-requests",
        type=count,
        default=defaults.max_queued_requests,
        metavar="REQUESTS",
        help="maximum number of waiting requests; more are rejected (default: %(default)s)",
    )
    group.add_argument(
        "--queue-timeout",
        dest="queue_timeout_s",
        type=number,
        metavar="SECONDS",
        help="a request that waits longer than this for its first step fails (default: no limit)",
    )
    group.add_argument(
        "--target-itl-ms",
        type=_target_itl_ms,
        default=defaults.target_itl_ms,
        metavar="MS",
        help="while answers run, compute so many tokens of new prompts in a step that there are about this many "
        "milliseconds between the tokens of an answer; off: no limit (default: %(default)g)",
    )
    group.add_argument(
        "--lpm-window",
        type=count,
        default=defaults.lpm_window,
        metavar="REQUESTS",
        help="number of oldest waiting requests that --schedule-policy lpm ranks by prefix (default: %(default)s)",
    )
    group.add_argument(
        "--lpm-max-passes",
        type=count,
        default=defaults.lpm_max_passes,
        metavar="TIMES",
        help="with --schedule-policy lpm, a request that others overtook this often goes first (default: "
        "%(default)s)",
    )
