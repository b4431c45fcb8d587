"""``radixkv bench``: measure a server."""

from __future__ import annotations

import argparse
import asyncio
import math
import signal
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radixkv.cli.arguments import Parser, add_engine_flags, engine_config, engine_flags, number, whole_number
from radixkv.config import EngineConfig
from radixkv.errors import ConfigError

if TYPE_CHECKING:
    from radixkv.bench.run import Bench, Outcome

COUNTS = (
    ("--num-prompts", "requests, of fewshot and unshared"),
    ("--num-sessions", "chats, of multiturn"),
    ("--num-turns", "questions a chat, of multiturn"),
    ("--num-shots", "worked examples a prompt"),
    ("--output-len", "tokens of each answer"),
    ("--max-concurrency", "most requests in flight at once"),
)
"""What a workload counts, as ``WorkloadChanges`` has it."""

GOODPUT_NAMES = ("ttft", "tpot", "e2el")


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "bench",
        help="measure a server, and what the prefix cache brings",
        description="Measure a server that is started for it, or one that is running.",
    )
    load = parser.add_argument_group("workload and load")
    load.add_argument(
        "--workload",
        default="fewshot",
        metavar="NAME",
        help="fewshot (prompts that share worked examples), multiturn (chats whose next question waits for the "
        "answer), unshared (prompts that share nothing), or a TOML file (default: fewshot)",
    )
    for flag, what in COUNTS:
        load.add_argument(flag, type=whole_number, metavar="COUNT", help=f"{what} (default: the workload's)")
    load.add_argument(
        "--request-rate",
        type=number,
        default=math.inf,
        help="requests, or sessions, that begin in a second, Poisson (default: inf, all at once)",
    )
    load.add_argument(
        "--dataset-path", type=Path, metavar="FILE", help="problems in GSM8K's format instead of made ones"
    )
    load.add_argument("--seed", type=whole_number, default=0, help="of the made texts and arrivals (default: 0)")
    load.add_argument(
        "--warmup-requests", type=whole_number, default=2, help="unrelated requests first (default: %(default)s)"
    )
    load.add_argument(
        "--goodput",
        nargs="+",
        type=_limit,
        default=[],
        metavar="NAME:MS",
        help="count requests that keep these limits, such as ttft:200 tpot:50 e2el:3000",
    )
    output = parser.add_argument_group("server and output")
    output.add_argument("--base-url", metavar="URL", help="a running OpenAI-compatible server")
    output.add_argument("--api-key", metavar="KEY", help="the key that this server asks for")
    output.add_argument(
        "--compare-cache", action="store_true", help="the same requests with the cache off, then on"
    )
    output.add_argument("--output-file", type=Path, metavar="FILE", help="append a JSON line a run")
    add_engine_flags(parser)
    parser.set_defaults(parser=parser, run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the report; 1 if a request failed, or if outputs depend on the cache."""
    parser: Parser = args.parser
    config = engine_config(args)
    _check_combination(args, config, parser)
    _check_ranges(args, parser)
    from radixkv.bench.run import Bench
    from radixkv.bench.workloads import WorkloadChanges, load_workload

    workload = load_workload(args.workload)
    changes = WorkloadChanges(**{name: vars(args)[name] for name in WorkloadChanges.__struct_fields__})
    try:
        workload = load_workload(args.workload, changes)
    except ConfigError as error:  # the workload itself is in order
        parser.error(str(error))
    bench = Bench.make(
        args.workload,
        workload,
        seed=args.seed,
        dataset=args.dataset_path,
        request_rate=args.request_rate,
        warmup_requests=args.warmup_requests,
        goodput=dict(args.goodput),
    )
    if args.output_file is not None:
        _append(args.output_file, "")  # a path that cannot be written shows before the run, not after it
    if args.base_url is not None:
        outcomes = [_run(bench.run(args.base_url, model=args.model, api_key=args.api_key, use_environment=True))]
    elif args.compare_cache:
        off = replace(config, cache=replace(config.cache, enable_prefix_caching=False))
        outcomes = [_run(_with_server(bench, each)) for each in (off, config)]
    else:
        outcomes = [_run(_with_server(bench, config))]
    return _report(args, outcomes)


def _check_combination(args: argparse.Namespace, config: EngineConfig, parser: Parser) -> None:
    if args.base_url is None and args.api_key is not None:
        parser.error("--api-key is for a running server; give its --base-url, or leave out --api-key")
    if args.base_url is not None:
        if args.compare_cache:
            parser.error("--compare-cache starts servers of its own; leave out --base-url")
        flags = [flag for flag in engine_flags(config) if not flag.startswith("--model=")]
        if flags:
            parser.error(
                f"{' '.join(flags)} cannot change the server at --base-url, which is running; leave it out"
            )
    if args.compare_cache and not config.cache.enable_prefix_caching:
        parser.error("--compare-cache measures with the cache off and on; leave out --no-enable-prefix-caching")


def _check_ranges(args: argparse.Namespace, parser: Parser) -> None:
    for name, is_in_range, limit in (
        ("seed", args.seed >= 0, "at least 0"),
        ("warmup_requests", args.warmup_requests >= 0, "at least 0"),
        ("request_rate", args.request_rate > 0, "above 0"),
    ):
        if not is_in_range:
            parser.error(f"{name} {vars(args)[name]} must be {limit}")


def _run(work: Coroutine[Any, Any, Outcome]) -> Outcome:
    """Runs it; a termination signal is taken as Ctrl-C is, so that a started server is stopped first."""

    async def stoppable() -> Outcome:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        for each in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(each) is not signal.SIG_IGN:  # as nohup sets it
                loop.add_signal_handler(each, task.cancel)
        return await work

    try:
        return asyncio.run(stoppable())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def _with_server(bench: Bench, config: EngineConfig) -> Outcome:
    from radixkv.bench.server import started_server

    async with started_server(engine_flags(config)) as address:
        return await bench.run(address, cache="on" if config.cache.enable_prefix_caching else "off")


def _report(args: argparse.Namespace, outcomes: list[Outcome]) -> int:
    import msgspec

    from radixkv.bench.report import box, comparison, failures, outputs_equal

    code = 0
    for outcome in outcomes:
        print(box(outcome.figures))
        if outcome.errors:
            print(failures(outcome.errors))
            code = 1
        if args.output_file is not None:
            _append(args.output_file, msgspec.json.encode(outcome.figures).decode() + "\n")
    if args.compare_cache:
        off, on = (outcome.figures for outcome in outcomes)
        print(comparison(off, on))
        if not outputs_equal(off, on):
            code = 1
    return code


def _append(path: Path, text: str) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"cannot write --output-file {path}: {error.strerror}") from None


def _limit(text: str) -> tuple[str, float]:
    name, _, value = text.partition(":")
    if name not in GOODPUT_NAMES:
        raise argparse.ArgumentTypeError(f"{text!r} names none of {', '.join(GOODPUT_NAMES)}; write ttft:200")
    try:
        limit = float(value)
    except ValueError:
        limit = math.nan
    if not limit > 0:  # also catches NaN
        raise argparse.ArgumentTypeError(f"{text!r} has no limit above 0 ms; write {name}:200")
    return name, limit
