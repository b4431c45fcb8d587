"""Flags that the commands share, in the spellings of other engines too."""

from __future__ import annotations

import argparse
import difflib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from radixkv.cli.compat_flags import add_foreign_flags
from radixkv.compat import dtype_name
from radixkv.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from radixkv.errors import RadixKVError, shortened

QUEUE_SETTINGS = ("max_queued_requests", "queue_timeout_s", "lpm_window", "lpm_max_passes")
"""Of ``SchedulerConfig``: what only a command has where requests wait for each other."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and exits with 2. Flags cannot be shortened."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)
        self._aliases: dict[str, str] = {}
        """The settings that were given by a flag's further spelling, and that."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does; what stands behind an unknown flag is not taken for a command or a prompt."""
        for flag in self._own_flags(args or ()):
            action = self._option_string_actions.get(flag)
            if action is None:
                close = difflib.get_close_matches(flag, self._option_string_actions, n=1, cutoff=0.8)
                self.error(f"unknown flag {flag}{f'; did you mean {close[0]}?' if close else ''}")
            if flag != action.option_strings[0] and "_" in action.dest:  # others are words of every message
                self._aliases[action.dest] = flag
        return super().parse_known_args(args, namespace)

    def _own_flags(self, args: Sequence[str]) -> Iterator[str]:
        """Up to a command below this one, which has its own."""
        below = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        for arg in args:
            if arg == "--" or any(arg in action.choices for action in below):
                return
            if arg.startswith("--") and " " not in arg:  # argparse takes what has a space for no flag
                yield arg.partition("=")[0]

    def as_typed(self, message: str) -> str:
        """An error in one line, which names settings by the flags of other engines where those were given."""
        return re.sub(r"\w+", lambda word: self._aliases.get(word[0], word[0]), " ".join(message.split()))

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {self.as_typed(message)}; see '{self.prog} --help'\n")


def whole_number(text: str) -> int:
    """An ``int`` flag's value."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{shortened(text)} is not a whole number") from None


def number(text: str) -> float:
    """A ``float`` flag's value."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise argparse.ArgumentTypeError(f"{shortened(text)} is not a number")
    return value


def only(allowed: str, reason: str) -> Callable[[str], str]:
    """A flag that exists for its one value."""

    def check(text: str) -> str:
        if text != allowed:
            raise argparse.ArgumentTypeError(f"{shortened(text)} is not supported: {reason}; use {allowed}")
        return text

    return check


def add_engine_flags(parser: Parser, *, has_queue: bool = True) -> None:
    """The model, the pool and the scheduler; ``engine_config`` reads them.

    Args:
        has_queue: whether requests can wait for each other, so that the flags of that have a meaning.
    """
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model", "--model-path", metavar="MODEL", help="a folder, a hub name or 'tiny', the embedded default"
    )
    model.add_argument("--revision", help="branch, tag or commit on the hub")
    model.add_argument(
        "--tokenizer",
        "--tokenizer-path",
        metavar="TOKENIZER",
        help="folder or hub name of another tokenizer (default: the model's)",
    )
    model.add_argument(
        "--dtype",
        type=dtype_name,
        default="auto",
        help="float32, bfloat16, float16 (CUDA only) or auto: float32 on the CPU, 16 bits on CUDA (default: auto)",
    )
    model.add_argument(
        "--device",
        default="auto",
        help="cpu, cuda or auto: CUDA if there is a GPU that runs the model (default: auto)",
    )
    model.add_argument(
        "--max-model-len",
        "--context-length",
        type=whole_number,
        metavar="TOKENS",
        help="longest prompt and answer together (default: the checkpoint's)",
    )
    model.add_argument(
        "--load-format",
        default="auto",
        metavar="FORMAT",
        help="auto, or dummy for random weights of the shapes in config.json (default: auto)",
    )
    model.add_argument(
        "--generation-config",
        type=only("auto", "the checkpoint's generation_config.json says what requests leave out"),
        metavar="CONFIG",
        help="auto, the checkpoint's, and no other",
    )
    model.add_argument(
        "--kv-cache-dtype",
        type=only("auto", "KV has the type of --dtype"),
        metavar="DTYPE",
        help="auto, the type of --dtype, and no other",
    )
    model.add_argument(
        "--tensor-parallel-size",
        "-tp",
        "--tp-size",
        "--tp",
        type=only("1", "this release computes on one device"),
        metavar="N",
        help="1, and no other number",
    )
    model.add_argument(
        "--enforce-eager",
        "--disable-cuda-graph",
        action="store_true",
        help="on CUDA, no graphs are captured: a quicker start, and slower steps",
    )
    _add_cache_flags(parser.add_argument_group("prefix cache and memory"))
    scheduler = parser.add_argument_group("scheduler")
    _add_scheduler_flags(scheduler)
    if has_queue:
        _add_queue_flags(scheduler)
    add_foreign_flags(parser)


def engine_config(args: argparse.Namespace, *, model: str | None = None, seed: int = 0) -> EngineConfig:
    """What the flags say; ``model`` is a positional one. Wrong values end as wrong usage, with exit code 2."""
    parser: Parser = args.parser
    if model is not None and args.model is not None:
        parser.error(f"the model is given twice, as {model!r} and as --model {args.model!r}; give it once")
    given = model if model is not None else args.model
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
                enforce_eager=args.enforce_eager,
            ),
            cache=CacheConfig(
                page_size=args.page_size,
                kv_cache_memory_bytes=args.kv_cache_memory_bytes,
                max_total_tokens=args.max_total_tokens,
                enable_prefix_caching=args.enable_prefix_caching,
                gpu_memory_utilization=args.gpu_memory_utilization,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=args.max_num_seqs,
                max_num_batched_tokens=args.max_num_batched_tokens,
                schedule_policy=args.schedule_policy,
                **{name: vars(args)[name] for name in QUEUE_SETTINGS if name in args},
            ),
            seed=seed,
        )
    except RadixKVError as error:
        parser.error(str(error))


def engine_flags(config: EngineConfig) -> list[str]:
    """The flags that give this configuration again; what is as by default is left out."""
    model, cache, scheduler = config.model, config.cache, config.scheduler
    plain = EngineConfig()
    values = (
        ("--model", model.model, plain.model.model),
        ("--revision", model.revision, plain.model.revision),
        ("--dtype", model.dtype, plain.model.dtype),
        ("--max-model-len", model.max_model_len, plain.model.max_model_len),
        ("--load-format", model.load_format, plain.model.load_format),
        ("--tokenizer", model.tokenizer, plain.model.tokenizer),
        ("--device", model.device, plain.model.device),
        ("--page-size", cache.page_size, plain.cache.page_size),
        ("--kv-cache-memory-bytes", cache.kv_cache_memory_bytes, plain.cache.kv_cache_memory_bytes),
        ("--max-total-tokens", cache.max_total_tokens, plain.cache.max_total_tokens),
        ("--gpu-memory-utilization", cache.gpu_memory_utilization, plain.cache.gpu_memory_utilization),
        ("--max-num-seqs", scheduler.max_num_seqs, plain.scheduler.max_num_seqs),
        ("--max-num-batched-tokens", scheduler.max_num_batched_tokens, plain.scheduler.max_num_batched_tokens),
        ("--schedule-policy", scheduler.schedule_policy, plain.scheduler.schedule_policy),
        ("--max-queued-requests", scheduler.max_queued_requests, plain.scheduler.max_queued_requests),
        ("--queue-timeout", scheduler.queue_timeout_s, plain.scheduler.queue_timeout_s),
        ("--lpm-window", scheduler.lpm_window, plain.scheduler.lpm_window),
        ("--lpm-max-passes", scheduler.lpm_max_passes, plain.scheduler.lpm_max_passes),
    )
    flags = [f"{flag}={value}" for flag, value, default in values if value != default]
    switches = (
        ("--enforce-eager", model.enforce_eager),
        ("--no-enable-prefix-caching", not cache.enable_prefix_caching),
    )
    return flags + [flag for flag, is_on in switches if is_on]


def _add_cache_flags(group: argparse._ArgumentGroup) -> None:
    plain = CacheConfig()
    group.add_argument(
        "--page-size",
        "--block-size",
        type=whole_number,
        default=plain.page_size,
        metavar="TOKENS",
        help="tokens a page (default: %(default)s)",
    )
    group.add_argument(
        "--kv-cache-memory-bytes",
        type=whole_number,
        metavar="BYTES",
        help="the pool's size (default: 1 GiB on the CPU; on CUDA what --gpu-memory-utilization leaves)",
    )
    group.add_argument(
        "--max-total-tokens", type=whole_number, metavar="TOKENS", help="the pool's size in tokens instead"
    )
    group.add_argument(
        "--gpu-memory-utilization",
        "--mem-fraction-static",
        type=number,
        metavar="SHARE",
        help="of the GPU's memory, what weights, pool and workspace may take together (default: 0.9)",
    )
    group.add_argument("--enable-prefix-caching", action="store_true", default=True, help="the default")
    group.add_argument(
        "--no-enable-prefix-caching",
        "--disable-radix-cache",
        dest="enable_prefix_caching",
        action="store_false",
        help="compute every prompt whole",
    )


def _add_scheduler_flags(group: argparse._ArgumentGroup) -> None:
    plain = SchedulerConfig()
    group.add_argument(
        "--max-num-seqs",
        "--max-running-requests",
        type=whole_number,
        metavar="ROWS",
        help="most rows a step (default: 256 on the CPU, 512 on CUDA)",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        "--chunked-prefill-size",
        type=whole_number,
        metavar="TOKENS",
        help="most tokens a step (default: 2048 on the CPU, 8192 on CUDA)",
    )
    group.add_argument(
        "--schedule-policy",
        "--scheduling-policy",
        default=plain.schedule_policy,
        metavar="POLICY",
        help="lpm, longest cached prefix first, or fcfs (default: %(default)s)",
    )


def _add_queue_flags(group: argparse._ArgumentGroup) -> None:
    plain = SchedulerConfig()
    group.add_argument(
        "--max-queued-requests",
        type=whole_number,
        default=plain.max_queued_requests,
        metavar="REQUESTS",
        help="most requests that wait (default: %(default)s)",
    )
    group.add_argument(
        "--queue-timeout",
        dest="queue_timeout_s",
        type=number,
        metavar="SECONDS",
        help="a request that waits longer for its first step fails (default: it may wait for ever)",
    )
    group.add_argument(
        "--lpm-window",
        type=whole_number,
        default=plain.lpm_window,
        metavar="REQUESTS",
        help="how many of the oldest waiting requests lpm ranks (default: %(default)s)",
    )
    group.add_argument(
        "--lpm-max-passes",
        type=whole_number,
        default=plain.lpm_max_passes,
        metavar="TIMES",
        help="passed over this often, a request goes first (default: %(default)s)",
    )
